/** What views ask for, and of whom. */

import type { Index, MapInfo, Statistics, Tile, Tour } from "./wire_format";

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

/** A pair that stands out, and its weight. */
export interface Pair {
  query: number;
  key: number;
  weight: number;
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
  statistics(map: number, signal?: AbortSignal): Promise<Statistics>;
  /** A word for what each head of a map does, or none; null where the text is too long. */
  badges(map: number, signal?: AbortSignal): Promise<string[] | null>;
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
  /** The strongest pairs, one for each query at most; keys before the first are set aside. Null
   * where nobody knows them. */
  pairs(
    map: number,
    head: number,
    count: number,
    first: number,
    signal: AbortSignal,
  ): Promise<Pair[] | null>;
  /** How the weight of a pair comes about; of no pair, of one that shows what the head does. */
  tour(map: number, head: number, pair: number[], signal?: AbortSignal): Promise<Tour | null>;
  /** A head as a PDF with its fonts in it, where there is someone to draw it. */
  figure?: (map: number, head: number, signal: AbortSignal) => Promise<Blob>;
  /** Everything as one HTML file, where there is someone to write it. */
  page?: (signal: AbortSignal) => Promise<Blob>;
}

/** The least and the most that the mask lets a key lie behind its query, as far as a band can tell;
 * a side without an edge is infinite. */
export function edgesOf({ band }: Pick<MapInfo, "band">): [number, number] {
  return [band?.[0] ?? -Infinity, band?.[1] ?? Infinity];
}

/** The first and the last key that the mask lets a query see, as far as a band can tell. */
export function seenBy(map: Pick<MapInfo, "band" | "keys">, query: number): [number, number] {
  const [low, high] = edgesOf(map);
  const at = (edge: number) => Math.max(0, Math.min(query + edge, map.keys - 1));
  return [at(low), at(high)];
}

/** Whether the mask shows a pair, as far as a band can tell. */
export function shown(map: MapInfo, query: number, key: number): boolean {
  const [low, high] = edgesOf(map);
  return key - query >= low && key - query <= high;
}
