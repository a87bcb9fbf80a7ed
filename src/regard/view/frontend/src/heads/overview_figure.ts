/** All heads on one sheet: a row of thumbnails for each layer. */

import { MONO, SANS } from "../drawing/fonts";
import type { ThemeColours } from "../drawing/theme_colours";
import type { Drawing, Shape } from "../drawing/shapes";

export interface Row {
  name: string;
  about: string;
  /** How many heads stand side by side. */
  across: number;
  /** The map of each head; none, where there is nothing to see. */
  heads: (HTMLCanvasElement | null)[];
}

const MARGIN = 16;
const THUMB = 112;
const GAP = 10;
const NUMBER = 18;
const NAME = 26;
const TITLE = 28;

export function overviewFigure(title: string, rows: Row[], inks: ThemeColours): Drawing {
  const across = Math.max(...rows.map((row) => row.across));
  const width = 2 * MARGIN + across * (THUMB + GAP) - GAP;
  const shapes: Shape[] = [];
  const write = (words: string, x: number, y: number, fill: string, bold = false, font = SANS) =>
    shapes.push({ kind: "text", x, y, text: words, font, size: bold ? 13 : 11.5, fill, bold });
  write(title, MARGIN, 22, inks.ink, true);
  let y = MARGIN + TITLE;
  for (const row of rows) {
    write(row.name, MARGIN, y + 6, inks.ink, false, MONO);
    write(row.about, MARGIN + 7.2 * row.name.length + 12, y + 6, inks.faint);
    y += NAME - 6;
    for (const [head, canvas] of row.heads.entries()) {
      const x = MARGIN + (head % row.across) * (THUMB + GAP);
      const top = y + Math.floor(head / row.across) * (THUMB + NUMBER + GAP);
      const box = { x, y: top, width: THUMB, height: THUMB };
      shapes.push({ kind: "box", ...box, fill: inks.ground });
      if (canvas) shapes.push({ kind: "pixels", ...box, canvas });
      shapes.push({ kind: "frame", ...box, stroke: inks.frame });
      write(String(head), x, top + THUMB + NUMBER / 2 + 1, inks.faint);
    }
    y += Math.ceil(row.heads.length / row.across) * (THUMB + NUMBER + GAP) + GAP;
  }
  const ground: Shape = { kind: "box", x: 0, y: 0, width, height: y, fill: inks.paper };
  return { width, height: y, shapes: [ground, ...shapes] };
}
