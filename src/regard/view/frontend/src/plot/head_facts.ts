/** What is asked of a head once, and kept: facts of its rows, and their strongest keys. */

import type { State } from "../selection/view_state";
import type { Source, Strongest } from "../sources/source";
import { RowFacts } from "./row_facts";

export class HeadFacts {
  private facts = new Map<string, RowFacts | null>();
  private best = new Map<string, Strongest | null>();

  constructor(
    private source: Source,
    private changed: () => void,
  ) {}

  /** Facts of each row, where the scale needs them; null until they are there. */
  rows({ map, head, scale }: State): RowFacts | null {
    if (scale !== "row" && scale !== "ratio") return null;
    const name = `${map},${head}`;
    const found = this.facts.get(name);
    if (found !== undefined) return found;
    this.facts.set(name, null);
    Promise.all([this.source.largest(map, head), this.source.visible(map)]).then(
      ([largest, visible]) => {
        this.facts.set(name, new RowFacts(largest, visible));
        this.changed();
      },
      () => this.facts.delete(name),
    );
    return null;
  }

  strongest({ map, head }: State): Strongest | null {
    const name = `${map},${head}`;
    const found = this.best.get(name);
    if (found !== undefined) return found;
    this.best.set(name, null);
    void this.source.strongest(map, head).then((strongest) => {
      this.best.set(name, strongest);
      if (strongest) this.changed();
    });
    return null;
  }
}
