/** The strongest pairs of a head, to jump to. */

import { percent } from "../drawing/number_format";
import { spelled } from "../drawing/token_spelling";
import { el } from "../elements/element";
import type { State } from "../selection/view_state";
import type { Pair, Source } from "../sources/source";
import type { Index } from "../sources/wire_format";

const COUNT = 6;
/** Milliseconds that a head is looked at before it is asked: heads are leafed through. */
const PAUSE = 250;

export class StrongestPairs {
  readonly root = el("div", { class: "pairs", hidden: true });
  private list = el("ol", {});
  private note = el("p", { class: "note" });
  private kept = new Map<string, Pair[] | null>();
  private shown = "";
  private asking: AbortController | null = null;

  constructor(
    private source: Source,
    private index: Index,
    private state: () => State,
    private jump: (query: number, key: number) => void,
  ) {
    const title = el("h2", { class: "label" }, "Strongest pairs");
    this.root.append(title, this.note, this.list);
  }

  /** The pairs of the head that is shown now. */
  show(): void {
    const { map, head } = this.state();
    const name = `${map},${head}`;
    if (name === this.shown) return this.mark();
    this.shown = name;
    this.asking?.abort();
    const kept = this.kept.get(name);
    if (kept !== undefined) return this.fill(kept);
    this.list.replaceChildren();
    this.note.textContent = "Reading …";
    const { signal } = (this.asking = new AbortController());
    window.setTimeout(() => void this.ask(map, head, name, signal), PAUSE);
  }

  close(): void {
    this.asking?.abort();
  }

  /** Which of them is picked. */
  mark(): void {
    const picked = this.state().picked.join();
    for (const button of this.list.querySelectorAll("button"))
      button.setAttribute("aria-pressed", String(button.dataset["pair"] === picked));
  }

  private async ask(map: number, head: number, name: string, signal: AbortSignal): Promise<void> {
    if (signal.aborted) return;
    try {
      const found = await this.source.pairs(map, head, COUNT, this.aside(map) ? 1 : 0, signal);
      this.kept.set(name, found);
      if (!signal.aborted) this.fill(found);
    } catch (error) {
      if (signal.aborted) return;
      this.shown = "";
      this.note.textContent = error instanceof Error ? error.message : String(error);
      this.root.hidden = false;
    }
  }

  /** Where a text looks at itself, the first token is a place to rest. */
  private aside(map: number): boolean {
    const { queryText, keyText } = this.index.maps[map]!;
    return queryText === keyText;
  }

  private fill(found: Pair[] | null): void {
    this.root.hidden = !found;
    if (!found) return;
    const { map } = this.state();
    const { queryText, keyText } = this.index.maps[map]!;
    const named = (text: number, at: number) => {
      const token = this.index.texts[text]?.[at];
      return token === undefined ? `#${at}` : spelled(token.trim() || token, 12);
    };
    this.note.textContent = found.length
      ? `One for each query${this.aside(map) ? "; the first token set aside" : ""}.`
      : "This head looks at nothing else than the first token.";
    this.list.replaceChildren(
      ...found.map(({ query, key, weight }) =>
        el(
          "li",
          {},
          el(
            "button",
            {
              "data-pair": `${query},${key}`,
              title: `#${query} → #${key}`,
              onclick: () => this.jump(query, key),
            },
            el("bdi", { class: "token" }, named(queryText, query)),
            el("span", {}, "→"),
            el("bdi", { class: "token" }, named(keyText, key)),
            el("span", { class: "figure" }, percent(weight)),
          ),
        ),
      ),
    );
    this.mark();
  }
}
