/** Where tiles come from: the local app, or the page they are written into. */

import {
  extent,
  readHalves,
  readTile,
  SIDE,
  tileBytes,
  type Index,
  type MapInfo,
  type Statistics,
  type Tile,
} from "./format";

export interface Place {
  map: number;
  head: number;
  level: number;
  row: number;
  column: number;
  quantity: string;
  exact?: boolean;
}

/** One pair: its weight and its rank in its row, from 1. Where only a bound is known, no rank. */
export interface Cell {
  weight: number;
  rank: number | null;
}

/** A row or column of a map. Where it is not exact everywhere, the places where it is. */
export interface Line {
  weights: Float32Array;
  exact: Set<number> | null;
}

/** The strongest keys of each query, exactly. */
export interface Strongest {
  count: number;
  weights: Float32Array;
  keys: Uint16Array;
}

export interface Source {
  readonly kind: "app" | "page";
  index(): Promise<Index>;
  statistics(map: number): Promise<Statistics>;
  /** The finest level there is of a map. */
  finest(map: number): number;
  tile(place: Place, signal?: AbortSignal): Promise<Tile>;
  /** The largest weight of each query. */
  largest(map: number, head: number): Promise<Float32Array>;
  /** How many keys each query may see. */
  visible(map: number): Promise<Float32Array>;
  row(map: number, heads: number[], query: number, signal?: AbortSignal): Promise<Line>;
  column(map: number, heads: number[], key: number, signal?: AbortSignal): Promise<Line>;
  cell(place: Place, query: number, key: number, signal?: AbortSignal): Promise<Cell | null>;
  strongest(map: number, head: number): Promise<Strongest | null>;
  /** Everything as one HTML file, where there is someone to write it. */
  page?: (signal: AbortSignal) => Promise<Blob>;
}

const AT_ONCE = 4;

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

export class AppSource extends RemoteSource {
  constructor(private base: string) {
    super();
  }

  page = async (signal: AbortSignal): Promise<Blob> =>
    new Blob([await this.ask("page", {}, signal)], { type: "text/html" });

  protected async ask(name: string, asked: Asked, signal?: AbortSignal): Promise<ArrayBuffer> {
    const query = new URLSearchParams(Object.entries(asked).map(([k, v]) => [k, String(v)]));
    const answer = await fetch(`${this.base}${name}?${query}`, { signal: signal ?? null });
    if (answer.status === 204) throw new DOMException("stopped", "AbortError");
    if (!answer.ok) throw new Error((await answer.text()) || answer.statusText);
    return answer.arrayBuffer();
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

interface PageMap extends MapInfo {
  page: { level: number; strongest: number; statistics: Statistics; chunk: string };
}

interface PageHead {
  largest: Float32Array;
  tiles: DataView[];
  strongest: Strongest | null;
}

interface Chunk {
  visible: Float32Array;
  heads: PageHead[];
}

/** Everything is in the document: one level of tiles, from which coarser ones are pooled. */
export class PageSource implements Source {
  readonly kind = "page";
  private chunks = new Map<number, Promise<Chunk>>();
  private tiles = new Map<string, Promise<Tile>>();

  constructor(
    private known: Index,
    private packed: (id: string) => string,
  ) {}

  index(): Promise<Index> {
    return Promise.resolve(this.known);
  }
  statistics(map: number): Promise<Statistics> {
    return Promise.resolve(this.of(map).page.statistics);
  }
  finest(map: number): number {
    return this.of(map).page.level;
  }
  async largest(map: number, head: number): Promise<Float32Array> {
    return (await this.chunk(map)).heads[head]!.largest;
  }
  async visible(map: number): Promise<Float32Array> {
    return (await this.chunk(map)).visible;
  }
  async strongest(map: number, head: number): Promise<Strongest | null> {
    return (await this.chunk(map)).heads[head]!.strongest;
  }

  tile(place: Place): Promise<Tile> {
    const { map, head, level, row, column } = place;
    const key = [map, head, level, row, column].join();
    let found = this.tiles.get(key);
    if (!found) {
      found = level === this.finest(map) ? this.stored(place) : this.pooled(place);
      this.tiles.set(key, found);
      if (this.tiles.size > 300) this.tiles.delete(this.tiles.keys().next().value!);
    }
    return found;
  }

  async row(map: number, heads: number[], query: number): Promise<Line> {
    const { keys } = this.of(map);
    const places = Array.from({ length: keys }, (_, key): [number, number] => [query, key]);
    return this.mean(map, heads, places);
  }

  async column(map: number, heads: number[], key: number): Promise<Line> {
    const { queries } = this.of(map);
    const places = Array.from({ length: queries }, (_, query): [number, number] => [query, key]);
    return this.mean(map, heads, places);
  }

  async cell(place: Place, query: number, key: number): Promise<Cell | null> {
    const { map, head } = place;
    if (this.finest(map) === 0) {
      const { weights } = await this.row(map, [head], query);
      const weight = weights[key]!;
      return { weight, rank: 1 + weights.reduce((n, other) => n + (other > weight ? 1 : 0), 0) };
    }
    const strongest = await this.strongest(map, head);
    if (!shown(this.of(map), query, key)) return { weight: 0, rank: null };
    if (!strongest) return null;
    const at = rankOf(strongest, query, key);
    if (at >= 0) return { weight: strongest.weights[query * strongest.count + at]!, rank: at + 1 };
    const tile = await this.tile(place);
    const [row, column] = [(query >> place.level) % SIDE, (key >> place.level) % SIDE];
    const most = tile.most[row * tile.columns + column]!;
    const last = strongest.weights[(query + 1) * strongest.count - 1]!;
    return { weight: Math.min(most, last), rank: null };
  }

  private of(map: number): PageMap {
    return this.known.maps[map] as PageMap;
  }

  /** The mean of some pairs over some heads. What is not known exactly is the mean of its cell,
   * and never more than the weakest of the strongest of its row. */
  private async mean(map: number, heads: number[], pairs: [number, number][]): Promise<Line> {
    const info = this.of(map);
    const level = this.finest(map);
    const weights = new Float32Array(pairs.length);
    const exact = new Map<number, number>();
    for (const head of heads) {
      const strongest = await this.strongest(map, head);
      const tiles = new Map<string, Tile>();
      for (const [i, [query, key]] of pairs.entries()) {
        if (!shown(info, query, key)) continue;
        const at = strongest ? rankOf(strongest, query, key) : -1;
        if (strongest && at >= 0) {
          weights[i]! += strongest.weights[query * strongest.count + at]! / heads.length;
          exact.set(i, (exact.get(i) ?? 0) + 1);
          continue;
        }
        const [row, column] = [query >> level, key >> level];
        const [down, right] = [Math.floor(row / SIDE), Math.floor(column / SIDE)];
        const name = `${down},${right}`;
        let tile = tiles.get(name);
        if (!tile) {
          const place = { map, head, level, row: down, column: right, quantity: "weight" };
          tiles.set(name, (tile = await this.tile(place)));
        }
        let value = tile.mean[(row % SIDE) * tile.columns + (column % SIDE)]!;
        if (strongest)
          value = Math.min(value, strongest.weights[(query + 1) * strongest.count - 1]!);
        weights[i]! += value / heads.length;
      }
    }
    const sure = [...exact].filter(([, count]) => count === heads.length).map(([i]) => i);
    return { weights, exact: level ? new Set(sure) : null };
  }

  private async stored(place: Place): Promise<Tile> {
    const across = Math.ceil(this.of(place.map).keys / (SIDE << place.level));
    const { heads } = await this.chunk(place.map);
    return readTile(heads[place.head]!.tiles[place.row * across + place.column]!);
  }

  /** Four tiles of the finer level in one: means of means by how many pairs are in each. */
  private async pooled(place: Place): Promise<Tile> {
    const { queries, keys } = this.of(place.map);
    const level = place.level - 1;
    const cell = 1 << level;
    const rows = Math.min(SIDE, Math.ceil(queries / (2 * cell)) - place.row * SIDE);
    const columns = Math.min(SIDE, Math.ceil(keys / (2 * cell)) - place.column * SIDE);
    const mean = new Float32Array(rows * columns);
    const most = new Float32Array(rows * columns);
    let empty = true;
    for (const down of [0, 1])
      for (const right of [0, 1]) {
        const row = 2 * place.row + down;
        const column = 2 * place.column + right;
        if (row * SIDE * cell >= queries || column * SIDE * cell >= keys) continue;
        const part = await this.tile({ ...place, level, row, column });
        if (part.empty) continue;
        empty = false;
        for (let r = 0; r < part.rows; r++)
          for (let c = 0; c < part.columns; c++) {
            const inRow = row * SIDE + r;
            const inColumn = column * SIDE + c;
            const to = ((inRow >> 1) - place.row * SIDE) * columns;
            const at = to + (inColumn >> 1) - place.column * SIDE;
            const pairs = extent(inRow, cell, queries) * extent(inColumn, cell, keys);
            const whole =
              extent(inRow >> 1, 2 * cell, queries) * extent(inColumn >> 1, 2 * cell, keys);
            const from = r * part.columns + c;
            mean[at]! += (part.mean[from]! * pairs) / whole;
            most[at] = Math.max(most[at]!, part.most[from]!);
          }
      }
    return { rows, columns, read: 0, empty, mean, most };
  }

  private chunk(map: number): Promise<Chunk> {
    let found = this.chunks.get(map);
    if (!found) this.chunks.set(map, (found = this.unpack(map)));
    return found;
  }

  private async unpack(map: number): Promise<Chunk> {
    const info = this.of(map);
    const { level, strongest, chunk } = info.page;
    const text = atob(this.packed(chunk));
    const bytes = Uint8Array.from(text, (sign) => sign.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const data = new DataView(await new Response(stream).arrayBuffer());
    const visible = new Float32Array(data.buffer.slice(0, 4 * info.queries));
    let at = 4 * info.queries;
    const side = SIDE << level;
    const count = Math.ceil(info.queries / side) * Math.ceil(info.keys / side);
    const heads: PageHead[] = [];
    for (let head = 0; head < info.heads; head++) {
      const largest = readHalves(data, at, info.queries);
      at += 2 * info.queries;
      const tiles: DataView[] = [];
      for (let i = 0; i < count; i++) {
        const size = tileBytes(data, at);
        tiles.push(new DataView(data.buffer, at, size));
        at += size;
      }
      let best: Strongest | null = null;
      if (strongest) {
        const n = strongest * info.queries;
        const keys = new Uint16Array(n);
        for (let i = 0; i < n; i++) keys[i] = data.getUint16(at + 2 * n + 2 * i, true);
        best = { count: strongest, weights: readHalves(data, at, n), keys };
        at += 4 * n;
      }
      heads.push({ largest, tiles, strongest: best });
    }
    return { visible, heads };
  }
}

/** Whether the mask shows a pair, as far as a band can tell. */
export function shown({ band }: MapInfo, query: number, key: number): boolean {
  if (!band) return true;
  const [low, high] = band;
  return (low === null || key - query >= low) && (high === null || key - query <= high);
}

function rankOf({ count, keys, weights }: Strongest, query: number, key: number): number {
  for (let i = query * count; i < (query + 1) * count; i++)
    if (keys[i] === key && weights[i]! > 0) return i - query * count;
  return -1;
}
