/** What the text and the picture ask: where a token looks, or who looks at it, in some heads. */

import { choice } from "../elements/choice";
import type { Line, Source } from "../sources/source";
import type { MapInfo } from "../sources/wire_format";
import type { State } from "./view_state";

export type Direction = State["direction"];

const VERBS: Record<Direction, string> = { looks: "looks at", seen: "is seen by" };

/** What a token does, in a sentence. */
export const verb = (direction: Direction) => VERBS[direction];

/** The question without its heads, in a line. */
export const questionLine = (name: string, token: number, direction: Direction) =>
  [name, `#${token}`, verb(direction)].filter(Boolean).join(" ");

export function directionChoice(
  now: Direction,
  change: (part: Partial<State>) => void,
): HTMLElement {
  const options = (Object.keys(VERBS) as Direction[]).map((each): [Direction, string] => {
    const name = verb(each);
    return [each, name[0]!.toUpperCase() + name.slice(1)];
  });
  return choice("Direction", options, now, (direction) => change({ direction }));
}

/** The weights that a token gives, or gets. */
export function weightsOf(
  source: Source,
  direction: Direction,
  map: number,
  heads: number[],
  token: number,
  signal: AbortSignal,
): Promise<Line> {
  return direction === "looks"
    ? source.row(map, heads, token, signal)
    : source.column(map, heads, token, signal);
}

/** The heads that are asked: those that were chosen together, or else the one. */
export function headsOf({ set, head }: State, { heads }: MapInfo): number[] {
  const known = set.filter((each) => each < heads);
  return known.length ? known : [head];
}

export const headsName = (heads: number[]) =>
  heads.length === 1 ? `head ${heads[0]}` : `the mean of ${heads.length} heads`;
