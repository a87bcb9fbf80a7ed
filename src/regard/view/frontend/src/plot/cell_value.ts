/** What a cell counts for, under a pooling and a scale. */

import type { Pool, Scale } from "../drawing/colour";
import { extent, type MapInfo } from "../sources/wire_format";
import type { Facts } from "./row_facts";

/** Means and maxima of cells. */
export interface Pooled {
  mean: Float32Array;
  most: Float32Array;
}

/** One cell of a map, by its row and column among those of its size. */
export interface Spot {
  row: number;
  column: number;
  cell: number;
}

/** What a cell counts for, before it is given a colour. */
export function pooledValue(of: Pooled, at: number, spot: Spot, map: MapInfo, pool: Pool): number {
  if (pool === "max") return of.most[at]!;
  if (pool === "mean") return of.mean[at]!;
  const { row, column, cell } = spot;
  return of.mean[at]! * extent(row, cell, map.queries) * extent(column, cell, map.keys);
}

/** The value on the axis of the scale: itself, its share of the row's largest, or of even weight. */
export function scaled(found: number, scale: Scale, facts: Facts | null, row: number): number {
  if (scale === "row")
    return facts && facts.largest[row]! > 0 ? found / facts.largest[row]! : found;
  if (scale === "ratio") return facts && facts.even[row]! > 0 ? found / facts.even[row]! : found;
  return found;
}

/** What a cell counts for, on the axis of the scale. */
export function scaledValue(
  of: Pooled,
  at: number,
  spot: Spot,
  map: MapInfo,
  { pool, scale }: { pool: Pool; scale: Scale },
  facts: Facts | null,
): number {
  // Even attention has a sum as well: over it, a sum is what a mean is over an even weight.
  const pooling = scale === "ratio" && pool === "sum" ? "mean" : pool;
  return scaled(pooledValue(of, at, spot, map, pooling), scale, facts, spot.row);
}
