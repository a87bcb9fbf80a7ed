/** The numbers of what is seen: the cells in view, put together from their tiles. */

import { csv } from "../export/csv";
import type { Lens } from "../plot/lens";
import type { CachedTile } from "../plot/tile_cache";
import { shown, type Strongest } from "../sources/source";
import { SIDE, type MapInfo } from "../sources/wire_format";

export interface Region {
  /** Pairs along one side of a cell. */
  cell: number;
  /** The first query and key, and how many of each. */
  query: number;
  key: number;
  queries: number;
  keys: number;
  rows: number;
  columns: number;
  mean: Float32Array;
  most: Float32Array;
  /** Single pairs that are known beside cells that are larger. */
  pairs: { query: number; key: number; weight: number }[];
}

export function regionOf(
  lens: Lens,
  cell: number,
  tiles: CachedTile[],
  best: Strongest | null,
): Region {
  const cut = ([first, last]: [number, number], n: number) => {
    const from = Math.floor(first / cell);
    const to = Math.ceil(Math.min(last, n) / cell);
    return [from, Math.max(0, to - from)] as const;
  };
  const [top, rows] = cut(lens.queries, lens.map.queries);
  const [left, columns] = cut(lens.keys, lens.map.keys);
  const mean = new Float32Array(rows * columns);
  const most = new Float32Array(rows * columns);
  for (const { tile, place } of tiles) {
    if (!tile || 1 << place.level !== cell) continue;
    for (let r = 0; r < tile.rows; r++)
      for (let c = 0; c < tile.columns; c++) {
        const row = place.row * SIDE + r - top;
        const column = place.column * SIDE + c - left;
        if (row < 0 || row >= rows || column < 0 || column >= columns) continue;
        mean[row * columns + column] = tile.mean[r * tile.columns + c]!;
        most[row * columns + column] = tile.most[r * tile.columns + c]!;
      }
  }
  const [query, key] = [top * cell, left * cell];
  return {
    cell,
    query,
    key,
    queries: Math.min(rows * cell, lens.map.queries - query),
    keys: Math.min(columns * cell, lens.map.keys - key),
    rows,
    columns,
    mean,
    most,
    pairs: best ? pairsOf(lens, best) : [],
  };
}

function pairsOf(lens: Lens, { count, keys, weights }: Strongest): Region["pairs"] {
  const found: Region["pairs"] = [];
  const [first, last] = lens.queries;
  const [left, right] = lens.keys;
  for (let query = first; query < last; query++)
    for (let i = query * count; i < (query + 1) * count; i++) {
      const [key, weight] = [keys[i]!, weights[i]!];
      if (weight > 0 && key >= left && key < right) found.push({ query, key, weight });
    }
  return found;
}

/** Whether all pairs of a cell are masked. Where the mask is no band, nobody told: then what is
 * exactly zero counts as masked. */
function masked(map: MapInfo, query: number, key: number, cell: number, most: number): boolean {
  if (most > 0 || map.mask === "none") return false;
  if (!map.band) return true;
  const last = (at: number, n: number) => Math.min(at + cell, n) - 1;
  const ends = [query, last(query, map.queries)];
  return !ends.some((row) => shown(map, row, key) || shown(map, row, last(key, map.keys)));
}

/** One line a cell, then one for each single pair. What is masked has no number. */
export function regionTable(region: Region, texts: string[][], map: MapInfo): string {
  const { queryText, keyText } = map;
  const { cell, rows, columns, mean, most } = region;
  const line = (query: number, key: number, side: number, average?: number, largest?: number) => {
    const words = [texts[queryText]?.[query] ?? "", texts[keyText]?.[key] ?? ""];
    return [query, key, ...words, side, average, largest];
  };
  const lines = [];
  for (let row = 0; row < rows; row++)
    for (let column = 0; column < columns; column++) {
      const at = row * columns + column;
      const place = [region.query + row * cell, region.key + column * cell] as const;
      const found = masked(map, ...place, cell, most[at]!) ? [] : [mean[at], most[at]];
      lines.push(line(...place, cell, ...found));
    }
  for (const { query, key, weight } of region.pairs)
    lines.push(line(query, key, 1, weight, weight));
  return csv(["query", "key", "query_token", "key_token", "cell", "mean", "max"], lines);
}
