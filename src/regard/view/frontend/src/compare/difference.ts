/** How two heads differ: what each of two maps gives the same pairs of tokens. */

import { SPACE } from "../sentence/caption";
import type { Source } from "../sources/source";
import { extent, topLevel, type Index } from "../sources/wire_format";
import { aligned, type Pair } from "./alignment";

/** One of the two: a head, of a text that a model read. */
export interface Part {
  source: Source;
  index: Index;
  map: number;
  head: number;
}

/** What each query, or the mean of some, gives each key, or some keys together. */
export interface Shares {
  level: number;
  rows: number;
  columns: number;
  values: Float32Array;
}

export interface Difference {
  queries: Pair[];
  keys: Pair[];
  /** What the second gives each pair above the first, query by query. */
  cells: Float32Array;
  /** Of each query, the share of its attention that goes elsewhere. */
  rows: Float32Array;
  mean: number;
  /** The query that differs most, as its place among the pairs. */
  most: number;
}

export async function sharesOf(
  { source, index, map, head }: Part,
  signal: AbortSignal,
): Promise<Shares> {
  const info = index.maps[map]!;
  const level = Math.max(topLevel(info), source.finest(map));
  const place = { map, head, level, row: 0, column: 0, quantity: "weight", exact: !level };
  const { rows, columns, mean } = await source.tile(place, signal);
  const values = mean.map((value, at) => value * extent(at % columns, 1 << level, info.keys));
  return { level, rows, columns, values };
}

/** The tokens of two maps that stand for each other; null where the texts are too long for that. */
export function alignedParts(one: Part, other: Part, level: number): [Pair[], Pair[]] | null {
  const [a, b] = [one.index.maps[one.map]!, other.index.maps[other.map]!];
  const same = a.queries === b.queries && a.keys === b.keys;
  if (level) {
    const cells = (n: number) => Math.ceil(n / (1 << level));
    const all = (n: number) => aligned(undefined, undefined, [n, n]);
    return same ? [all(cells(a.queries)), all(cells(a.keys))] : null;
  }
  // Models write spaces in different ways.
  const bare = ({ index }: Part, text: number) =>
    index.texts[text]?.map((name) => name.replace(SPACE, ""));
  const sides = [
    [a.queryText, b.queryText, a.queries, b.queries],
    [a.keyText, b.keyText, a.keys, b.keys],
  ] as const;
  const [queries, keys] = sides.map(([x, y, m, n]) =>
    aligned(bare(one, x), bare(other, y), [m, n]),
  );
  return [queries!, keys!];
}

/** What tokens that only one text has are given counts as gone elsewhere. */
export function difference(
  one: Shares,
  other: Shares,
  [queries, keys]: [Pair[], Pair[]],
): Difference {
  const cells = new Float32Array(queries.length * keys.length);
  const rows = new Float32Array(queries.length);
  const sum = ({ values, columns }: Shares, row: number) =>
    values.subarray(row * columns, (row + 1) * columns).reduce((all, each) => all + each, 0);
  let [most, mean] = [0, 0];
  for (const [at, [a, b]] of queries.entries()) {
    let [moved, first, second] = [0, 0, 0];
    for (const [to, [x, y]] of keys.entries()) {
      const [before, after] = [
        one.values[a * one.columns + x]!,
        other.values[b * other.columns + y]!,
      ];
      cells[at * keys.length + to] = after - before;
      moved += Math.abs(after - before);
      first += before;
      second += after;
    }
    rows[at] = Math.max(0, moved + sum(one, a) - first + sum(other, b) - second) / 2;
    mean += rows[at]! / queries.length;
    if (rows[at]! > rows[most]!) most = at;
  }
  return { queries, keys, cells, rows, mean, most };
}
