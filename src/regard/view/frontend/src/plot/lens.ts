/** Where a map lies on the screen. */

import type { MapInfo } from "../sources/wire_format";

export interface Point {
  query: number;
  key: number;
}

export interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

const NEAREST = 64;
const WHOLE = 48;

/** A part of a map in a box of the screen: the first query and key in view, and pixels per pair. */
export class Lens {
  constructor(
    readonly map: MapInfo,
    readonly box: Box,
    readonly query: number,
    readonly key: number,
    readonly zoom: number,
  ) {}

  x(key: number): number {
    return this.box.x + (key - this.key) * this.zoom;
  }

  y(query: number): number {
    return this.box.y + (query - this.query) * this.zoom;
  }

  /** How many queries and keys fit the box. */
  get tall(): number {
    return this.box.height / this.zoom;
  }

  get wide(): number {
    return this.box.width / this.zoom;
  }

  /** The queries in view: the first, and the one after the last. */
  get queries(): [number, number] {
    return within(this.query, this.tall, this.map.queries);
  }

  get keys(): [number, number] {
    return within(this.key, this.wide, this.map.keys);
  }

  /** The part of the box that the map covers. */
  get covered(): { left: number; top: number; right: number; bottom: number } {
    const { x, y, width, height } = this.box;
    return {
      left: Math.max(x, this.x(0)),
      top: Math.max(y, this.y(0)),
      right: Math.min(x + width, this.x(this.map.keys)),
      bottom: Math.min(y + height, this.y(this.map.queries)),
    };
  }

  /** The pair at a place of the screen. */
  at(x: number, y: number): Point | null {
    if (x < this.box.x || y < this.box.y) return null;
    const query = Math.floor(this.query + (y - this.box.y) / this.zoom);
    const key = Math.floor(this.key + (x - this.box.x) / this.zoom);
    const { queries, keys } = this.map;
    return query >= 0 && query < queries && key >= 0 && key < keys ? { query, key } : null;
  }

  moved(queries: number, keys: number): Lens {
    return new Lens(this.map, this.box, this.query + queries, this.key + keys, this.zoom);
  }

  /** Nearer by a factor, with a place of the screen staying where it is. */
  nearer(factor: number, x: number, y: number): Lens {
    const next = Math.min(NEAREST, this.zoom * factor);
    const [dx, dy] = [x - this.box.x, y - this.box.y];
    const query = this.query + dy / this.zoom - dy / next;
    const key = this.key + dx / this.zoom - dx / next;
    return new Lens(this.map, this.box, query, key, next);
  }

  /** As near as can be, neither too near nor too far, and on the map. */
  sound(): Lens {
    const { map, box } = this;
    const all = whole(map, box);
    const zoom = Math.min(NEAREST, Math.max(all * 0.8, this.zoom));
    const fit = (start: number, size: number, n: number) => {
      // The whole map stands in the middle of its room. What is left beside it stays free when it
      // grows, so that what is pointed at keeps its place.
      const [shown, free] = [size / zoom, (size - n * all) / 2 / zoom];
      const last = n - shown + free;
      return last < -free ? (n - shown) / 2 : Math.min(Math.max(start, -free), last);
    };
    const query = fit(this.query, box.height, map.queries);
    const key = fit(this.key, box.width, map.keys);
    return new Lens(map, box, query, key, zoom);
  }

  static whole(map: MapInfo, box: Box): Lens {
    return new Lens(map, box, 0, 0, whole(map, box)).sound();
  }
}

/** The zoom at which a whole map fits. */
function whole({ queries, keys }: MapInfo, { width, height }: Box): number {
  return Math.min(width / keys, height / queries, WHOLE);
}

function within(start: number, length: number, n: number): [number, number] {
  return [Math.max(0, Math.floor(start)), Math.min(n, Math.ceil(start + length))];
}
