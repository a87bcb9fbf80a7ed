/** How far each head differs: from itself in the other text or model, or from the first head. */

import { el } from "../elements/element";
import { headCells, strength } from "../selection/head_cells";
import { headName, layerName, lowered } from "../selection/layer_names";
import { share } from "../sentence/caption";
import type { Index } from "../sources/wire_format";
import { alignedParts, difference, sharesOf, type Part, type Shares } from "./difference";

export class DifferenceGrid {
  readonly root = el("div", { class: "far" });
  private status = el("p", { class: "note", role: "status" });
  private cells = new Map<string, HTMLElement>();
  private far = new Map<string, number>();
  private of = "";

  constructor(
    private index: Index,
    /** A head was chosen: as the second alone, or as both. */
    private choose: (map: number, head: number, alone: boolean) => void,
  ) {}

  /** `first` is what the first of both looks at. */
  async show([one, other]: [Part, Part], first: Shares, signal: AbortSignal): Promise<void> {
    const alone = one.source === other.source;
    const { maps } = this.index;
    const now = alone ? other : one;
    const rows = maps.map(({ heads, name }, map) => ({
      nth: /layer (\d+)/i.exec(layerName(maps, map))?.[1] ?? "",
      cells: Array.from({ length: heads }, (_, head) => this.cell(map, head, name, alone, now)),
    }));
    const title = alone ? "How far heads are from the first" : "How far heads differ";
    this.root.replaceChildren(el("h2", {}, title), headCells(title, rows), this.status);
    const of = [other.index.model, other.index.texts.join(), alone && [one.map, one.head]].join(
      "|",
    );
    if (this.of !== of) this.far.clear();
    this.of = of;
    for (const [map, { heads }] of maps.entries()) {
      const row = Array.from({ length: heads }, async (_, head) => {
        const name = `${map}.${head}`;
        const here = { ...one, map, head };
        const there = alone ? one : { ...other, map, head };
        const measure = () => this.measure(here, there, alone ? first : null, signal);
        const found = this.far.get(name) ?? (await measure());
        if (found !== null && !signal.aborted) this.far.set(name, found);
      });
      await Promise.all(row);
      signal.throwIfAborted();
      this.showStatus();
    }
    this.summary(alone);
  }

  /** The mean share of attention that goes elsewhere; null where nobody can say. */
  private async measure(
    here: Part,
    there: Part,
    first: Shares | null,
    signal: AbortSignal,
  ): Promise<number | null> {
    if (there.head >= (there.index.maps[there.map]?.heads ?? 0)) return null;
    const a = await sharesOf(here, signal);
    const b = first ?? (await sharesOf(there, signal));
    const pairs = a.level === b.level ? alignedParts(here, there, a.level) : null;
    return pairs && difference(a, b, pairs).mean;
  }

  private cell(map: number, head: number, name: string, alone: boolean, now: Part): HTMLElement {
    const made = el("button", {
      "aria-pressed": String(map === now.map && head === now.head),
      "aria-label": headName(this.index.maps, map, head),
      title: name,
      onclick: () => this.choose(map, head, alone),
    });
    this.cells.set(`${map}.${head}`, made);
    return made;
  }

  /** What is known; the strongest colour is that of the farthest. */
  private showStatus(): void {
    const most = Math.max(...this.far.values(), 1e-9);
    for (const [name, far] of this.far) {
      const cell = this.cells.get(name)!;
      strength(cell, far / most);
      cell.dataset["far"] = far.toFixed(5);
      cell.textContent = String(Math.round(100 * far));
      cell.title = `${this.called(name)}: ${share(far)} goes elsewhere`;
      cell.setAttribute("aria-label", cell.title);
    }
  }

  private called(name: string): string {
    const [map, head] = name.split(".").map(Number) as [number, number];
    return headName(this.index.maps, map, head);
  }

  private summary(alone: boolean): void {
    const [name, far] = [...this.far].sort((a, b) => b[1] - a[1])[0] ?? ["", 0];
    if (!name) return;
    const who = `${lowered(this.called(name))}, ${share(far)}`;
    this.status.textContent = alone
      ? `In percent. Farthest is ${who}. A click takes a head as the second.`
      : `In percent. Most differs ${who}. A click chooses a head of both.`;
  }
}
