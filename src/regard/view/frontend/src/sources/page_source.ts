/** The page: everything is in the document that it is read from. */

import {
  shown,
  type Cell,
  type Line,
  type Pair,
  type Place,
  type Source,
  type Strongest,
} from "./source";
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
  type Tour,
} from "./wire_format";

interface PageMap extends MapInfo {
  page: {
    level: number;
    strongest: number;
    statistics: Statistics;
    badges: string[] | null;
    chunk: string;
  };
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
  badges(map: number): Promise<string[] | null> {
    return Promise.resolve(this.of(map).page.badges);
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

  async pairs(map: number, head: number, count: number, first: number): Promise<Pair[] | null> {
    const { queries, keys } = this.of(map);
    const best = Array.from({ length: queries }, (_, query): Pair => ({
      query,
      key: 0,
      weight: 0,
    }));
    const offer = (query: number, key: number, weight: number) => {
      if (key >= first && weight > best[query]!.weight) best[query] = { query, key, weight };
    };
    const strongest = await this.strongest(map, head);
    if (strongest)
      strongest.keys.forEach((key, i) =>
        offer(Math.floor(i / strongest.count), key, strongest.weights[i]!),
      );
    else if (this.finest(map)) return null;
    else
      for (let row = 0; row * SIDE < queries; row++)
        for (let column = 0; column * SIDE < keys; column++) {
          const tile = await this.tile({ map, head, level: 0, row, column, quantity: "weight" });
          tile.mean.forEach((weight, i) => {
            const query = row * SIDE + Math.floor(i / tile.columns);
            offer(query, column * SIDE + (i % tile.columns), weight);
          });
        }
    return best
      .filter(({ weight }) => weight > 0)
      .sort((a, b) => b.weight - a.weight)
      .slice(0, count);
  }

  tour(): Promise<Tour | null> {
    return Promise.resolve(this.known.tour ?? null);
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
        if (!shown(info, query, key)) {
          exact.set(i, (exact.get(i) ?? 0) + 1);
          continue;
        }
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
      const tiles: DataView[] = [];
      for (let i = 0; i < count; i++) {
        const size = tileBytes(data, at);
        tiles.push(new DataView(data.buffer, at, size));
        at += size;
      }
      const each = Math.max(1, strongest);
      const weights = readHalves(data, at, each * info.queries);
      const keys = new Uint16Array(strongest * info.queries);
      at += 2 * weights.length;
      for (let i = 0; i < keys.length; i++) keys[i] = data.getUint16(at + 2 * i, true);
      at += 2 * keys.length;
      heads.push({
        largest: weights.filter((_, i) => i % each === 0),
        tiles,
        strongest: strongest ? { count: strongest, weights, keys } : null,
      });
    }
    return { visible, heads };
  }
}

function rankOf({ count, keys, weights }: Strongest, query: number, key: number): number {
  for (let i = query * count; i < (query + 1) * count; i++)
    if (keys[i] === key && weights[i]! > 0) return i - query * count;
  return -1;
}
