/** Layers × heads: a word for what each head does on this text. Pointing at one shows it. */

import { el } from "../elements/element";
import { headName, layerName } from "../selection/layer_names";
import { partsOf } from "../selection/model_parts";
import type { Source } from "../sources/source";
import type { MapInfo } from "../sources/wire_format";
import { aboutKind, badgeOf, KINDS } from "./badge_words";

export interface HeadPlace {
  map: number;
  head: number;
}

interface Hands {
  preview: (place: HeadPlace | null) => void;
  choose: (place: HeadPlace) => void;
  /** Some badges came. */
  told: () => void;
}

/** How many heads side by side leave room for a word, and for a letter. */
const WORDS = 8;
const LETTERS = 20;
const USUAL = "known of this model from many texts, not from this one";

export class BadgeGrid {
  readonly root = el("div", { class: "badges" });
  private cells = new Map<string, HTMLElement>();
  private told = new Map<number, string[] | null>();
  private legend = el("dl", { class: "kinds" });
  private note = el("p", { class: "note", role: "status" });
  private stopping = new AbortController();

  constructor(
    private source: Source,
    private maps: MapInfo[],
    private hands: Hands,
  ) {
    const parts = partsOf(maps);
    this.root.append(el("h2", {}, "Layers and heads"));
    for (const [part, places] of parts) {
      if (parts.length > 1) this.root.append(el("h3", {}, part));
      this.root.append(this.table(places));
    }
    this.root.append(this.note, this.legend);
    this.listen();
  }

  /** The word for a head; undefined while nobody knows. */
  badge(place: HeadPlace): string | undefined {
    return badgeOf(this.own(place), this.maps[place.map]!.known[place.head]);
  }

  /** What it does on this text. */
  private own({ map, head }: HeadPlace): string | undefined {
    const told = this.told.get(map);
    return told === null ? "" : told?.[head];
  }

  show(chosen: HeadPlace): void {
    for (const cell of this.cells.values()) {
      const here = same(placeOf(cell), chosen);
      cell.setAttribute("aria-pressed", String(here));
      cell.tabIndex = here ? 0 : -1;
    }
  }

  /** Ask for the words, layer by layer; those of the layer that is looked at first. */
  async read(first: number): Promise<void> {
    const { signal } = this.stopping;
    const order = [first, ...[...this.maps.keys()].filter((at) => at !== first)];
    let long = false;
    for (const [done, map] of order.entries()) {
      if (this.told.has(map)) continue;
      try {
        const found = await this.source.badges(map, signal);
        if (signal.aborted) return;
        this.told.set(map, found);
        long ||= found === null;
      } catch (error) {
        if (signal.aborted || error instanceof DOMException) return;
        this.note.textContent = `What heads do could not be read: ${String(error)}`;
        return;
      }
      this.fill(map);
      const wait = done + 1 < order.length && this.maps[map]!.keys > 1000;
      this.note.textContent = wait ? `What heads do: ${done + 1} of ${order.length} layers …` : "";
      this.hands.told();
    }
    const plain = [...this.told].some(([map, told]) =>
      (told ?? []).some((_, head) => this.badge({ map, head })),
    );
    if (long) this.note.textContent = "The text is too long to tell what each head does.";
    else if (!plain) this.note.textContent = "No head does anything plain on this text.";
  }

  close(): void {
    this.stopping.abort();
  }

  private table(places: number[]): HTMLElement {
    const widest = Math.max(...places.map((at) => this.maps[at]!.heads));
    const room = widest <= WORDS ? "words" : widest <= LETTERS ? "letters" : "colours";
    const tall =
      places.length <= 10 ? 34 : places.length <= 16 ? 27 : places.length <= 26 ? 19 : 13;
    const made = el("div", {
      class: `table ${room}`,
      role: "group",
      "aria-label": "Layers and heads",
      style: `--across:${widest};--tall:${tall}px`,
    });
    if (room !== "colours") {
      made.append(el("span", { class: "corner" }, ""));
      for (let head = 0; head < widest; head++)
        made.append(el("span", { class: "label column" }, String(head)));
    }
    for (const [row, map] of places.entries()) {
      const name = layerName(this.maps, map);
      const number = /layer (\d+)/i.exec(name)?.[1] ?? String(row);
      made.append(el("span", { class: "label", title: this.maps[map]!.name }, number));
      for (let head = 0; head < widest; head++)
        made.append(head < this.maps[map]!.heads ? this.cell({ map, head }) : el("span", {}));
    }
    return made;
  }

  private cell({ map, head }: HeadPlace): HTMLElement {
    const made = el("button", {
      class: "head",
      "data-map": map,
      "data-head": head,
      tabindex: "-1",
      "aria-label": headName(this.maps, map, head),
    });
    this.cells.set(`${map},${head}`, made);
    return made;
  }

  private fill(map: number): void {
    for (let head = 0; head < this.maps[map]!.heads; head++) {
      const cell = this.cells.get(`${map},${head}`)!;
      const badge = this.badge({ map, head }) ?? "";
      const roomy = cell.parentElement!.classList.contains("words");
      const kind = KINDS[badge];
      const own = this.own({ map, head }) ?? "";
      cell.dataset["badge"] = badge;
      cell.classList.toggle("usual", badge !== own);
      // Drawn by the style: what it is called is its label.
      cell.dataset["short"] = roomy ? (kind?.short ?? badge) : (kind?.sign ?? "");
      const name = headName(this.maps, map, head);
      cell.setAttribute("aria-label", badge ? `${name}, ${badge}` : name);
      const here = badge === own ? "" : ` over many texts; on this one, ${aboutKind(own)}`;
      cell.title = `${name}: ${aboutKind(badge)}${here}`;
    }
    this.explain();
  }

  /** The kinds that there are, and how many heads are of each. */
  private explain(): void {
    const many = new Map<string, number>();
    let usual = false;
    for (const [map, told] of this.told)
      for (const head of (told ?? []).keys()) {
        const badge = this.badge({ map, head }) ?? "";
        usual ||= badge !== this.own({ map, head });
        many.set(badge, (many.get(badge) ?? 0) + 1);
      }
    const letters = this.root.querySelector(".letters") !== null;
    this.legend.replaceChildren(
      ...Object.entries(KINDS)
        .filter(([name]) => many.has(name))
        .flatMap(([name, { sign, about }]) => [
          el("dt", { class: "badge", "data-badge": name }, letters ? `${sign} ${name}` : name),
          el("dd", {}, about, el("span", { class: "place" }, String(many.get(name)))),
        ]),
      ...(usual ? [el("dt", { class: "badge usual" }, "dashed"), el("dd", {}, USUAL)] : []),
    );
  }

  private listen(): void {
    const at = (event: Event) => {
      const cell = (event.target as HTMLElement).closest<HTMLElement>(".head");
      return cell ? placeOf(cell) : null;
    };
    for (const kind of ["pointerover", "focusin"])
      this.root.addEventListener(kind, (event) => {
        if ((event as PointerEvent).pointerType !== "touch") this.hands.preview(at(event));
      });
    for (const kind of ["pointerleave", "focusout"])
      this.root.addEventListener(kind, () => this.hands.preview(null));
    this.root.addEventListener("click", (event) => {
      const place = at(event);
      if (place) this.hands.choose(place);
    });
    this.root.addEventListener("keydown", (event) => this.key(event));
  }

  private key(event: KeyboardEvent): void {
    const from = (event.target as HTMLElement).closest<HTMLElement>(".head");
    const steps: Record<string, [number, number]> = {
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
    };
    const step = steps[event.key];
    if (!from || !step) return;
    const { map, head } = placeOf(from);
    const down = Math.max(0, Math.min(map + step[0], this.maps.length - 1));
    const right = Math.max(0, Math.min(head + step[1], this.maps[down]!.heads - 1));
    this.cells.get(`${down},${right}`)?.focus();
    event.preventDefault();
  }
}

const placeOf = ({ dataset }: HTMLElement): HeadPlace => ({
  map: Number(dataset["map"]),
  head: Number(dataset["head"]),
});

export const same = (one: HeadPlace, other: HeadPlace) =>
  one.map === other.map && one.head === other.head;
