/** Tiles that were fetched, and their pictures under the colours of the moment. */

import { place, ramp, type Pool, type Range, type Scale } from "./colour";
import { extent, SIDE, type MapInfo, type Tile } from "./format";
import type { Place, Source } from "./sources";

export interface Held {
  place: Place;
  tile: Tile | null;
  failed: string | null;
  picture: HTMLCanvasElement | null;
  colours: string;
  refining: boolean;
}

export interface Colours {
  theme: "light" | "dark";
  pool: Pool;
  scale: Scale;
  range: Range;
}

const MOST = 320;

/** Of each row of cells: the largest weight, and what even attention gives each key. */
export interface Facts {
  largest: Float32Array;
  even: Float32Array;
}

/** What is known of each query, pooled to the rows of a level. */
export class RowFacts {
  private levels = new Map<number, Facts>();

  constructor(
    private largest: Float32Array,
    private visible: Float32Array,
  ) {}

  at(level: number): Facts {
    let found = this.levels.get(level);
    if (found) return found;
    const cell = 1 << level;
    const rows = Math.ceil(this.largest.length / cell);
    found = { largest: new Float32Array(rows), even: new Float32Array(rows) };
    for (let q = 0; q < this.largest.length; q++) {
      const row = q >> level;
      const even = this.visible[q]! > 0 ? 1 / this.visible[q]! : 0;
      found.largest[row] = Math.max(found.largest[row]!, this.largest[q]!);
      found.even[row]! += even / extent(row, cell, this.largest.length);
    }
    this.levels.set(level, found);
    return found;
  }
}

export class Tiles {
  private held = new Map<string, Held>();

  constructor(
    private source: Source,
    private changed: () => void,
  ) {}

  static key(place: Place): string {
    const { map, head, level, row, column, quantity } = place;
    return [map, head, level, row, column, quantity].join();
  }

  peek(place: Place): Held | undefined {
    const found = this.held.get(Tiles.key(place));
    return found?.tile ? found : undefined;
  }

  /** The tile, asked for if it is not there. */
  want(place: Place): Held {
    const key = Tiles.key(place);
    let found = this.held.get(key);
    if (found) {
      this.held.delete(key);
      this.held.set(key, found);
      return found;
    }
    found = { place, tile: null, failed: null, picture: null, colours: "", refining: false };
    this.held.set(key, found);
    const waiting = found;
    this.source.tile(place).then(
      (tile) => {
        waiting.tile = tile;
        this.changed();
      },
      (error: unknown) => {
        waiting.failed = error instanceof Error ? error.message : String(error);
        this.changed();
      },
    );
    for (const [old, each] of this.held) {
      if (this.held.size <= MOST) break;
      if (each.tile) this.held.delete(old);
    }
    return found;
  }

  /** Read a draft in full. */
  async refine(held: Held, signal: AbortSignal): Promise<void> {
    held.refining = true;
    try {
      const tile = await this.source.tile({ ...held.place, exact: true }, signal);
      held.tile = tile;
      held.colours = "";
      this.changed();
    } catch (error) {
      if (!signal.aborted) throw error;
    } finally {
      held.refining = false;
    }
  }
}

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
export function value(of: Pooled, at: number, spot: Spot, map: MapInfo, pool: Pool): number {
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
export function counted(
  of: Pooled,
  at: number,
  spot: Spot,
  map: MapInfo,
  { pool, scale }: { pool: Pool; scale: Scale },
  facts: Facts | null,
): number {
  // Even attention has a sum as well: over it, a sum is what a mean is over an even weight.
  const pooling = scale === "ratio" && pool === "sum" ? "mean" : pool;
  return scaled(value(of, at, spot, map, pooling), scale, facts, spot.row);
}

function spot({ level, row, column }: Place, r: number, c: number): Spot {
  return { row: row * SIDE + r, column: column * SIDE + c, cell: 1 << level };
}

/** The picture of a tile, drawn again only when the colours changed. */
export function picture(
  held: Held,
  map: MapInfo,
  colours: Colours,
  facts: RowFacts | null,
): HTMLCanvasElement | null {
  const tile = held.tile;
  if (!tile || tile.empty) return null;
  const { theme, pool, scale, range } = colours;
  const level = held.place.level;
  const rows = facts ? facts.at(level) : null;
  const needs = scale === "row" || scale === "ratio";
  const name = [theme, pool, scale, range.low, range.high, needs && !!rows, tile.read].join();
  if (held.picture && held.colours === name) return held.picture;
  const canvas = held.picture ?? document.createElement("canvas");
  canvas.width = tile.columns;
  canvas.height = tile.rows;
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(tile.columns, tile.rows);
  const table = ramp(theme);
  for (let r = 0; r < tile.rows; r++)
    for (let c = 0; c < tile.columns; c++) {
      const at = r * tile.columns + c;
      if (!(tile.most[at]! > 0)) continue;
      const shown = counted(tile, at, spot(held.place, r, c), map, colours, rows);
      const [red, green, blue] = table[Math.round(255 * place(shown, scale, range))]!;
      image.data.set([red, green, blue, 255], 4 * at);
    }
  context.putImageData(image, 0, 0);
  held.picture = canvas;
  held.colours = name;
  return canvas;
}

/** The largest value in view, on the axis of the scale. */
export function largestIn(
  all: Held[],
  map: MapInfo,
  how: { pool: Pool; scale: Scale },
  facts: RowFacts | null,
): number {
  let most = 0;
  for (const held of all) {
    const tile = held.tile;
    if (!tile || tile.empty) continue;
    const rows = facts ? facts.at(held.place.level) : null;
    for (let r = 0; r < tile.rows; r++)
      for (let c = 0; c < tile.columns; c++) {
        const at = r * tile.columns + c;
        if (!(tile.most[at]! > 0)) continue;
        const shown = counted(tile, at, spot(held.place, r, c), map, how, rows);
        most = Math.max(most, shown);
      }
  }
  return most;
}

/** The ends of the colour scale. */
export function rangeOf(most: number, scale: Scale): Range {
  // Sums, and weights of long values, may be more than the largest weight.
  if (scale === "row") return { low: 0, high: Math.max(1, most) };
  if (scale === "ratio") return { low: 1 / 16, high: Math.max(16, most) };
  const high = most || 1;
  return scale === "log" ? { low: high * 1e-4, high } : { low: 0, high };
}
