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

/** Row facts, pooled to the cells of a level. */
export class RowFacts {
  private levels = new Map<number, { largest: Float32Array; visible: Float32Array }>();

  constructor(
    readonly largest: Float32Array,
    readonly visible: Float32Array,
  ) {}

  at(level: number): { largest: Float32Array; visible: Float32Array } {
    let found = this.levels.get(level);
    if (found) return found;
    const cell = 1 << level;
    const rows = Math.ceil(this.largest.length / cell);
    found = { largest: new Float32Array(rows), visible: new Float32Array(rows) };
    for (let q = 0; q < this.largest.length; q++) {
      const row = q >> level;
      found.largest[row] = Math.max(found.largest[row]!, this.largest[q]!);
      found.visible[row]! += this.visible[q]! / extent(row, cell, this.largest.length);
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

/** What one cell counts for, before it is given a colour; the cell by its row and column. */
export function value(
  of: { mean: Float32Array; most: Float32Array },
  at: number,
  row: number,
  column: number,
  cell: number,
  map: MapInfo,
  pool: Pool,
): number {
  if (pool === "max") return of.most[at]!;
  if (pool === "mean") return of.mean[at]!;
  return of.mean[at]! * extent(row, cell, map.queries) * extent(column, cell, map.keys);
}

/** The value on the axis of the scale: itself, its share of the row's largest, or of even weight. */
export function scaled(
  found: number,
  scale: Scale,
  facts: { largest: Float32Array; visible: Float32Array } | null,
  row: number,
): number {
  if (scale === "row")
    return facts && facts.largest[row]! > 0 ? found / facts.largest[row]! : found;
  if (scale === "ratio") return facts ? found * facts.visible[row]! : found;
  return found;
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
      const [row, column] = [held.place.row * SIDE + r, held.place.column * SIDE + c];
      const raw = value(tile, at, row, column, 1 << level, map, pool);
      const shown = scaled(raw, scale, rows, row);
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
  pool: Pool,
  scale: Scale,
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
        const [row, column] = [held.place.row * SIDE + r, held.place.column * SIDE + c];
        const raw = value(tile, at, row, column, 1 << held.place.level, map, pool);
        most = Math.max(most, scaled(raw, scale, rows, row));
      }
  }
  return most;
}

/** The ends of the colour scale. */
export function rangeOf(most: number, scale: Scale): Range {
  if (scale === "row") return { low: 0, high: 1 };
  if (scale === "ratio") return { low: 1 / 16, high: Math.max(16, most) };
  const high = most || 1;
  return scale === "log" ? { low: high * 1e-4, high } : { low: 0, high };
}
