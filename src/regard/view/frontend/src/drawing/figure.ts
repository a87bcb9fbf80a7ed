/** A figure: a title, what it is of, and a legend, for those who are not at the screen. */

import { SANS } from "./fonts";
import type { ThemeColours } from "./theme_colours";
import { strip, type Legend } from "./legend";
import type { Drawing, Shape } from "./shapes";

export const MARGIN = 16;
export const TITLE = 32;
export const LEAST = 480;
const STRIP = 180;

/** What stands between a title and a legend: its size, and its shapes from a place on. */
export interface Body {
  width: number;
  height: number;
  shapes: (x: number, y: number) => Shape[];
}

/** A picture as it is on the screen. */
export function canvasBody(canvas: HTMLCanvasElement): Body {
  const size = { width: canvas.clientWidth, height: canvas.clientHeight };
  return { ...size, shapes: (x, y) => [{ kind: "pixels", x, y, ...size, canvas }] };
}

/** Anything with its title and legend. */
export function figure(
  title: string,
  body: Body,
  legend: Legend,
  inks: ThemeColours,
  theme: "light" | "dark",
): Drawing {
  const width = Math.max(LEAST, body.width + 2 * MARGIN);
  const notes = legendLines(legend, width);
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
    ...legendShapes(legend, notes, below, theme, inks),
  ];
  return { width, height, shapes };
}

export function text(
  words: string,
  x: number,
  y: number,
  fill: string,
  how: Partial<Extract<Shape, { kind: "text" }>> = {},
): Shape {
  return { kind: "text", x, y, text: words, fill, font: SANS, size: 11.5, ...how };
}

/** The words of a legend, in lines beside its colours. */
export function legendLines({ meaning, notes }: Legend, width: number): string[] {
  return wrapped([meaning, ...notes].join(" "), width - 2 * MARGIN - STRIP - 20);
}

export function legendShapes(
  { ticks }: Legend,
  notes: string[],
  y: number,
  theme: "light" | "dark",
  { ink, faint }: ThemeColours,
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
