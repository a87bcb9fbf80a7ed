/** The local app, which answers requests, and has models read texts. */

import {
  jsonLines,
  type Continue,
  type Contributions,
  type Foreteller,
  type Prediction,
  type WrittenToken,
} from "./prediction";
import type { Reader, ReaderStatus, ReadingRequest } from "./reader";
import { RemoteSource, type Asked } from "./remote_source";
import type { Index } from "./wire_format";

const GONE = "the app does not answer; see whether regard view still runs where it was started";

export class AppSource extends RemoteSource implements Reader, Foreteller {
  /** Called when another text was read than the one that was opened. */
  outdated: () => void = () => {};
  private edition = "";

  constructor(private base: string) {
    super();
  }

  override index(): Promise<Index> {
    this.edition = "";
    this.forget();
    return super.index();
  }

  page = async (signal: AbortSignal): Promise<Blob> =>
    new Blob([await this.ask("page", {}, signal)], { type: "text/html" });

  status(): Promise<ReaderStatus> {
    return this.told(fetch(`${this.base}desk`));
  }
  read(request: ReadingRequest): Promise<ReaderStatus> {
    return this.sent("read", request);
  }
  stop(): Promise<ReaderStatus> {
    return this.sent("stop", {});
  }

  // What is said next is not asked in turn with tiles: it goes before them.
  prediction(at: number, off: string, signal: AbortSignal): Promise<Prediction> {
    return this.plain("prediction", { at, ...(off ? { off } : {}) }, signal);
  }
  contributions(at: number, token: number, signal: AbortSignal): Promise<Contributions> {
    return this.plain("contributions", { at, token }, signal);
  }
  async *continuation(how: Continue, signal: AbortSignal): AsyncGenerator<WrittenToken> {
    const answer = await this.asked("continuation", { ...how }, signal);
    for await (const line of jsonLines<WrittenToken & { error?: string }>(answer.body!)) {
      if (line.error) throw new Error(line.error);
      yield line;
    }
  }

  private async plain<T>(name: string, asked: Asked, signal: AbortSignal): Promise<T> {
    return (await (await this.asked(name, asked, signal)).json()) as T;
  }

  protected async ask(name: string, asked: Asked, signal?: AbortSignal): Promise<ArrayBuffer> {
    return (await this.asked(name, asked, signal)).arrayBuffer();
  }

  private async asked(name: string, asked: Asked, signal?: AbortSignal): Promise<Response> {
    const words = Object.entries(asked).map(([k, v]) => [k, String(v)]);
    const { edition } = this;
    if (edition) words.push(["edition", edition]);
    const query = new URLSearchParams(words);
    const asking = fetch(`${this.base}${name}?${query}`, { signal: signal ?? null });
    const answer = await asking.catch((error: unknown) => {
      throw error instanceof TypeError ? new Error(GONE) : error;
    });
    if (answer.status === 205 && edition === this.edition) this.outdated();
    if (answer.status === 204 || answer.status === 205)
      throw new DOMException("stopped", "AbortError");
    if (!answer.ok) throw new Error((await answer.text()) || answer.statusText);
    if (name === "index") this.edition = answer.headers.get("Edition") ?? "";
    return answer;
  }

  private sent(name: string, body: object): Promise<ReaderStatus> {
    const headers = { "Content-Type": "application/json" };
    return this.told(
      fetch(`${this.base}${name}`, { method: "POST", headers, body: JSON.stringify(body) }),
    );
  }
  private async told(asking: Promise<Response>): Promise<ReaderStatus> {
    const answer = await asking;
    if (!answer.ok) throw new Error((await answer.text()) || answer.statusText);
    return (await answer.json()) as ReaderStatus;
  }
}
