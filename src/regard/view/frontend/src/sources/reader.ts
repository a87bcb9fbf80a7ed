/** What the app tells of the text that was read last, and of one that is being read. */

export interface ReadingProgress {
  /** No other work has this number; and the text that comes of it has that one. */
  number: number;
  edition?: number;
  /** The number of a text that is read to be compared with. */
  beside?: number;
  state: "idle" | "running" | "done" | "failed" | "stopped";
  doing: string;
  done: number;
  /** 0 if nobody knows. */
  total: number;
  stopping: boolean;
  error?: string;
}

export interface ReaderStatus {
  models: { name: string; about: string }[];
  edition: number;
  text: string;
  model: string;
  wrote: string;
  /** Heads of which it is known what they do. */
  heads: { kind: string; map: number; head: number }[];
  /** Whether its model foretells tokens; or why it does not. */
  says: boolean;
  silent: string;
  work: ReadingProgress;
  /** Why a request was refused. */
  refused?: string;
  /** The text that was asked for to be compared with. */
  beside?: number;
}

/** A text to read: who shall, and how many tokens to go on. */
export interface ReadingRequest {
  text: string;
  model: string;
  tokens: number;
}

/** What the gallery has: what to look at, and where. */
export interface Example {
  name: string;
  title: string;
  says: string;
  model: string;
  address: string;
}

/** An example to read, by its name. */
export interface ExampleRequest {
  example: string;
}

/** Someone who lets models read texts. */
export interface Reader {
  status(): Promise<ReaderStatus>;
  read(request: ReadingRequest | ExampleRequest): Promise<ReaderStatus>;
  stop(): Promise<ReaderStatus>;
}
