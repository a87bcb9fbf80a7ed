/** The map as a figure: title, axes, cells and legend, for those who are not at the screen. */

import { labels, MONO, SANS } from "./axes";
import { css, place as placed, ramp } from "./colour";
import { spelled } from "./dom";
import { paintCells, type Cells } from "./drawing";
import type { Inks } from "./inks";
import { strip, type Legend } from "./legend";
import { Lens, type Box } from "./lens";
import type { Region } from "./region";
import type { Drawing, Shape } from "./shapes";
import { counted, value } from "./tiles";

export interface Figure {
  title: string;
  cells: Cells;
  region: Region;
  legend: Legend;
  texts: string[][];
  inks: Inks;
}

const MARGIN = 16;
const TITLE = 32;
const LEAST = 480;
const STRIP = 180;
/** Up to so many cells are drawn one by one, and can be taken apart in a drawing program. */
const FEW = 2500;
/** Pixels of the picture of the others, for each of the screen. */
const FINE = 2;

export function figure(of: Figure): Drawing {
  const { cells, inks, legend } = of;
  const { lens: seen } = cells;
  const box: Box = { ...seen.box, y: seen.box.y + TITLE };
  const lens = new Lens(seen.map, box, seen.query, seen.key, seen.zoom);
  const { left, top, right, bottom } = lens.covered;
  const width = Math.max(LEAST, right + MARGIN);
  const notes = wrapped(
    [legend.meaning, ...legend.notes].join(" "),
    width - 2 * MARGIN - STRIP - 20,
  );
  const height = bottom + MARGIN + Math.max(34, 16 * notes.length) + MARGIN;
  const frame = { x: left - 0.5, y: top - 0.5, width: right - left + 1, height: bottom - top + 1 };
  const shapes: Shape[] = [
    { kind: "box", x: 0, y: 0, width, height, fill: inks.paper },
    text(of.title, MARGIN, 22, inks.ink, { size: 14, bold: true }),
    ...(few(of) ? single({ ...of, cells: { ...cells, lens } }) : [pictured(cells, lens)]),
    ...started(lens, inks.accent),
    { kind: "frame", ...frame, stroke: inks.frame },
    ...axes(lens, of.texts, inks),
    ...explained(legend, notes, bottom + MARGIN, cells.colours.theme, inks),
  ];
  return { width, height, shapes };
}

/** What stands between a title and a legend: its size, and its shapes from a place on. */
export interface Body {
  width: number;
  height: number;
  shapes: (x: number, y: number) => Shape[];
}

/** A picture as it is on the screen. */
export function shown(canvas: HTMLCanvasElement): Body {
  const size = { width: canvas.clientWidth, height: canvas.clientHeight };
  return { ...size, shapes: (x, y) => [{ kind: "pixels", x, y, ...size, canvas }] };
}

/** Anything with its title and legend. */
export function plate(
  title: string,
  body: Body,
  legend: Legend,
  inks: Inks,
  theme: "light" | "dark",
): Drawing {
  const width = Math.max(LEAST, body.width + 2 * MARGIN);
  const notes = wrapped(
    [legend.meaning, ...legend.notes].join(" "),
    width - 2 * MARGIN - STRIP - 20,
  );
  const heading = wrapped(title, width - 2 * MARGIN, `600 14px ${SANS}`);
  const above = TITLE + 18 * (heading.length - 1) + MARGIN / 2;
  const below = above + body.height + 1.5 * MARGIN;
  const height = below + Math.max(34, 16 * notes.length) + MARGIN;
  const shapes: Shape[] = [
    { kind: "box", x: 0, y: 0, width, height, fill: inks.paper },
    ...heading.map((line, at) =>
      text(line, MARGIN, 22 + 18 * at, inks.ink, { size: 14, bold: true }),
    ),
    ...body.shapes(MARGIN, above),
    ...explained(legend, notes, below, theme, inks),
  ];
  return { width, height, shapes };
}

function text(
  words: string,
  x: number,
  y: number,
  fill: string,
  how: { size?: number; font?: string; bold?: boolean; end?: boolean; turned?: boolean } = {},
): Shape {
  return { kind: "text", x, y, text: words, fill, font: SANS, size: 11.5, ...how };
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
      const shown = counted(region, at, spot, lens.map, colours, facts?.at(level) ?? null);
      const raw = value(region, at, spot, lens.map, colours.pool);
      const share = placed(shown, colours.scale, colours.range);
      const [x, y] = [Math.max(left, lens.x(key)), Math.max(top, lens.y(query))];
      const width = Math.min(right, lens.x(key + cell)) - x;
      const height = Math.min(bottom, lens.y(query + cell)) - y;
      const names = [named(texts[queryText], query), named(texts[keyText], key)];
      const fill = css(table[Math.round(255 * share)]!);
      made.push({ kind: "box", x, y, width, height, fill, tip: `${names.join(" → ")}: ${raw}` });
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

function axes(lens: Lens, texts: string[][], { faint }: Inks): Shape[] {
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

function explained(
  { ticks }: Legend,
  notes: string[],
  y: number,
  theme: "light" | "dark",
  { ink, faint }: Inks,
): Shape[] {
  const colours = { x: MARGIN, y, width: STRIP, height: 10, canvas: strip(theme) };
  const under = y + 24;
  const middle = MARGIN + STRIP / 2 + 12;
  // Of long numbers the one in the middle has no room.
  const fits = MARGIN + widthOf(ticks[0]) + 8 <= middle - widthOf(ticks[1]);
  return [
    { kind: "pixels", ...colours },
    text(ticks[0], MARGIN, under, ink),
    ...(fits ? [text(ticks[1], middle, under, ink, { end: true })] : []),
    text(ticks[2], MARGIN + STRIP, under, ink, { end: true }),
    ...notes.map((line, at) => text(line, MARGIN + STRIP + 20, y + 6 + 16 * at, faint)),
  ];
}

function widthOf(words: string, font = `11.5px ${SANS}`): number {
  const context = document.createElement("canvas").getContext("2d")!;
  context.font = font;
  return context.measureText(words).width;
}

/** Words in lines of at most so many pixels. */
function wrapped(words: string, width: number, font?: string): string[] {
  const lines = [""];
  for (const word of words.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (lines.at(-1) && widthOf(longer, font) > width) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines;
}
