/** The words for what heads do, as `interpret.badges` gives them: short, and in a sentence. */

export interface Kind {
  /** For a narrow cell. */
  short: string;
  sign: string;
  about: string;
}

export const KINDS: Record<string, Kind> = {
  induction: {
    short: "induc.",
    sign: "I",
    about: "looks at what followed the same token before",
  },
  duplicate: { short: "same", sign: "D", about: "looks at the same token, said before" },
  previous: { short: "prev", sign: "P", about: "looks at the token just before" },
  first: { short: "first", sign: "F", about: "rests on the first token" },
  separator: { short: "sep", sign: "S", about: "looks at punctuation and line ends" },
  local: { short: "local", sign: "L", about: "looks at its neighbours" },
  broad: { short: "broad", sign: "B", about: "spreads over all it may see" },
};

/** What a head does, in a sentence; of a word that is not known, the word. */
export const aboutKind = (badge: string) =>
  badge ? (KINDS[badge]?.about ?? badge) : "nothing plain on this text";

/** What says least: a head that finds nothing to look for rests on the first token. */
const RESTS = ["", "first"];

/** The word for a head: what it does on this text; where it finds nothing there, what the model tells
 * of it over many. */
export const badgeOf = (own: string | undefined, usual: string | undefined) =>
  usual && RESTS.includes(own ?? "") ? usual : own;
