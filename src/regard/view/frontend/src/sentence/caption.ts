/** What is said of a word: what it looks at most, and how that stands to it. */

import { spelled } from "../drawing/token_spelling";
import type { Line } from "../sources/source";

/** The tokens that look and those that are looked at; where they are one text, the same. */
export interface Texts {
  queries: string[] | undefined;
  keys: string[] | undefined;
  same: boolean;
}

/** What a word looks at. */
export interface Looks {
  query: number;
  line: Line;
  /** What falls on the first token, if that is set aside. */
  aside: number | null;
  /** The keys with the most weight, what is set aside left out. */
  strongest: number[];
}

export const MARK = /^\s*(<.*>|\[[A-Z]+\])\s*$/s;
export const SPACE = /^[ \u0120\u2581]+/u;
const MANY = 6;
/** Weights below are not worth an arc or a line. */
export const LEAST = 0.01;

/** A token between quotation marks; one without a name by its number. */
export function quoted(names: string[] | undefined, at: number): string {
  const name = names?.[at];
  if (name === undefined) return `#${at}`;
  return `‘${spelled(name.replace(SPACE, "") || name, 24)}’`;
}

/** A share in whole percent. */
export function share(weight: number): string {
  if (!(weight > 0)) return "0\u00a0%";
  return weight < 0.01 ? "<1\u00a0%" : `${Math.round(100 * weight)}\u00a0%`;
}

/** Whether the first key of a row is a place to rest: heads that find nothing look there. */
function rests({ keys, same }: Texts, query: number): boolean {
  return same ? query > 1 || (query === 1 && MARK.test(keys?.[0] ?? "")) : false;
}

export function looksOf(texts: Texts, query: number, line: Line): Looks {
  const { weights, exact } = line;
  const aside = rests(texts, query) ? weights[0]! : null;
  const order = [...weights.keys()].filter(
    (at) => weights[at]! > 0 && (!exact || exact.has(at)) && !(aside !== null && at === 0),
  );
  order.sort((a, b) => weights[b]! - weights[a]!);
  return { query, line, aside, strongest: order.slice(0, MANY) };
}

/** How the first of a pair stands to the second, in words that the second can follow. */
function relation({ queries, keys, same }: Texts, query: number, key: number): string {
  if (!same) return "looks most at";
  const own = queries?.[query];
  if (key === query) return "looks at itself";
  if (own !== undefined && key > 0 && key <= query && keys![key - 1] === own && key - 1 < query)
    return `looks at what followed ${quoted(queries, query)} before:`;
  if (own !== undefined && keys![key] === own)
    return `looks at ${key < query ? "an earlier" : "a later"}`;
  if (key === query - 1) return "looks at the token just before:";
  if (key === query + 1) return "looks at the token just after:";
  return "looks most at";
}

/** A sentence about a word and a key, its strongest or another. */
export function pairSentence(texts: Texts, looks: Looks, key: number): string {
  const { query, line } = looks;
  const weight = line.weights[key]!;
  const how =
    key === looks.strongest[0] ? relation(texts, query, key) : pairRelation(texts, query, key);
  const whom = how.endsWith("itself") ? "" : ` ${quoted(texts.keys, key)}`;
  return `${quoted(texts.queries, query)} ${how}${whom}, ${share(weight)}`;
}

const pairRelation = (texts: Texts, query: number, key: number) =>
  texts.same && key === query ? "looks at itself" : "looks at";

/** What a word does: most of it, in one sentence. */
export function sentence(texts: Texts, looks: Looks): string {
  const { query, aside, strongest, line } = looks;
  const key = strongest[0];
  const name = quoted(texts.queries, query);
  const most = key === undefined ? 0 : line.weights[key]!;
  if (aside !== null && aside > 0.5 && most < 0.05)
    return `${name} rests on the first token, ${quoted(texts.keys, 0)}, ${share(aside)}`;
  if (key === undefined) return `${name} looks at nothing: every pair is masked, or zero`;
  return pairSentence(texts, looks, key);
}

/** What was set aside, if it is worth a word. */
export function asideNote(texts: Texts, { aside }: Looks): string {
  if (aside === null || aside < LEAST) return "";
  return `${share(aside)} rests on the first token, ${quoted(texts.keys, 0)}, and is set aside.`;
}

/** The word that shows best what a head does: of all pairs the strongest of its kind. */
export function example(texts: Texts, badge: string, all: Float32Array, keys: number): number {
  const names = texts.keys;
  const kind = (query: number, key: number): boolean => {
    if (!texts.same || !names) return true;
    if (badge === "induction") return key > 0 && key <= query && names[key - 1] === names[query];
    if (badge === "duplicate") return key < query && names[key] === names[query];
    if (badge === "previous") return key === query - 1;
    return key !== query;
  };
  const word = (query: number) => /[\p{L}\p{N}]{2}/u.test(texts.queries?.[query] ?? "");
  const rows = all.length / keys;
  let [best, most] = [rows - 1, 0];
  for (let query = 0; query < rows; query++) {
    if (!word(query)) continue;
    for (let key = rests(texts, query) ? 1 : 0; key < keys; key++) {
      const weight = all[query * keys + key]!;
      if (weight > most && kind(query, key)) [best, most] = [query, weight];
    }
  }
  return best;
}
