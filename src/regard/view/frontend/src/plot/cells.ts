/** The cells of a map on a canvas, and the lines over them. */

import { css, place as placed, ramp } from "../drawing/colour";
import type { ThemeColours } from "../drawing/theme_colours";
import { edgesOf, type Place, type Strongest } from "../sources/source";
import { SIDE } from "../sources/wire_format";
import { scaled } from "./cell_value";
import type { Lens, Point } from "./lens";
import type { RowFacts } from "./row_facts";
import type { CachedTile } from "./tile_cache";
import { tileImage, type Colours } from "./tile_image";

type Context = CanvasRenderingContext2D;
/** Pixels between two stripes. */
const STRIPE = 12;

/** Everything that a drawing of cells needs. */
export interface Cells {
  lens: Lens;
  /** Tiles from coarse to fine: the later cover the earlier. */
  tiles: CachedTile[];
  facts: RowFacts | null;
  colours: Colours;
  /** Single pairs over cells that are larger. */
  strongest: Strongest | null;
  ground: string;
}

export function paintCells(context: Context, cells: Cells): void {
  const { lens, tiles, facts, colours, strongest, ground } = cells;
  const { map, zoom } = lens;
  context.fillStyle = ground;
  context.fillRect(lens.x(0), lens.y(0), map.keys * zoom, map.queries * zoom);
  context.imageSmoothingEnabled = false;
  // Past the finest cells there are, only the strongest pairs are known: the rest stands back.
  if (strongest) context.globalAlpha = 0.4;
  const under = strongest ? { ...colours, pool: "mean" as const } : colours;
  for (const held of tiles) {
    const image = tileImage(held, map, under, facts);
    if (!image) continue;
    const cell = 1 << held.place.level;
    const [x, y] = [lens.x(held.place.column * SIDE * cell), lens.y(held.place.row * SIDE * cell)];
    context.drawImage(image, x, y, image.width * cell * zoom, image.height * cell * zoom);
  }
  context.globalAlpha = 1;
  if (strongest) {
    paintHidden(context, lens, ground);
    paintStrongest(context, cells, strongest);
  }
}

/** Tiles that are still to come: striped, as no weight and no mask is. */
export function paintMissing(
  context: Context,
  lens: Lens,
  places: Place[],
  inks: ThemeColours,
): void {
  const { left, top, right, bottom } = lens.covered;
  for (const { level, row, column } of places) {
    const size = SIDE << level;
    const [x, y] = [Math.max(left, lens.x(column * size)), Math.max(top, lens.y(row * size))];
    const wide = Math.min(right, lens.x((column + 1) * size)) - x;
    const high = Math.min(bottom, lens.y((row + 1) * size)) - y;
    context.save();
    context.beginPath();
    context.rect(x, y, wide, high);
    context.clip();
    context.fillStyle = inks.paper;
    context.fillRect(x, y, wide, high);
    context.strokeStyle = inks.frame;
    context.beginPath();
    for (let at = x - high; at < x + wide; at += STRIPE) {
      context.moveTo(at, y + high);
      context.lineTo(at + high, y);
    }
    context.stroke();
    context.restore();
  }
}

/** The mask's edge, pair by pair, over cells that straddle it. */
function paintHidden(context: Context, lens: Lens, colour: string): void {
  const { band, keys } = lens.map;
  if (!band) return;
  const [low, high] = edgesOf(lens.map);
  const end = lens.box.x + lens.box.width;
  const across = (key: number) => lens.x(Math.max(0, Math.min(key, keys)));
  context.fillStyle = colour;
  const [first, last] = lens.queries;
  for (let query = first; query < last; query++) {
    const top = lens.y(query);
    // Where there is no edge, these are empty.
    const from = across(query + high + 1);
    const wide = Math.max(0, Math.min(across(Infinity), end) - from);
    context.fillRect(from, top, wide, lens.zoom);
    context.fillRect(across(0), top, across(query + low) - across(0), lens.zoom);
  }
}

function paintStrongest(context: Context, { lens, facts, colours }: Cells, found: Strongest): void {
  const { scale, range, theme } = colours;
  const table = ramp(theme);
  const rows = facts?.at(0) ?? null;
  const [first, last] = lens.queries;
  for (let query = first; query < last; query++)
    for (let i = query * found.count; i < (query + 1) * found.count; i++) {
      const weight = found.weights[i]!;
      const key = found.keys[i]!;
      if (weight <= 0 || key < lens.key - 1 || key > lens.key + lens.wide) continue;
      const share = placed(scaled(weight, scale, rows, query), scale, range);
      context.fillStyle = css(table[Math.round(255 * share)]!);
      context.fillRect(lens.x(key), lens.y(query), lens.zoom, lens.zoom);
    }
}

export function paintGrid(context: Context, lens: Lens, colour: string): void {
  const { left, top, right, bottom } = lens.covered;
  const { queries, keys } = lens.map;
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  const lastKey = Math.min(keys, lens.key + lens.wide);
  for (let key = Math.ceil(Math.max(0, lens.key)); key <= lastKey; key++) {
    const at = Math.round(lens.x(key)) - 0.5;
    context.moveTo(at, top);
    context.lineTo(at, bottom);
  }
  const lastQuery = Math.min(queries, lens.query + lens.tall);
  for (let query = Math.ceil(Math.max(0, lens.query)); query <= lastQuery; query++) {
    const at = Math.round(lens.y(query)) - 0.5;
    context.moveTo(left, at);
    context.lineTo(right, at);
  }
  context.stroke();
}

/** Where generating began: the first step below what the model was given. */
export function paintSteps(context: Context, lens: Lens, colour: string): void {
  const first = lens.map.starts[1];
  if (first === undefined) return;
  const { left, right } = lens.covered;
  context.strokeStyle = colour;
  context.setLineDash([4, 3]);
  context.beginPath();
  context.moveTo(left, lens.y(first));
  context.lineTo(right, lens.y(first));
  context.stroke();
  context.setLineDash([]);
}

/** The row, the column and the cell that are pointed at. */
export function paintCursor(
  context: Context,
  lens: Lens,
  cursor: Point,
  cell: number,
  colour: string,
): void {
  const left = lens.x(Math.floor(cursor.key / cell) * cell);
  const top = lens.y(Math.floor(cursor.query / cell) * cell);
  const side = Math.max(cell * lens.zoom, 1);
  const covered = lens.covered;
  context.globalAlpha = 0.09;
  context.fillStyle = colour;
  context.fillRect(covered.left, top, covered.right - covered.left, Math.max(side, 2));
  context.fillRect(left, covered.top, Math.max(side, 2), covered.bottom - covered.top);
  context.globalAlpha = 1;
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  if (side >= 4) context.strokeRect(left, top, side, side);
}

export function paintFrame(context: Context, lens: Lens, colour: string): void {
  const { left, top, right, bottom } = lens.covered;
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.strokeRect(left - 0.5, top - 0.5, right - left + 1, bottom - top + 1);
}
