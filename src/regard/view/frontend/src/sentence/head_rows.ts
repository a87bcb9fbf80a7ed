/** The weights of a head, row by row: of a short text all at once, so that a hover waits for none. */

import type { Line, Source } from "../sources/source";
import { SIDE, type MapInfo } from "../sources/wire_format";

const KEPT = 128;

export class HeadRows {
  private kept = new Map<string, Promise<Float32Array>>();
  private ready = new Map<string, Float32Array>();

  constructor(
    private source: Source,
    private maps: MapInfo[],
  ) {}

  /** Whether all rows of a head come together. */
  short(map: number): boolean {
    const { queries, keys } = this.maps[map]!;
    return queries <= SIDE && keys <= SIDE && this.source.finest(map) === 0;
  }

  /** A row that is there already. */
  at(map: number, head: number, query: number): Line | null {
    const all = this.ready.get(`${map},${head}`);
    return all ? this.cut(all, map, query) : null;
  }

  async row(map: number, head: number, query: number, signal: AbortSignal): Promise<Line> {
    if (!this.short(map)) return this.source.row(map, [head], query, signal);
    return this.cut(await this.all(map, head), map, query);
  }

  /** All rows of a head of a short text, one after the other. */
  all(map: number, head: number): Promise<Float32Array> {
    const name = `${map},${head}`;
    let found = this.kept.get(name);
    if (found) return found;
    const place = { map, head, level: 0, row: 0, column: 0, quantity: "weight", exact: true };
    found = this.source.tile(place).then(({ mean }) => mean);
    this.kept.set(name, found);
    found.then(
      (all) => this.ready.set(name, all),
      () => this.kept.delete(name),
    );
    for (const old of [...this.kept.keys()].slice(0, -KEPT)) {
      this.kept.delete(old);
      this.ready.delete(old);
    }
    return found;
  }

  private cut(all: Float32Array, map: number, query: number): Line {
    const { keys } = this.maps[map]!;
    return { weights: all.subarray(query * keys, (query + 1) * keys), exact: null };
  }
}
