/** The map without a mouse. */

import type { Hands } from "./pointer";

const ARROWS: Record<string, [number, number]> = {
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
};
const STEP = 80;

export const KEYS =
  "Arrow keys pan, plus and minus zoom, 0 shows everything, shift with arrow keys moves a cursor, Enter opens the text.";

export function press(event: KeyboardEvent, hands: Hands): void {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const arrow = ARROWS[event.key];
  const { lens, cursor } = hands;
  if (arrow && event.shiftKey) step(hands, ...arrow);
  else if (arrow)
    hands.look(lens.moved((arrow[0] * STEP) / lens.zoom, (arrow[1] * STEP) / lens.zoom));
  else if (event.key === "+" || event.key === "=") hands.zoom(1.5);
  else if (event.key === "-") hands.zoom(1 / 1.5);
  else if (event.key === "0") hands.all();
  else if (event.key === "Escape") hands.pick(null);
  else if (event.key === "Enter" && cursor) hands.open(cursor.query);
  else return;
  event.preventDefault();
}

/** Move the cursor by a cell; the first time it starts in the middle of what is seen. */
function step(hands: Hands, down: number, right: number): void {
  const { lens, cursor, cell } = hands;
  const { queries, keys } = lens.map;
  const from = cursor ?? {
    query: Math.floor(Math.max(0, lens.query) + lens.tall / 2),
    key: Math.floor(Math.max(0, lens.key) + lens.wide / 2),
  };
  const inside = (at: number, n: number) => Math.max(0, Math.min(at, n - 1));
  hands.pick({
    query: inside(from.query + down * cell, queries),
    key: inside(from.key + right * cell, keys),
  });
}
