/** The local app, which answers requests, and has models read texts. */

import {
  jsonLines,
  type Continue,
  type Contributions,
  type Foreteller,
  type Prediction,
  type WrittenToken,
} from "./prediction";
import type { Example, ExampleRequest, Reader, ReaderStatus, ReadingRequest } from "./reader";
import { RemoteSource, type Asked } from "./remote_source";
import type { Index } from "./wire_format";

const GONE = "the app does not answer; see whether regard view still runs where it was started";

export class AppSource extends RemoteSource implements Reader, Foreteller {
  /** Called when the text that was opened is no longer kept. */
  outdated: () => void = () => {};
  /** The text that this window shows; others may show others. */
  private edition: string;
  /** The text whose index is asked for next. */
  private next: string;
  /** Whether this window had shown nothing before. */
  readonly fresh: boolean;

  /** Of the text that this window shows, or of one that stands beside it. */
  constructor(
    private base: string,
    private besides = "",
  ) {
    super();
    this.next = this.edition = besides || remembered();
    this.fresh = !this.edition;
  }

  /** A text that was read beside the one that is shown. */
  other(edition: number): AppSource {
    return new AppSource(this.base, String(edition));
  }

  override async index(): Promise<Index> {
    const index = await super.index().catch((error: unknown) => {
      // What this window showed is no longer kept: then what was read last.
      if (!this.next || this.besides || !(error instanceof DOMException)) throw error;
      this.next = "";
      return super.index();
    });
    this.edition = this.next;
    this.forget();
    if (!this.besides) remember(this.edition);
    return index;
  }

  /** Another text: what is asked before its index has come is still about the one before. */
  turn(edition: number | undefined): void {
    this.next = edition === undefined ? "" : String(edition);
  }

  page = async (signal: AbortSignal): Promise<Blob> =>
    new Blob([await this.ask("page", {}, signal)], { type: "text/html" });

  status(): Promise<ReaderStatus> {
    return this.statusOf(
      fetch(`${this.base}desk${this.edition ? `?edition=${this.edition}` : ""}`),
    );
  }
  /** What can be read to see something. */
  async gallery(): Promise<Example[]> {
    return (await (await fetch(`${this.base}gallery`)).json()) as Example[];
  }
  read(request: ReadingRequest | ExampleRequest): Promise<ReaderStatus> {
    return this.sent("read", request);
  }
  /** Read a text to compare with; where nothing is said, the one that is shown, by its model. */
  beside(text: string, model: string): Promise<ReaderStatus> {
    return this.sent("beside", { text, model, edition: this.edition });
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
    const edition = name === "index" ? this.next : this.edition;
    if (edition) words.push(["edition", edition]);
    const query = new URLSearchParams(words);
    const asking = fetch(`${this.base}${name}?${query}`, { signal: signal ?? null });
    const answer = await asking.catch((error: unknown) => {
      throw error instanceof TypeError ? new Error(GONE) : error;
    });
    if (answer.status === 205 && edition === this.edition && name !== "index") this.outdated();
    if (answer.status === 204 || answer.status === 205)
      throw new DOMException("stopped", "AbortError");
    if (!answer.ok) throw new Error((await answer.text()) || answer.statusText);
    if (name === "index") this.next = answer.headers.get("Edition") ?? "";
    return answer;
  }

  private sent(name: string, body: object): Promise<ReaderStatus> {
    const headers = { "Content-Type": "application/json" };
    return this.statusOf(
      fetch(`${this.base}${name}`, { method: "POST", headers, body: JSON.stringify(body) }),
    );
  }
  private async statusOf(asking: Promise<Response>): Promise<ReaderStatus> {
    const answer = await asking;
    if (!answer.ok) throw new Error((await answer.text()) || answer.statusText);
    return (await answer.json()) as ReaderStatus;
  }
}

/** Of each window, so that it shows the same when it is loaded again. */
const KEY = `regard-edition ${location.pathname}`;

function remembered(): string {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

function remember(edition: string): void {
  try {
    sessionStorage.setItem(KEY, edition);
  } catch {
    // Then it shows what was read last.
  }
}
