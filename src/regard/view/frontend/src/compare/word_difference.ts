/** A text shaded by what one head gives its words above another. */

import { share } from "../sentence/caption";
import type { Passage } from "../sentence/passage";

/** Changes below are not worth a word. */
export const LEAST = 0.01;

export interface Change {
  key: number;
  /** What the first gives it, and the second. */
  from: number;
  to: number;
  /** The word that stands for it in the other text, where that is another. */
  instead: string;
}

export const signed = (change: number) => `${change < 0 ? "−" : "+"}${share(Math.abs(change))}`;

export function paintChanges(passage: Passage, query: number, changes: Change[]): void {
  passage.paint(null, "light");
  const high = Math.max(LEAST, ...changes.map(({ from, to }) => Math.abs(to - from)));
  for (const { key, from, to, instead } of changes) {
    const word = passage.key(key);
    const change = to - from;
    if (!word || Math.abs(change) < LEAST) continue;
    const ink = change < 0 ? "--meter" : "--accent";
    const strength = Math.round((55 * Math.abs(change)) / high);
    word.style.background = `color-mix(in srgb, var(${ink}) ${strength}%, transparent)`;
    word.dataset["share"] = `${instead && `${instead} `}${signed(change)}`;
  }
  passage.word(query)?.classList.add("self");
}
