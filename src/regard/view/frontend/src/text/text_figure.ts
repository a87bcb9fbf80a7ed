/** A shaded text as a drawing: its words in lines, whatever the width of the window. */

import type { Body } from "../drawing/figure";
import { MONO } from "../drawing/fonts";
import type { ThemeColours } from "../drawing/theme_colours";
import type { Shape } from "../drawing/shapes";
import { wordsOf, type Shading, type Word, type Words } from "./words";

const WIDE = 720;
const LINE = 27;
const TALL = 21;
const SIZE = 13.5;
const PAD = 3;
const SPACE = 5;
const EDGE = 12;

/** A word, and where it stands. */
interface Placed {
  word: Word;
  x: number;
  y: number;
  width: number;
}

export function textBody(of: Words, shading: Shading, inks: ThemeColours): Body {
  const { set, width, height } = lines(wordsOf(of, shading));
  return {
    width,
    height,
    shapes: (x, y) => set.flatMap((each) => drawn({ ...each, x: x + each.x, y: y + each.y }, inks)),
  };
}

function lines(words: Word[]): { set: Placed[]; width: number; height: number } {
  const context = document.createElement("canvas").getContext("2d")!;
  context.font = `${SIZE}px ${MONO}`;
  const set: Placed[] = [];
  let [x, y, wide] = [0, 0, 0];
  for (const word of words) {
    const width = context.measureText(word.text).width + 2 * PAD;
    const [before, after] = [word.opens ? EDGE : 0, word.closes ? EDGE : 0];
    if (x && x + before + width + after > WIDE) [x, y] = [0, y + LINE];
    x += before;
    set.push({ word, x, y, width });
    x += width + after;
    wide = Math.max(wide, x);
    if (word.spaced) x += SPACE;
    if (word.ends) [x, y] = [0, y + LINE];
  }
  return { set, width: wide, height: (set.at(-1)?.y ?? 0) + LINE };
}

function drawn({ word, x, y, width }: Placed, inks: ThemeColours): Shape[] {
  const { text, colours, self, masked, written, opens, closes, about } = word;
  const [top, middle] = [y + (LINE - TALL) / 2, y + LINE / 2];
  const box = { x, y: top, width, height: TALL };
  const sign = (text: string, x: number): Shape => {
    return {
      kind: "text",
      x,
      y: middle,
      text,
      font: MONO,
      size: 17,
      fill: inks.accent,
      bold: true,
    };
  };
  const made: Shape[] = [];
  // Where there is no colour, there is still something to point at.
  made.push({ kind: "box", ...box, fill: colours?.ground ?? inks.paper, tooltip: about });
  const fill = masked ? inks.faint : (colours?.ink ?? inks.ink);
  made.push({ kind: "text", x: x + PAD, y: middle, text, font: MONO, size: SIZE, fill });
  if (written) {
    const low = top + TALL - 2;
    made.push({ kind: "line", x: x + PAD, y: low, toX: x + width - PAD, toY: low, stroke: fill });
  }
  if (self) made.push({ kind: "frame", ...box, stroke: inks.accent });
  if (opens) made.push(sign("[", x - EDGE + 1));
  if (closes) made.push(sign("]", x + width + 1));
  return made;
}
