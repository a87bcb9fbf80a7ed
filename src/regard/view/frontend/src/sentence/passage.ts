/** The words, large: each can be pointed at, and is shaded by what one of them gives it. */

import { css, ink, ramp } from "../drawing/colour";
import { el } from "../elements/element";
import { wordsOf } from "../text/words";
import { arcsLayer, drawArcs, type Arc } from "./arcs";
import type { Index, MapInfo } from "../sources/wire_format";
import { LEAST, MARK, share, type Looks, type Texts } from "./caption";

/** Words that are shown at once, at most: a hover takes longer the more there are. */
export const WINDOW = 400;
/** Of another text that is looked at, which is not turned. */
const HELD = 800;
const SIZES = [34, 30, 27, 24, 21, 19, 17, 15];
const READ = 17;
const NARROW = 620;
const ARCS = 8;
/** Where colours end, at least: a head that looks nowhere is pale. */
const PALE = 0.05;
/** Weights from which on a word says its share. */
const SAID = 0.05;
/** Tokens without a space between them that are kept in one line, and their letters. */
const GLUED = 6;
const LETTERS = 24;
/** Words that are drawn together: what changes among some leaves the others as they are. */
const PART = 40;

/** A text that is shown, and whether its words look, are looked at, or both. */
export interface Side {
  label: string;
  names: string[] | undefined;
  count: number;
  /** From here on, the model wrote. */
  wrote: number;
}

export interface Painted {
  looks: Looks;
  /** The first and the last word that may be seen. */
  seen: [number, number];
  /** The key of the pair that is held, if one is. */
  held: number | null;
  pinned: boolean;
}

export class Passage {
  readonly root = el("div", { class: "passage" });
  private arcs = arcsLayer();
  private queries: HTMLElement[] = [];
  private keys: HTMLElement[] = [];
  private start = 0;
  private same = true;
  private painted: (() => void) | null = null;
  /** How each word looks. */
  private shown = new Map<HTMLElement, string>();

  /** One text, or that which looks above that which is looked at. */
  fill(asks: Side, holds: Side | null, start: number): void {
    this.start = start;
    this.same = holds === null;
    const ours = group(asks, "query", start, WINDOW);
    const theirs = holds && group(holds, "key", 0, HELD);
    this.queries = words(ours);
    this.keys = theirs ? words(theirs) : this.queries;
    this.painted = null;
    this.shown.clear();
    this.root.replaceChildren(
      this.arcs,
      ...(theirs ? [el("h3", {}, asks.label), ours, el("h3", {}, holds!.label), theirs] : [ours]),
    );
  }

  word(query: number): HTMLElement | null {
    return this.queries[query - this.start] ?? null;
  }

  key(at: number): HTMLElement | null {
    return this.keys[this.same ? at - this.start : at] ?? null;
  }

  /** The largest letters with which all words are seen without scrolling. */
  fit(width: number, height: number): void {
    const short = this.queries.length <= 260 && this.keys.length <= 260;
    const set = (size: number) => this.root.style.setProperty("--size", `${size}px`);
    this.root.classList.toggle("long", !short);
    if (width < NARROW) set(this.queries.length > 60 ? READ : 20);
    else if (!short) set(READ);
    else {
      for (const size of SIZES) {
        set(size);
        if (this.root.scrollHeight <= height) break;
      }
    }
    this.painted?.();
  }

  /** Shade what a word looks at, and draw curves to the strongest. */
  paint(given: Painted | null, theme: "light" | "dark"): number {
    if (!given) {
      for (const word of new Set([...this.queries, ...this.keys])) bare(word);
      this.shown.clear();
      drawArcs(this.arcs, null, []);
      this.painted = null;
      return 0;
    }
    const { looks } = given;
    const most = looks.strongest[0];
    const high = Math.max(PALE, most === undefined ? 0 : looks.line.weights[most]!);
    if (!this.same) for (const word of this.queries) bare(word);
    this.shade(given, high, theme);
    const from = this.word(looks.query);
    this.root.classList.toggle("holds", given.pinned);
    for (const old of this.root.querySelectorAll<HTMLElement>(".self"))
      if (old !== from) release(old);
    if (from) {
      from.classList.add("self");
      from.classList.toggle("pinned", given.pinned);
      from.setAttribute("aria-pressed", String(given.pinned));
    }
    const arcs = this.joined(given, from, high);
    this.painted = () => drawArcs(this.arcs, from, arcs);
    this.painted();
    return high;
  }

  /** Colour the words; those that look as before are left alone, so that a hover stays quick. */
  private shade({ looks, seen, held }: Painted, high: number, theme: "light" | "dark"): void {
    const { weights } = looks.line;
    const table = ramp(theme);
    for (const [place, word] of this.keys.entries()) {
      const at = this.same ? this.start + place : place;
      const masked = at < seen[0] || at > seen[1];
      const aside = looks.aside !== null && at === 0;
      const weight = masked ? 0 : weights[at]!;
      const shaded = !aside && weight >= Math.max(LEAST, high / 40);
      const step = shaded ? Math.round((255 * weight) / high) : -1;
      const says = (weight >= SAID || at === held || aside) && weight >= LEAST;
      const looksLike = [theme, step, masked, aside, at === held, says ? share(weight) : ""].join();
      if (this.shown.get(word) === looksLike) continue;
      this.shown.set(word, looksLike);
      word.style.background = shaded ? css(table[step]!) : "";
      word.style.color = shaded ? ink(table[step]!) : "";
      word.classList.toggle("masked", masked);
      word.classList.toggle("aside", aside);
      word.classList.toggle("held", at === held);
      if (says) word.dataset["share"] = share(weight);
      else delete word.dataset["share"];
    }
  }

  /** The words that a word is joined to. */
  private joined({ looks, held }: Painted, from: HTMLElement | null, high: number): Arc[] {
    const { strongest, aside, line } = looks;
    const ends = new Set([...strongest.slice(0, ARCS), ...(held === null ? [] : [held])]);
    return [...ends].flatMap((at): Arc[] => {
      const to = this.key(at);
      const weight = line.weights[at]!;
      const enough = weight >= Math.max(LEAST * 2, high / 12) || at === held;
      if (!to || to === from || !enough || (aside !== null && at === 0)) return [];
      return [{ to, weight, strong: at === (held ?? strongest[0]) }];
    });
  }
}

export function textsOf({ texts }: Index, { queryText, keyText, queries, keys }: MapInfo): Texts {
  const same = queryText === keyText && queries === keys;
  return { queries: texts[queryText], keys: texts[keyText], same };
}

/** The text, or the two, of which a map is. */
export function sidesOf({ queries, keys, same }: Texts, map: MapInfo): [Side, Side | null] {
  const wrote = same && map.starts.length > 1 ? map.starts[1]! : Infinity;
  const asks = { label: same ? "Text" : "What looks", names: queries, count: map.queries, wrote };
  const holds = { label: "What is looked at", names: keys, count: map.keys, wrote };
  return [asks, same ? null : holds];
}

function release(word: HTMLElement): void {
  word.classList.remove("self", "pinned");
  word.removeAttribute("aria-pressed");
}

function bare(word: HTMLElement): void {
  word.style.background = word.style.color = "";
  word.classList.remove("masked", "aside", "held");
  release(word);
  delete word.dataset["share"];
}

const words = (group: HTMLElement) => [...group.querySelectorAll<HTMLElement>(".word")];

function group(of: Side, side: string, start: number, most: number): HTMLElement {
  const { label, names, count, wrote } = of;
  const stop = Math.min(count, start + most);
  const made = el("div", { class: "said", role: "group", "aria-label": label, "data-side": side });
  const pick = () => {};
  let [together, letters]: [HTMLElement[], number] = [[], 0];
  let part: HTMLElement = made;
  const add = (...some: (HTMLElement | string)[]) => {
    if (part === made || part.childElementCount >= PART)
      made.append((part = el("span", { class: "part" })));
    part.append(...some);
  };
  for (const each of wordsOf({ label, names, start, stop, self: -1, wrote, pick }, null)) {
    const apart = each.spaced || MARK.test(each.text);
    const kinds = [
      "word",
      apart && "spaced",
      each.written && "written",
      each.text.length < 3 && "tiny",
    ];
    together.push(
      el(
        "button",
        {
          class: kinds.filter(Boolean).join(" "),
          "data-place": each.at,
          tabindex: each.at === start ? "0" : "-1",
          title: each.about,
        },
        el("bdi", {}, each.text),
      ),
    );
    letters += each.text.length;
    if (!apart && !each.ends && together.length < GLUED && letters < LETTERS) continue;
    add(glued(together), each.ends ? el("br") : "");
    [together, letters] = [[], 0];
  }
  add(glued(together));
  return made;
}

/** Parts of a word, and the marks behind it, stay in one line. */
const glued = (parts: HTMLElement[]) =>
  parts.length > 1 ? el("span", { class: "glued" }, ...parts) : (parts[0] ?? "");
