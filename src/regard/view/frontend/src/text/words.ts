/** A text as words that can be chosen: shaded, dimmed where masked, marked where written. */

import { exactly } from "../drawing/number_format";
import { spelled } from "../drawing/token_spelling";
import { el } from "../elements/element";

export interface Colours {
  ground: string;
  ink: string;
}

export interface Shading {
  /** The colours of a word, if it has any. */
  paint: (at: number) => Colours | null;
  /** What a word weighs; nothing is said where it is not asked. */
  weight: ((at: number) => number) | null;
  /** The first and the last word that the mask shows. */
  seen: [number, number];
  /** Whether to mark where what is seen begins and ends. */
  edges: boolean;
}

export interface Words {
  label: string;
  names: string[] | undefined;
  start: number;
  stop: number;
  /** The word that is asked about, if it is in this text. */
  self: number;
  /** From here on, the model wrote. */
  wrote: number;
  pick: (at: number) => void;
}

const AUTHOR = "written by the model";
const SPACE = /^[ \u0120\u2581]/u;

/** A word by its number, where it has no text. */
const nameOf = (names: string[] | undefined, at: number) => names?.[at] ?? `#${at}`;

/** One word, as the screen and a drawing show it. */
export interface Word {
  at: number;
  text: string;
  /** What is said of it: its number, its weight, who wrote it. */
  about: string;
  colours: Colours | null;
  self: boolean;
  masked: boolean;
  written: boolean;
  /** Whether a space is behind it, or a new line. */
  spaced: boolean;
  ends: boolean;
  /** Whether what is seen begins with it, or ends. */
  opens: boolean;
  closes: boolean;
}

export function wordsOf(of: Words, shading: Shading | null): Word[] {
  const [first, last] = shading?.seen ?? [of.start, of.stop - 1];
  // Where no token brings its own space, each is a word.
  const apart = !of.names?.some((name) => SPACE.test(name));
  const spaced = (at: number) => at < of.stop && (apart || SPACE.test(nameOf(of.names, at)));
  return Array.from({ length: of.stop - of.start }, (_, place) => {
    const at = of.start + place;
    const name = nameOf(of.names, at);
    const masked = at < first || at > last;
    const written = at >= of.wrote;
    const weight = shading?.weight ? exactly(shading.weight(at)) : "";
    const about = [`#${at}`, masked ? "masked" : weight, written && AUTHOR];
    return {
      at,
      text: spelled(name.replace(/^[ \u0120\u2581](?=.)/su, ""), 60),
      about: about.filter(Boolean).join(", "),
      colours: masked ? null : (shading?.paint(at) ?? null),
      self: at === of.self,
      masked,
      written,
      spaced: spaced(at + 1),
      ends: name.includes("\n"),
      opens: Boolean(shading?.edges && at === first),
      closes: Boolean(shading?.edges && at === last),
    };
  });
}

export function words(of: Words, shading: Shading | null): HTMLElement {
  const body = el("div", { class: "words", role: "group", "aria-label": of.label });
  const edge = (sign: string) => el("span", { class: "edge", "aria-hidden": "true" }, sign);
  const tabbed = of.self >= of.start && of.self < of.stop ? of.self : of.start;
  for (const word of wordsOf(of, shading)) {
    if (word.opens) body.append(edge("["));
    const made = button(word);
    made.tabIndex = word.at === tabbed ? 0 : -1;
    body.append(made);
    if (word.closes) body.append(edge("]"));
    if (word.ends) body.append(el("br"));
  }
  const at = (event: Event) => {
    const found = (event.target as HTMLElement).closest<HTMLElement>(".word");
    return found ? Number(found.dataset["place"]) : -1;
  };
  body.addEventListener("click", (event) => at(event) >= 0 && of.pick(at(event)));
  body.addEventListener("keydown", (event) => {
    const steps: Record<string, number> = { ArrowLeft: -1, ArrowRight: 1 };
    const ends: Record<string, number> = { Home: of.start, End: of.stop - 1 };
    const step = steps[event.key];
    const to = ends[event.key] ?? (step === undefined ? -1 : at(event) + step);
    const found = body.querySelector<HTMLElement>(`[data-place="${to}"]`);
    if (!found) return;
    found.focus();
    event.preventDefault();
  });
  return body;
}

function button({ at, text, about, colours, self, masked, written, spaced }: Word): HTMLElement {
  const kinds = [
    "word",
    self && "self",
    masked && "masked",
    written && "written",
    spaced && "spaced",
  ];
  return el(
    "button",
    {
      class: kinds.filter(Boolean).join(" "),
      style: colours ? `background:${colours.ground};color:${colours.ink}` : undefined,
      title: about,
      "aria-pressed": self ? "true" : undefined,
      "data-place": at,
    },
    el("bdi", {}, text),
  );
}
