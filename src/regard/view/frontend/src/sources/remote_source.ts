/** A source that computes what is asked for. */

import type { Cell, Line, Pair, Place, Source } from "./source";
import { readTile, type Index, type Statistics, type Tile, type Tour } from "./wire_format";

const AT_ONCE = 4;

export type Asked = Record<string, string | number>;

/** Someone answers each question with bytes, a few at a time. */
export abstract class RemoteSource implements Source {
  readonly kind = "app";
  private running = 0;
  private waiting: (() => void)[] = [];
  private kept = new Map<string, Promise<Float32Array>>();

  protected abstract ask(name: string, asked: Asked, signal?: AbortSignal): Promise<ArrayBuffer>;

  index(): Promise<Index> {
    return this.json("index", {});
  }
  statistics(map: number, signal?: AbortSignal): Promise<Statistics> {
    return this.json("statistics", { map }, signal);
  }
  badges(map: number, signal?: AbortSignal): Promise<string[] | null> {
    return this.json("badges", { map }, signal);
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
  pairs(
    map: number,
    head: number,
    count: number,
    first: number,
    signal: AbortSignal,
  ): Promise<Pair[]> {
    return this.json("pairs", { map, head, count, first }, signal);
  }

  tour(map: number, head: number, pair: number[], signal?: AbortSignal): Promise<Tour> {
    const [query, key] = pair;
    return this.json(
      "tour",
      { map, head, ...(key === undefined ? {} : { query: query!, key }) },
      signal,
    );
  }

  figure = async (map: number, head: number, signal: AbortSignal): Promise<Blob> =>
    new Blob([await this.bytes("figure", { map, head }, signal)], { type: "application/pdf" });

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
