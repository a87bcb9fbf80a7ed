/** What the app tells of what a model says comes next. */

/** How probable a token is, and its rank among all, from 1. */
export interface Chance {
  probability: number;
  rank: number;
}

/** A token as the model is, and with what is switched off. */
export interface Foretold {
  id: number;
  token: string;
  before: Chance;
  after?: Chance;
}

export interface Prediction {
  at: number;
  /** How many places there are to ask about. */
  places: number;
  /** The last tokens up to the place. */
  context: string[];
  tokens: Foretold[];
  /** The token that does follow, where the text goes on. */
  next: Foretold | null;
  /** Half the sum of what all tokens gained and lost, from 0 to 1; null: nothing is off. */
  moved: number | null;
}

/** What each head gives a logit directly, or why nobody can say. */
export interface Contributions {
  why: string;
  maps: { map: number; heads: number[] }[];
  token?: string;
  logit?: number;
  rest?: number;
}

/** How a text shall go on. */
export interface Continue {
  at: number;
  tokens: number;
  temperature: number;
  seed: number;
  off: string;
}

export interface WrittenToken {
  id: number;
  token: string;
  probability: number;
  ends: boolean;
}

/** Someone who asks a model what comes next. */
export interface Foreteller {
  prediction(at: number, off: string, signal: AbortSignal): Promise<Prediction>;
  contributions(at: number, token: number, signal: AbortSignal): Promise<Contributions>;
  continuation(how: Continue, signal: AbortSignal): AsyncIterable<WrittenToken>;
}

/** The lines of an answer while they come, each a JSON object. */
export async function* jsonLines<T>(body: ReadableStream<Uint8Array>): AsyncGenerator<T> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop()!;
    for (const line of lines) yield JSON.parse(line) as T;
  }
}
