/** What the app tells of the text on its desk, and of one that is being read. */

export interface Work {
  state: "idle" | "running" | "done" | "failed" | "stopped";
  doing: string;
  done: number;
  /** 0 if nobody knows. */
  total: number;
  stopping: boolean;
  error?: string;
}

export interface Desk {
  models: { name: string; about: string }[];
  edition: number;
  text: string;
  model: string;
  wrote: string;
  /** Heads of which it is known what they do. */
  heads: { kind: string; map: number; head: number }[];
  work: Work;
  /** Why a wish was not met at all. */
  refused?: string;
}

/** A text to read: who shall, and how many tokens to go on. */
export interface Wish {
  text: string;
  model: string;
  tokens: number;
}

/** Someone who lets models read texts. */
export interface Reader {
  desk(): Promise<Desk>;
  read(wish: Wish): Promise<Desk>;
  stop(): Promise<Desk>;
}
