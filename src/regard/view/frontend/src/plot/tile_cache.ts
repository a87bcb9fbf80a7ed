/** Tiles that were fetched, and those that are on their way. */

import type { Place, Source } from "../sources/source";
import type { Tile } from "../sources/wire_format";

export interface CachedTile {
  place: Place;
  tile: Tile | null;
  failed: string | null;
  picture: HTMLCanvasElement | null;
  colours: string;
  refining: boolean;
}

const MOST = 320;

export class TileCache {
  private held = new Map<string, CachedTile>();

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
    found = { place, tile: null, failed: null, picture: null, colours: "", refining: false };
    this.held.set(key, found);
    const waiting = found;
    this.source.tile(place).then(
      (tile) => {
        waiting.tile = tile;
        this.changed();
      },
      (error: unknown) => {
        waiting.failed = error instanceof Error ? error.message : String(error);
        this.changed();
      },
    );
    for (const [old, each] of this.held) {
      if (this.held.size <= MOST) break;
      if (each.tile) this.held.delete(old);
    }
    return found;
  }

  /** Read a draft in full. */
  async refine(held: CachedTile, signal: AbortSignal): Promise<void> {
    held.refining = true;
    try {
      const tile = await this.source.tile({ ...held.place, exact: true }, signal);
      held.tile = tile;
      held.colours = "";
      this.changed();
    } catch (error) {
      if (!signal.aborted) throw error;
    } finally {
      held.refining = false;
    }
  }
}
