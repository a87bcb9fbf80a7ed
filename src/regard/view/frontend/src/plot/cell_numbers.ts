/** The weights of single pairs, written into their cells as soon as they fit. */

import { ink, place as placed, ramp } from "../drawing/colour";
import { SANS } from "../drawing/fonts";
import { SIDE } from "../sources/wire_format";
import { scaledValue } from "./cell_value";
import type { Cells } from "./cells";

/** Pixels of a cell in which "100%" fits. */
const ROOM = 30;
export const SIZE = 10;
/** Weights that would round to nothing. */
const LEAST = 0.005;

export interface CellNumber {
  x: number;
  y: number;
  text: string;
  fill: string;
}

export function cellNumbers({ lens, tiles, facts, colours, strongest }: Cells): CellNumber[] {
  if (lens.zoom < ROOM || strongest) return [];
  const { theme, scale, range } = colours;
  const table = ramp(theme);
  const [above, below] = lens.queries;
  const [left, right] = lens.keys;
  const made: CellNumber[] = [];
  for (const { tile, place } of tiles) {
    if (place.level || !tile || tile.read) continue;
    for (let r = 0; r < tile.rows; r++)
      for (let c = 0; c < tile.columns; c++) {
        const [query, key] = [place.row * SIDE + r, place.column * SIDE + c];
        if (query < above || query >= below || key < left || key >= right) continue;
        const at = r * tile.columns + c;
        const weight = tile.mean[at]!;
        if (weight < LEAST) continue;
        const spot = { row: query, column: key, cell: 1 };
        const shown = scaledValue(tile, at, spot, lens.map, colours, facts?.at(0) ?? null);
        const fill = ink(table[Math.round(255 * placed(shown, scale, range))]!);
        const text = `${Math.round(100 * weight)}%`;
        made.push({ x: lens.x(key + 0.5), y: lens.y(query + 0.5), text, fill });
      }
  }
  return made;
}

export function paintNumbers(context: CanvasRenderingContext2D, all: CellNumber[]): void {
  context.font = `${SIZE}px ${SANS}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (const { x, y, text, fill } of all) {
    context.fillStyle = fill;
    context.fillText(text, x, y);
  }
}
