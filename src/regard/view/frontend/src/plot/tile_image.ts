/** The picture of a tile under the colours of the moment, and the range of these colours. */

import { logarithmic, ramp, type Pool, type Range, type Scale } from "../drawing/colour";
import { SIDE, type MapInfo } from "../sources/wire_format";
import { scaledValue } from "./cell_value";
import type { RowFacts } from "./row_facts";
import type { CachedTile, TileValues } from "./tile_cache";

export interface Colours {
  theme: "light" | "dark";
  pool: Pool;
  scale: Scale;
  range: Range;
}

/** The values of a tile, which hold for any range of colours: zooming changes nothing but that. */
function valuesOf(
  held: CachedTile,
  map: MapInfo,
  { pool, scale }: { pool: Pool; scale: Scale },
  facts: RowFacts | null,
): TileValues | null {
  const { tile, place } = held;
  if (!tile || tile.empty) return null;
  const rows = facts ? facts.at(place.level) : null;
  const name = [pool, scale, !!rows, tile.read].join();
  if (held.values?.name === name) return held.values;
  const along = new Float32Array(tile.most.length).fill(NaN);
  const spot = { row: 0, column: 0, cell: 1 << place.level };
  let most = 0;
  for (let r = 0; r < tile.rows; r++)
    for (let c = 0; c < tile.columns; c++) {
      const at = r * tile.columns + c;
      if (!(tile.most[at]! > 0)) continue;
      spot.row = place.row * SIDE + r;
      spot.column = place.column * SIDE + c;
      const shown = scaledValue(tile, at, spot, map, { pool, scale }, rows);
      most = Math.max(most, shown);
      along[at] = logarithmic(scale) ? Math.log(shown) : shown;
    }
  return (held.values = { name, along, most });
}

const inks = new Map<string, Uint32Array>();

/** The bytes of each colour, as an image holds them. */
function inkTable(theme: "light" | "dark"): Uint32Array {
  let found = inks.get(theme);
  if (!found) {
    const bytes = ramp(theme).flatMap(([red, green, blue]) => [red, green, blue, 255]);
    inks.set(theme, (found = new Uint32Array(new Uint8Array(bytes).buffer)));
  }
  return found;
}

/** The picture of a tile, drawn again only when the colours changed. */
export function tileImage(
  held: CachedTile,
  map: MapInfo,
  colours: Colours,
  facts: RowFacts | null,
): HTMLCanvasElement | null {
  const { tile } = held;
  if (!tile || tile.empty) return null;
  const { theme, pool, scale, range } = colours;
  const needs = scale === "row" || scale === "ratio";
  const name = [theme, pool, scale, range.low, range.high, needs && !!facts, tile.read].join();
  if (held.picture && held.colours === name) return held.picture;
  const canvas = held.picture ?? document.createElement("canvas");
  canvas.width = tile.columns;
  canvas.height = tile.rows;
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(tile.columns, tile.rows);
  paintBytes(new Uint32Array(image.data.buffer), valuesOf(held, map, colours, facts)!, colours);
  context.putImageData(image, 0, 0);
  held.picture = canvas;
  held.colours = name;
  return canvas;
}

function paintBytes(bytes: Uint32Array, { along }: TileValues, colours: Colours): void {
  const { theme, scale, range } = colours;
  const table = inkTable(theme);
  const [low, high] = logarithmic(scale)
    ? [Math.log(range.low), Math.log(range.high)]
    : [0, range.high];
  const steps = 255 / (high - low);
  for (let at = 0; at < along.length; at++) {
    const value = along[at]!;
    if (Number.isNaN(value)) continue;
    bytes[at] = table[Math.round(Math.min(255, Math.max(0, (value - low) * steps)))]!;
  }
}

/** The largest value in view, on the axis of the scale. */
export function largestIn(
  all: CachedTile[],
  map: MapInfo,
  how: { pool: Pool; scale: Scale },
  facts: RowFacts | null,
): number {
  return Math.max(0, ...all.map((held) => valuesOf(held, map, how, facts)?.most ?? 0));
}

/** The ends of the colour scale. */
export function rangeOf(most: number, scale: Scale): Range {
  // Sums, and weights of long values, may be more than the largest weight.
  if (scale === "row") return { low: 0, high: Math.max(1, most) };
  if (scale === "ratio") return { low: 1 / 16, high: Math.max(16, most) };
  const high = most || 1;
  return scale === "log" ? { low: high * 1e-4, high } : { low: 0, high };
}
