/** The map as a figure: title, axes, cells and legend. */

import { css, place as placed, ramp } from "../drawing/colour";
import { LEAST, legendLines, legendShapes, MARGIN, text, TITLE } from "../drawing/figure";
import { MONO, SANS } from "../drawing/fonts";
import type { ThemeColours } from "../drawing/theme_colours";
import type { Legend } from "../drawing/legend";
import type { Drawing, Shape } from "../drawing/shapes";
import { spelled } from "../drawing/token_spelling";
import { labels } from "../plot/axes";
import { cellNumbers, SIZE } from "../plot/cell_numbers";
import { pooledValue, scaledValue } from "../plot/cell_value";
import { paintCells, type Cells } from "../plot/cells";
import { Lens, type Box } from "../plot/lens";
import type { Region } from "./region";

export interface Figure {
  title: string;
  cells: Cells;
  region: Region;
  legend: Legend;
  texts: string[][];
  inks: ThemeColours;
}

/** Up to so many cells are drawn one by one, and can be taken apart in a drawing program. */
const FEW = 2500;
/** Pixels of the picture of the others, for each of the screen. */
const FINE = 2;

export function mapFigure(of: Figure): Drawing {
  const { cells, inks, legend } = of;
  const { lens: seen } = cells;
  // A map that stands in the middle of a larger room takes none of it along.
  const part = seen.covered;
  const box: Box = {
    x: seen.box.x,
    y: seen.box.y + TITLE,
    width: part.right - part.left,
    height: part.bottom - part.top,
  };
  const [query, key] = [Math.max(0, seen.query), Math.max(0, seen.key)];
  const lens = new Lens(seen.map, box, query, key, seen.zoom);
  const { left, top, right, bottom } = lens.covered;
  const width = Math.max(LEAST, right + MARGIN);
  const notes = legendLines(legend, width);
  const height = bottom + MARGIN + Math.max(34, 16 * notes.length) + MARGIN;
  const frame = { x: left - 0.5, y: top - 0.5, width: right - left + 1, height: bottom - top + 1 };
  const shapes: Shape[] = [
    { kind: "box", x: 0, y: 0, width, height, fill: inks.paper },
    text(of.title, MARGIN, 22, inks.ink, { size: 14, bold: true }),
    ...(few(of) ? single({ ...of, cells: { ...cells, lens } }) : [pictured(cells, lens)]),
    ...cellNumbers({ ...cells, lens }).map(({ x, y, text: words, fill }) =>
      text(words, x, y, fill, { size: SIZE, middle: true }),
    ),
    ...started(lens, inks.accent),
    { kind: "frame", ...frame, stroke: inks.frame },
    ...axes(lens, of.texts, inks),
    ...legendShapes(legend, notes, bottom + MARGIN, cells.colours.theme, inks),
  ];
  return { width, height, shapes };
}

function few({ region, cells }: Figure): boolean {
  return !cells.strongest && region.rows * region.columns <= FEW;
}

/** Each cell as a shape of its own, that says what it is. */
function single({ cells, region, texts, inks }: Figure): Shape[] {
  const { lens, colours, facts } = cells;
  const { cell, rows, columns } = region;
  const { left, top, right, bottom } = lens.covered;
  const ground = { x: left, y: top, width: right - left, height: bottom - top };
  const made: Shape[] = [{ kind: "box", ...ground, fill: inks.ground }];
  const table = ramp(colours.theme);
  const level = Math.log2(cell);
  const { queryText, keyText } = lens.map;
  for (let row = 0; row < rows; row++)
    for (let column = 0; column < columns; column++) {
      const at = row * columns + column;
      if (!(region.most[at]! > 0)) continue;
      const [query, key] = [region.query + row * cell, region.key + column * cell];
      const spot = { row: query / cell, column: key / cell, cell };
      const shown = scaledValue(region, at, spot, lens.map, colours, facts?.at(level) ?? null);
      const raw = pooledValue(region, at, spot, lens.map, colours.pool);
      const share = placed(shown, colours.scale, colours.range);
      const [x, y] = [Math.max(left, lens.x(key)), Math.max(top, lens.y(query))];
      const width = Math.min(right, lens.x(key + cell)) - x;
      const height = Math.min(bottom, lens.y(query + cell)) - y;
      const names = [named(texts[queryText], query), named(texts[keyText], key)];
      const fill = css(table[Math.round(255 * share)]!);
      made.push({
        kind: "box",
        x,
        y,
        width,
        height,
        fill,
        tooltip: `${names.join(" → ")}: ${raw}`,
      });
    }
  return made;
}

const named = (text: string[] | undefined, at: number) =>
  text?.[at] === undefined ? `#${at}` : spelled(text[at], 40);

/** All cells as one picture. */
function pictured(cells: Cells, lens: Lens): Shape {
  const { left, top, right, bottom } = lens.covered;
  const canvas = document.createElement("canvas");
  canvas.width = Math.round((right - left) * FINE);
  canvas.height = Math.round((bottom - top) * FINE);
  const context = canvas.getContext("2d")!;
  context.scale(FINE, FINE);
  context.translate(-left, -top);
  paintCells(context, { ...cells, lens });
  return { kind: "pixels", x: left, y: top, width: right - left, height: bottom - top, canvas };
}

/** Where generating began. */
function started(lens: Lens, stroke: string): Shape[] {
  const first = lens.map.starts[1];
  const { left, top, right, bottom } = lens.covered;
  if (first === undefined || lens.y(first) < top || lens.y(first) > bottom) return [];
  const y = lens.y(first);
  return [{ kind: "line", x: left, y, toX: right, toY: y, stroke, dash: "4 3" }];
}

function axes(lens: Lens, texts: string[][], { faint }: ThemeColours): Shape[] {
  const { queryText, keyText } = lens.map;
  // The names keep the room that they have on the screen, where there is no title above them.
  const { box } = lens;
  const screen = new Lens(lens.map, { ...box, y: box.y - TITLE }, lens.query, lens.key, lens.zoom);
  return labels(screen, texts[queryText], texts[keyText]).map((label) =>
    text(label.text, label.x, label.y + TITLE, faint, {
      size: label.axis === "title" ? 11 : 12,
      font: label.axis === "title" ? SANS : MONO,
      end: label.axis !== "key",
      turned: label.axis === "key",
    }),
  );
}
