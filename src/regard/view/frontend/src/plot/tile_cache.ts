/** Tiles that were fetched, and those that are on their way. */

import type { Place, Source } from "../sources/source";
import type { Tile } from "../sources/wire_format";

/** What the cells of a tile count for, under a pooling and a scale. */
export interface TileValues {
  name: string;
  /** On the axis of the scale, or the logarithm of that where colours go by it; NaN for nothing. */
  along: Float32Array;
  most: number;
}

export interface CachedTile {
  place: Place;
  /** What is drawn: one of the two below. */
  tile: Tile | null;
  draft: Tile | null;
  exact: Tile | null;
  failed: string | null;
  /** What its picture is made of, as long as pooling and scale stay. */
  values: TileValues | null;
  picture: HTMLCanvasElement | null;
  colours: string;
  refining: boolean;
}

const MOST = 320;

export const heldTile = (place: Place, tile: Tile | null = null): CachedTile => ({
  place,
  tile,
  draft: null,
  exact: null,
  failed: null,
  values: null,
  picture: null,
  colours: "",
  refining: false,
});

/** Drafts until all that is in view was read in full: between a draft and what is exact an edge
 * would show that is not in the data. */
export function settle(seen: CachedTile[]): void {
  const rough = seen.some(({ draft, exact }) => draft && !exact);
  for (const held of seen)
    held.tile = (rough ? held.draft : held.exact) ?? held.exact ?? held.draft;
}

export class TileCache {
  private held = new Map<string, CachedTile>();
  private asked = new Map<CachedTile, AbortController>();

  constructor(
    private source: Source,
    private changed: () => void,
  ) {}

  static key(place: Place): string {
    const { map, head, level, row, column, quantity } = place;
    return [map, head, level, row, column, quantity].join();
  }

  peek(place: Place): CachedTile | undefined {
    const found = this.held.get(TileCache.key(place));
    return found?.tile ? found : undefined;
  }

  /** The tile, asked for if it is not there. */
  want(place: Place): CachedTile {
    const key = TileCache.key(place);
    let found = this.held.get(key);
    if (found) {
      this.held.delete(key);
      this.held.set(key, found);
      return found;
    }
    found = heldTile(place);
    this.held.set(key, found);
    this.ask(found);
    for (const [old, each] of this.held) {
      if (this.held.size <= MOST) break;
      if (each.tile) this.held.delete(old);
    }
    return found;
  }

  private ask(waiting: CachedTile): void {
    const asking = new AbortController();
    this.asked.set(waiting, asking);
    const ended = () => {
      this.asked.delete(waiting);
      if (!asking.signal.aborted) this.changed();
    };
    this.source
      .tile(waiting.place, asking.signal)
      .then(
        (tile) => {
          waiting.tile = tile;
          waiting[tile.read ? "draft" : "exact"] = tile;
        },
        (error: unknown) => {
          waiting.failed = error instanceof Error ? error.message : String(error);
        },
      )
      .finally(ended);
  }

  /** Nobody waits any more for tiles but these: others would keep them waiting. */
  waitFor(these: CachedTile[]): void {
    for (const [held, asking] of this.asked) {
      if (these.includes(held)) continue;
      asking.abort();
      this.held.delete(TileCache.key(held.place));
    }
  }

  /** Read a draft in full. */
  async refine(held: CachedTile, signal: AbortSignal): Promise<void> {
    held.refining = true;
    try {
      const tile = await this.source.tile({ ...held.place, exact: true }, signal);
      held.exact = tile;
      this.changed();
    } catch (error) {
      if (!signal.aborted) throw error;
    } finally {
      held.refining = false;
    }
  }
}
