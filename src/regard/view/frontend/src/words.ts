/** A text as words that can be chosen: shaded, dimmed where the mask hides, marked where written. */

import { exactly } from "./colour";
import { el, spelled } from "./dom";

export interface Shading {
  /** The style of a word. */
  paint: (at: number) => string;
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

const SPACE = /^[ \u0120\u2581]/u;

/** A word by its number, where it has no text. */
const nameOf = (names: string[] | undefined, at: number) => names?.[at] ?? `#${at}`;

export function words(of: Words, shading: Shading | null): HTMLElement {
  const body = el("div", { class: "words", role: "group", "aria-label": of.label });
  const [first, last] = shading?.seen ?? [of.start, of.stop - 1];
  const edge = (sign: string) => el("span", { class: "edge", "aria-hidden": "true" }, sign);
  // Where no token brings its own space, each is a word.
  const apart = !of.names?.some((name) => SPACE.test(name));
  const tabbed = of.self >= of.start && of.self < of.stop ? of.self : of.start;
  for (let at = of.start; at < of.stop; at++) {
    const name = nameOf(of.names, at);
    if (shading?.edges && at === first) body.append(edge("["));
    const made = word(of, shading, at, name, at < first || at > last);
    made.classList.toggle("spaced", apart || SPACE.test(name));
    made.tabIndex = at === tabbed ? 0 : -1;
    body.append(made);
    if (shading?.edges && at === last) body.append(edge("]"));
    if (name.includes("\n")) body.append(el("br"));
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

function word(
  of: Words,
  shading: Shading | null,
  at: number,
  name: string,
  hidden: boolean,
): HTMLElement {
  const kinds = ["word", at === of.self && "self", hidden && "hid", at >= of.wrote && "written"];
  const weighs = hidden ? "hidden by the mask" : shading?.weight ? exactly(shading.weight(at)) : "";
  return el(
    "button",
    {
      class: kinds.filter(Boolean).join(" "),
      style: hidden ? undefined : shading?.paint(at),
      title: [`#${at}`, weighs, at >= of.wrote && "written by the model"]
        .filter(Boolean)
        .join(", "),
      "aria-pressed": at === of.self ? "true" : undefined,
      "data-place": at,
    },
    el("bdi", {}, spelled(name.replace(/^[ \u0120\u2581](?=.)/su, ""), 60)),
  );
}
