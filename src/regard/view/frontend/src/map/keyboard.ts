/** The map without a mouse. */

import { edgesOf } from "../sources/source";
import type { MapActions } from "./pointer";

const ARROWS: Record<string, [number, number]> = {
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
};
const STEP = 80;

export const KEYS =
  "Arrow keys pan, + and − zoom, 0 shows all, shift and arrows move a cursor, Enter opens its sentence.";

/** Whether the key was one of the map's. */
export function pressKey(event: KeyboardEvent, actions: MapActions): boolean {
  if (event.ctrlKey || event.metaKey || event.altKey) return false;
  const arrow = ARROWS[event.key];
  const { lens, cursor } = actions;
  if (arrow && event.shiftKey) step(actions, ...arrow);
  else if (arrow)
    actions.look(lens.moved((arrow[0] * STEP) / lens.zoom, (arrow[1] * STEP) / lens.zoom));
  else if (event.key === "+" || event.key === "=") actions.zoom(1.5);
  else if (event.key === "-") actions.zoom(1 / 1.5);
  else if (event.key === "0") actions.all();
  else if (event.key === "Escape") actions.pick(null);
  else if (event.key === "Enter" && cursor) actions.open(cursor.query);
  else return false;
  event.preventDefault();
  return true;
}

/** Move the cursor by a cell; the first time it starts in the middle of what is seen, or at the
 * nearest key of that query which is not masked. */
function step(actions: MapActions, down: number, right: number): void {
  const { lens, cursor, cell } = actions;
  const { queries, keys } = lens.map;
  const from = cursor ?? {
    query: Math.floor(Math.max(0, lens.query) + lens.tall / 2),
    key: Math.floor(Math.max(0, lens.key) + lens.wide / 2),
  };
  const inside = (at: number, n: number) => Math.max(0, Math.min(at, n - 1));
  const query = inside(from.query + down * cell, queries);
  const key = inside(from.key + right * cell, keys);
  const [low, high] = edgesOf(cursor ? { band: null } : lens.map);
  const seen = Math.max(Math.min(key, query + high), query + low);
  actions.pick({ query, key: inside(seen, keys) });
}
