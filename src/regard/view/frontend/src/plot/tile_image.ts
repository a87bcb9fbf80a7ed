/** The picture of a tile under the colours of the moment, and the range of these colours. */

import { place, ramp, type Pool, type Range, type Scale } from "../drawing/colour";
import type { Place } from "../sources/source";
import { SIDE, type MapInfo } from "../sources/wire_format";
import { scaledValue, type Spot } from "./cell_value";
import type { RowFacts } from "./row_facts";
import type { CachedTile } from "./tile_cache";

export interface Colours {
  theme: "light" | "dark";
  pool: Pool;
  scale: Scale;
  range: Range;
}

function spot({ level, row, column }: Place, r: number, c: number): Spot {
  return { row: row * SIDE + r, column: column * SIDE + c, cell: 1 << level };
}

/** The picture of a tile, drawn again only when the colours changed. */
export function tileImage(
  held: CachedTile,
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
      const shown = scaledValue(tile, at, spot(held.place, r, c), map, colours, rows);
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
  all: CachedTile[],
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
        const shown = scaledValue(tile, at, spot(held.place, r, c), map, how, rows);
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
