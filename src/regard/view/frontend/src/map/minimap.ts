/** The whole map in small, and which part of it is seen. */

import { themeColours } from "../drawing/theme_colours";
import { el } from "../elements/element";
import { paintCells, type Cells } from "../plot/cells";
import { Lens } from "../plot/lens";
import { heldTile, type CachedTile } from "../plot/tile_cache";
import { largestIn, rangeOf } from "../plot/tile_image";

const WIDE = 232;
const HIGH = 132;

export class Minimap {
  readonly root = el("canvas", { class: "minimap", role: "img", hidden: true });
  /** Under colours of its own: what is seen of the map has others. */
  private held: CachedTile | null = null;
  private lens: Lens | null = null;

  constructor(move: (query: number, key: number) => void) {
    const go = (event: PointerEvent) => {
      if (!this.lens || !(event.buttons & 1)) return;
      const { zoom } = this.lens;
      move(event.offsetY / zoom, event.offsetX / zoom);
    };
    this.root.addEventListener("pointerdown", (event) => {
      this.root.setPointerCapture(event.pointerId);
      go(event);
    });
    this.root.addEventListener("pointermove", go);
  }

  /** Whether a part of the map is out of sight. */
  static needed({ queries, keys, map }: Lens): boolean {
    return queries[1] - queries[0] < map.queries || keys[1] - keys[0] < map.keys;
  }

  /** Nothing is hidden, or nothing is known yet. */
  hide(): void {
    this.root.hidden = true;
  }

  draw(cells: Cells, whole: CachedTile): void {
    const { lens: seen, colours, facts, ground } = cells;
    const { map } = seen;
    if (this.held?.tile !== whole.tile) this.held = heldTile(whole.place, whole.tile);
    const zoom = Math.min(WIDE / map.keys, HIGH / map.queries);
    const [width, height] = [map.keys * zoom, map.queries * zoom];
    const lens = (this.lens = new Lens(map, { x: 0, y: 0, width, height }, 0, 0, zoom));
    const tiles = [this.held];
    const range = rangeOf(largestIn(tiles, map, colours, facts), colours.scale);
    const context = this.sized(width, height);
    paintCells(context, {
      lens,
      tiles,
      facts,
      colours: { ...colours, range },
      strongest: null,
      ground,
    });
    const [first, last] = seen.queries;
    const [left, right] = seen.keys;
    context.strokeStyle = themeColours(this.root).accent;
    context.lineWidth = 2;
    const side = (from: number, to: number) => Math.max(6, (to - from) * zoom - 2);
    context.strokeRect(lens.x(left) + 1, lens.y(first) + 1, side(left, right), side(first, last));
    const about = `queries ${first} to ${last - 1} and keys ${left} to ${right - 1}`;
    this.root.setAttribute("aria-label", `The whole map. Seen of it: ${about}.`);
    this.root.hidden = false;
  }

  private sized(width: number, height: number): CanvasRenderingContext2D {
    const ratio = window.devicePixelRatio || 1;
    const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.root.width !== wide || this.root.height !== high) {
      this.root.width = wide;
      this.root.height = high;
      this.root.style.width = `${width}px`;
      this.root.style.height = `${height}px`;
    }
    const context = this.root.getContext("2d")!;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return context;
  }
}
