/** The names of queries and keys, along both axes, as soon as there is room. */

import { MONO, SANS } from "../drawing/fonts";
import { spelled } from "../drawing/token_spelling";
import type { Lens, Point } from "./lens";

const APART = 15;
const LETTER = 7.3;
/** Letters without which a token beside its number says too little. */
const LEAST = 6;

/** One name. Those of keys stand upright, reading from below. */
export interface Label {
  axis: "query" | "key" | "title";
  place: number;
  text: string;
  x: number;
  y: number;
  /** Pixels that it may take. */
  room: number;
}

export function labels(
  lens: Lens,
  queryTokens: string[] | undefined,
  keyTokens: string[] | undefined,
): Label[] {
  const { x, y, width, height } = lens.box;
  // Beside the map, which may be smaller than its room.
  const { left, top } = lens.covered;
  const step = niceStep(APART / lens.zoom);
  const along = (axis: "query" | "key", start: number, n: number): Label[] => {
    const tokens = axis === "query" ? queryTokens : keyTokens;
    const room = axis === "query" ? x : y;
    const name = namer(tokens, step, room, n);
    const [first, last] = axis === "query" ? [y, y + height] : [x, x + width];
    const found: Label[] = [];
    for (let place = Math.ceil(Math.max(0, start) / step) * step; place < n; place += step) {
      const middle = axis === "query" ? lens.y(place + 0.5) : lens.x(place + 0.5);
      if (middle > last) break;
      if (middle < first) continue;
      const at = axis === "query" ? { x: left - 8, y: middle } : { x: middle, y: top - 8 };
      found.push({ axis, place, text: name(place), ...at, room: room - 12 });
    }
    return found;
  };
  const title = (text: string, down: number): Label => {
    return { axis: "title", place: -1, text, x: left - 8, y: top - y + down, room: x - 12 };
  };
  return [
    ...along("query", lens.query, lens.map.queries),
    ...along("key", lens.key, lens.map.keys),
    title("keys →", 12),
    title("queries ↓", 28),
  ];
}

/** How the places of an axis are called: all of them in the same way. */
function namer(tokens: string[] | undefined, step: number, room: number, n: number) {
  const letters = Math.max(3, Math.floor((room - 12) / LETTER));
  const left = step === 1 ? letters : letters - String(n - 1).length - 1;
  const worded = step === 1 || left >= LEAST;
  return (at: number): string => {
    const token = tokens?.[at];
    if (token === undefined || !worded) return String(at);
    return step === 1 ? spelled(token, left) : `${at} ${spelled(token, left)}`;
  };
}

export function paintLabels(
  context: CanvasRenderingContext2D,
  all: Label[],
  inks: { ink: string; faint: string },
  cursor: Point | null,
): void {
  context.textBaseline = "middle";
  for (const { axis, place, text, x, y, room } of all) {
    const strong = axis !== "title" && cursor?.[axis] === place;
    context.fillStyle = strong ? inks.ink : inks.faint;
    context.font = axis === "title" ? `11px ${SANS}` : `12px ${MONO}`;
    context.textAlign = axis === "key" ? "left" : "right";
    context.save();
    context.translate(x, y);
    if (axis === "key") context.rotate(-Math.PI / 2);
    context.fillText(text, 0, 0, room);
    context.restore();
  }
}

/** The next of 1, 2, 5, 10, 20 ... */
function niceStep(least: number): number {
  if (least <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(least));
  for (const step of [1, 2, 5, 10]) if (step * power >= least) return step * power;
  return 10 * power;
}
