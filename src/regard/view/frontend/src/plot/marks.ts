/** Tokens that were searched for, marked on the map. */

import type { Lens } from "./lens";

/** The first and the last token of what was found, and on which axes it is. */
export interface Mark {
  first: number;
  last: number;
  rows: boolean;
  columns: boolean;
}

/** Bands over rows and columns; the one that is looked at now is stronger. */
export function paintMarks(
  context: CanvasRenderingContext2D,
  lens: Lens,
  marks: Mark[],
  now: Mark | null,
  colour: string,
): void {
  const { left, top, right, bottom } = lens.covered;
  context.fillStyle = colour;
  // Of what lies on one pixel, one is drawn.
  let [row, column] = [-1, -1];
  for (const mark of marks) {
    context.globalAlpha = mark === now ? 0.22 : 0.1;
    const side = Math.max(1.5, (mark.last + 1 - mark.first) * lens.zoom);
    const [x, y] = [lens.x(mark.first), lens.y(mark.first)];
    if (mark.rows && y < bottom && y + side > top && (Math.round(y) > row || mark === now)) {
      context.fillRect(left, y, right - left, side);
      row = Math.round(y);
    }
    if (mark.columns && x < right && x + side > left && (Math.round(x) > column || mark === now)) {
      context.fillRect(x, top, side, bottom - top);
      column = Math.round(x);
    }
  }
  context.globalAlpha = 1;
}
