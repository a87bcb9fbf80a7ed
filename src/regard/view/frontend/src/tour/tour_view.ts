/** How one weight comes about, in five steps with the numbers of this text. */

import { el, refill } from "../elements/element";
import { headName } from "../selection/layer_names";
import type { State } from "../selection/view_state";
import type { Source } from "../sources/source";
import type { Index, Tour, TourStep } from "../sources/wire_format";

export class TourView {
  readonly root = el("section", { class: "learn", "aria-label": "Learn" });
  private place = el("div", { class: "tour" });
  private asked = "";
  private tour: Tour | null = null;

  constructor(
    private source: Source,
    private index: Index,
    private state: () => State,
    private change: (part: Partial<State>) => void,
    /** What else there is to learn from. */
    below: HTMLElement | null,
  ) {
    this.root.append(this.place, below ?? "");
  }

  async show(): Promise<void> {
    const { map, head, picked } = this.state();
    const asked = JSON.stringify([map, head, picked]);
    if (asked !== this.asked) {
      this.asked = asked;
      try {
        const told = await this.source.tour(map, head, picked);
        if (asked !== this.asked) return;
        this.tour = told;
      } catch (error) {
        this.asked = "";
        this.place.replaceChildren(
          el("p", { class: "note bad", role: "alert" }, `This could not be told: ${String(error)}`),
        );
        return;
      }
    }
    this.render();
  }

  private render(): void {
    const told = this.tour;
    if (!told) return;
    const { map, head } = this.index.tour ?? this.state();
    const last = told.steps.length - 1;
    const at = Math.min(this.state().step, last);
    const go = (step: number, name: string, off: boolean) =>
      el("button", { disabled: off, onclick: () => this.change({ step }) }, name);
    refill(
      this.place,
      el(
        "h2",
        {},
        "How a weight comes about",
        el("span", { class: "place" }, this.where(map, head)),
      ),
      this.source.kind === "page" &&
        el("p", { class: "note" }, "A page tells this of one pair; the app does of any."),
      el(
        "ol",
        { class: "steps" },
        ...told.steps.map(({ title }, step) =>
          el(
            "li",
            {},
            el(
              "button",
              {
                "aria-current": step === at ? "step" : undefined,
                onclick: () => this.change({ step }),
              },
              `${step + 1} ${title}`,
            ),
          ),
        ),
      ),
      el("div", { class: "told", "aria-live": "polite" }, ...stepNodes(told.steps[at]!)),
      el(
        "div",
        { class: "turns" },
        go(at - 1, "← Back", at === 0),
        go(at + 1, "Next →", at === last),
        this.worded(map) &&
          el("button", { onclick: () => this.home(told) }, "Show it in the sentence"),
      ),
    );
  }

  /** Whether the sentence can show it. */
  private worded(map: number): boolean {
    const { maps, texts, pictures } = this.index;
    const { queryText } = maps[map]!;
    return texts[queryText] !== undefined && !pictures[queryText];
  }

  private where(map: number, head: number): string {
    return `${headName(this.index.maps, map, head)} · ${this.index.model || "this text"}`;
  }

  private home({ query, key }: Tour): void {
    this.change({ view: "sentence", picked: [query, key] });
  }
}

function stepNodes({ text, sum, words, vectors, table }: TourStep): HTMLElement[] {
  const made: HTMLElement[] = [el("p", {}, el("bdi", {}, text))];
  if (sum) made.push(el("p", { class: "sum" }, el("bdi", {}, sum)));
  if (words)
    made.push(
      el(
        "ol",
        { class: "tokens" },
        ...words.map(({ at, text, kind }) =>
          el("li", { class: kind }, el("bdi", {}, text), el("span", { class: "note" }, `#${at}`)),
        ),
      ),
    );
  for (const { name, numbers } of vectors ?? []) made.push(strip(name, numbers));
  if (table)
    made.push(
      el(
        "table",
        {},
        el(
          "thead",
          {},
          el("tr", {}, ...table.header.map((cell) => el("th", { scope: "col" }, cell))),
        ),
        el(
          "tbody",
          {},
          ...table.rows.map(({ cells: [name, ...cells], own }) =>
            el(
              "tr",
              { class: own ? "own" : undefined },
              el("th", { scope: "row" }, el("bdi", {}, name)),
              ...cells.map((cell) => el("td", {}, cell)),
            ),
          ),
        ),
      ),
    );
  return made;
}

/** A vector: blue above zero, red below, the stronger the larger. */
function strip(name: string, numbers: number[]): HTMLElement {
  const most = Math.max(...numbers.map(Math.abs), 1e-9);
  const cells = numbers.map((number) =>
    el("span", {
      class: number < 0 ? "below" : "above",
      style: `--size:${Math.abs(number) / most}`,
      title: String(number),
    }),
  );
  const told = `${numbers.length} numbers from ${Math.min(...numbers)} to ${Math.max(...numbers)}`;
  return el(
    "div",
    { class: "vector" },
    el("span", { class: "label" }, el("bdi", {}, name)),
    el("div", { class: "cells", role: "img", "aria-label": told }, ...cells),
  );
}
