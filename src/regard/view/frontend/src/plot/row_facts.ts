/** What is known of each query: its largest weight, and how many keys it may see. */

import { extent } from "../sources/wire_format";

/** Of each row of cells: the largest weight, and what even attention gives each key. */
export interface Facts {
  largest: Float32Array;
  even: Float32Array;
}

/** What is known of each query, pooled to the rows of a level. */
export class RowFacts {
  private levels = new Map<number, Facts>();

  constructor(
    private largest: Float32Array,
    private visible: Float32Array,
  ) {}

  at(level: number): Facts {
    let found = this.levels.get(level);
    if (found) return found;
    const cell = 1 << level;
    const rows = Math.ceil(this.largest.length / cell);
    found = { largest: new Float32Array(rows), even: new Float32Array(rows) };
    for (let q = 0; q < this.largest.length; q++) {
      const row = q >> level;
      const even = this.visible[q]! > 0 ? 1 / this.visible[q]! : 0;
      found.largest[row] = Math.max(found.largest[row]!, this.largest[q]!);
      found.even[row]! += even / extent(row, cell, this.largest.length);
    }
    this.levels.set(level, found);
    return found;
  }
}
