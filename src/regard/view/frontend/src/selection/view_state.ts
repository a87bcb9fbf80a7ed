/** What is being looked at. It lives in the address, so that a view can be sent to someone. */

import { POOLS, SCALES, type Pool, type Scale } from "../drawing/colour";

export const VIEWS = [
  "sentence",
  "map",
  "compare",
  "picture",
  "overview",
  "text",
  "grids",
  "heads",
  "learn",
] as const;
export type View = (typeof VIEWS)[number];

export interface State {
  view: View;
  map: number;
  head: number;
  /** The middle of the map in queries and keys, and how many keys fit its width; 0: all of it. */
  query: number;
  key: number;
  span: number;
  /** The pair that was picked: its query and its key; empty: none. */
  picked: number[];
  pool: Pool;
  scale: Scale;
  quantity: string;
  /** The token that the text view asks about, and in which direction. */
  token: number;
  direction: "looks" | "seen";
  /** Heads that the text view averages; empty: the one head. */
  set: number[];
  /** Whether it averages all heads of all layers instead. */
  layers: "one" | "all";
  /** The step of the tour. */
  step: number;
  /** What is compared with: another text and model, empty: this one; another layer and head, -1:
   * this one, or where all else is alike, the next head. */
  other: string;
  by: string;
  map2: number;
  head2: number;
  compare: "both" | "difference";
}

/** What a text is opened with, where an address does not say. */
export type Defaults = Pick<State, "view" | "scale">;

export const START: State = {
  view: "sentence",
  map: 0,
  head: 0,
  query: 0,
  key: 0,
  span: 0,
  picked: [],
  pool: "max",
  scale: "log",
  quantity: "weight",
  token: -1,
  direction: "looks",
  set: [],
  layers: "one",
  step: 0,
  other: "",
  by: "",
  map2: -1,
  head2: -1,
  compare: "both",
};

const one = <T>(value: string | null, known: readonly T[], otherwise: T): T =>
  known.find((each) => each === value) ?? otherwise;

const count = (value: string | null, otherwise: number): number => {
  const found = value === null || value === "" ? NaN : Number(value);
  return Number.isFinite(found) ? found : otherwise;
};

const places = (value: string | null): number[] =>
  (value ?? "")
    .split(",")
    .map((part) => (part === "" ? NaN : Number(part)))
    .filter((place) => Number.isInteger(place) && place >= 0);

/** Nothing in an address is believed: what does not fit is the default. */
export function read(address: string, defaults: Defaults): State {
  const given = new URLSearchParams(address.replace(/^#/, ""));
  const get = (name: string) => given.get(name);
  const place = (name: string) => Math.max(-1, Math.trunc(count(get(name), -1)));
  return {
    view: one(get("view"), VIEWS, defaults.view),
    map: Math.max(0, Math.trunc(count(get("map"), 0))),
    head: Math.max(0, Math.trunc(count(get("head"), 0))),
    query: count(get("query"), 0),
    key: count(get("key"), 0),
    span: Math.max(0, count(get("span"), 0)),
    picked: places(get("picked")),
    pool: one(get("pool"), POOLS, START.pool),
    scale: one(get("scale"), SCALES, defaults.scale),
    quantity: get("quantity") ?? START.quantity,
    token: place("token"),
    direction: one(get("direction"), ["looks", "seen"] as const, START.direction),
    layers: one(get("layers"), ["one", "all"] as const, START.layers),
    set: places(get("set")).slice(0, 4096),
    step: Math.max(0, Math.trunc(count(get("step"), 0))),
    other: get("other") ?? "",
    by: get("by") ?? "",
    map2: place("map2"),
    head2: place("head2"),
    compare: one(get("compare"), ["both", "difference"] as const, START.compare),
  };
}

export function write(state: State, defaults: Defaults): string {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    const text = Array.isArray(value) ? value.join() : String(value);
    const plain = { ...START, ...defaults }[name as keyof State];
    if (text !== String(plain))
      parts.set(name, typeof value === "number" ? String(+value.toFixed(2)) : text);
  }
  return parts.toString();
}

/** A pair that is picked is what every view asks about; another question lets go of it. */
export function linked(part: Partial<State>, before: State): Partial<State> {
  const [query] = part.picked ?? [];
  if (query !== undefined) return { token: query, direction: "looks", ...part };
  const other = part.token !== undefined && part.token !== before.picked[0];
  return other ? { picked: [], ...part } : part;
}
