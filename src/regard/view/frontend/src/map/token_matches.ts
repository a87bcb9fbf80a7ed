/** Where words stand in a text, which may be cut into several tokens. */

import type { Mark } from "../plot/marks";
import type { MapInfo } from "../sources/wire_format";

/** The first and the last token of each place where the words stand; upper case is no difference. */
export function matchesOf(tokens: string[], wanted: string): [number, number][] {
  const words = wanted.trim().toLowerCase();
  if (!words) return [];
  const lowered = tokens.map((token) => token.toLowerCase());
  const text = lowered.join("");
  const ends: number[] = [];
  let long = 0;
  for (const token of lowered) ends.push((long += token.length));
  const found: [number, number][] = [];
  let token = 0;
  for (let at = text.indexOf(words); at >= 0; at = text.indexOf(words, at + 1)) {
    while (ends[token]! <= at) token++;
    let last = token;
    while (ends[last]! < at + words.length) last++;
    if (found.at(-1)?.[0] !== token) found.push([token, last]);
  }
  return found;
}

/** What was found on the axes of a map: on both, where queries and keys are one text. */
export function marksOf(
  { queries, keys, queryText, keyText }: MapInfo,
  texts: string[][],
  wanted: string,
): Mark[] {
  const along = (text: number, n: number, rows: boolean, columns: boolean): Mark[] =>
    matchesOf(texts[text]?.slice(0, n) ?? [], wanted).map(([first, last]) => {
      return { first, last, rows, columns };
    });
  if (queryText === keyText) return along(keyText, Math.max(queries, keys), true, true);
  return [...along(queryText, queries, true, false), ...along(keyText, keys, false, true)];
}
