/** Sources that compute what is asked for: the local app, and the kernel of a notebook. */

import type { Desk, Reader, Wish } from "./desk";
import { readTile, type Index, type Statistics, type Tile } from "./format";
import type { Cell, Line, Place, Source } from "./sources";

const AT_ONCE = 4;
const GONE = "the app does not answer; see whether regard view still runs where it was started";

type Asked = Record<string, string | number>;

/** Someone answers each question with bytes, a few at a time. */
abstract class RemoteSource implements Source {
  readonly kind = "app";
  private running = 0;
  private waiting: (() => void)[] = [];
  private kept = new Map<string, Promise<Float32Array>>();

  protected abstract ask(name: string, asked: Asked, signal?: AbortSignal): Promise<ArrayBuffer>;

  index(): Promise<Index> {
    return this.json("index", {});
  }
  statistics(map: number): Promise<Statistics> {
    return this.json("statistics", { map });
  }
  finest(): number {
    return 0;
  }
  strongest(): Promise<null> {
    return Promise.resolve(null);
  }

  async tile(place: Place, signal?: AbortSignal): Promise<Tile> {
    // Turning away closes the connection, at which the server stops between two bands.
    const { exact, ...rest } = place;
    const asked = { ...rest, ...(exact ? { exact: 1 } : {}) };
    return readTile(new DataView(await this.bytes("tile", asked, signal)));
  }
  largest(map: number, head: number): Promise<Float32Array> {
    return this.once("largest", { map, head });
  }
  visible(map: number): Promise<Float32Array> {
    return this.once("visible", { map });
  }
  row(map: number, heads: number[], query: number, signal?: AbortSignal): Promise<Line> {
    return this.line("row", { map, heads: heads.join(), query }, signal);
  }
  column(map: number, heads: number[], key: number, signal?: AbortSignal): Promise<Line> {
    return this.line("column", { map, heads: heads.join(), key }, signal);
  }
  async cell(place: Place, query: number, key: number, signal?: AbortSignal): Promise<Cell> {
    const { map, head, quantity } = place;
    return this.json<Cell>("cell", { map, head, quantity, query, key }, signal);
  }

  /** What was kept is of another text. */
  protected forget(): void {
    this.kept.clear();
  }
  private once(name: string, asked: Asked): Promise<Float32Array> {
    const key = JSON.stringify([name, asked]);
    const kept = this.kept.get(key) ?? this.floats(name, asked);
    kept.catch(() => this.kept.delete(key));
    this.kept.set(key, kept);
    return kept;
  }
  private async line(name: string, asked: Asked, signal?: AbortSignal): Promise<Line> {
    return { weights: await this.floats(name, asked, signal), exact: null };
  }
  private async floats(name: string, asked: Asked, signal?: AbortSignal): Promise<Float32Array> {
    return new Float32Array(await this.bytes(name, asked, signal));
  }
  private async json<T>(name: string, asked: Asked, signal?: AbortSignal): Promise<T> {
    return JSON.parse(new TextDecoder().decode(await this.bytes(name, asked, signal))) as T;
  }
  private async bytes(name: string, asked: Asked, signal?: AbortSignal): Promise<ArrayBuffer> {
    if (this.running >= AT_ONCE) await new Promise<void>((go) => this.waiting.push(go));
    this.running++;
    try {
      signal?.throwIfAborted();
      return await this.ask(name, asked, signal);
    } finally {
      this.running--;
      this.waiting.shift()?.();
    }
  }
}

export class AppSource extends RemoteSource implements Reader {
  /** Called when another text lies on the desk than the one that was opened. */
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

  desk(): Promise<Desk> {
    return this.told(fetch(`${this.base}desk`));
  }
  read(wish: Wish): Promise<Desk> {
    return this.sent("read", wish);
  }
  stop(): Promise<Desk> {
    return this.sent("stop", {});
  }

  protected async ask(name: string, asked: Asked, signal?: AbortSignal): Promise<ArrayBuffer> {
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
    return answer.arrayBuffer();
  }

  private sent(name: string, body: object): Promise<Desk> {
    const headers = { "Content-Type": "application/json" };
    return this.told(
      fetch(`${this.base}${name}`, { method: "POST", headers, body: JSON.stringify(body) }),
    );
  }
  private async told(asking: Promise<Response>): Promise<Desk> {
    const answer = await asking;
    if (!answer.ok) throw new Error((await answer.text()) || answer.statusText);
    return (await answer.json()) as Desk;
  }
}

/** What a notebook gives a widget: see anywidget. */
export interface Model {
  get(name: string): unknown;
  set(name: string, value: unknown): void;
  save_changes(): void;
  send(content: unknown): void;
  on(event: string, call: (...given: never[]) => void): void;
  off(event: string, call: (...given: never[]) => void): void;
}

/** Questions go to the kernel as messages, answers come back as buffers. */
export class WidgetSource extends RemoteSource {
  /** A widget may be shown in several places, all of which hear every answer. */
  private me = Math.random().toString(36).slice(2);
  private asked = 0;
  private open = new Map<
    string,
    { done: (bytes: ArrayBuffer) => void; fail: (e: Error) => void }
  >();

  constructor(private model: Model) {
    super();
    model.on("msg:custom", this.heard as never);
  }

  close(): void {
    this.model.off("msg:custom", this.heard as never);
  }

  private heard = (content: { number: string; error?: string }, buffers: DataView[]): void => {
    const waiting = this.open.get(content.number);
    this.open.delete(content.number);
    const view = buffers?.[0];
    if (!waiting) return;
    if (content.error !== undefined || !view)
      waiting.fail(new Error(content.error ?? "the kernel gave no answer"));
    else {
      const bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
      waiting.done(bytes.slice().buffer);
    }
  };

  protected ask(name: string, asked: Asked, signal?: AbortSignal): Promise<ArrayBuffer> {
    const number = `${this.me}-${++this.asked}`;
    return new Promise((done, fail) => {
      this.open.set(number, { done, fail });
      this.model.send({ number, name, asked });
      signal?.addEventListener("abort", () => {
        if (!this.open.delete(number)) return;
        this.model.send({ number, stop: true });
        fail(new DOMException("stopped", "AbortError"));
      });
    });
  }
}
