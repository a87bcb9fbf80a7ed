/** The map: any region of a head's weights, from the whole text down to single pairs. */

import { themeColours, type ThemeColours } from "../drawing/theme_colours";
import { el } from "../elements/element";
import { cellNumbers, paintNumbers } from "../plot/cell_numbers";
import { labels, paintLabels } from "../plot/axes";
import {
  paintCells,
  paintCursor,
  paintFrame,
  paintGrid,
  paintMissing,
  paintSteps,
  type Cells,
} from "../plot/cells";
import { HeadFacts } from "../plot/head_facts";
import { Lens, type Box, type Point } from "../plot/lens";
import { paintMarks, type Mark } from "../plot/marks";
import { settle, TileCache, type CachedTile } from "../plot/tile_cache";
import { largestIn, rangeOf } from "../plot/tile_image";
import type { State } from "../selection/view_state";
import { edgesOf, type Place, type Source } from "../sources/source";
import { SIDE, topLevel, type Index, type MapInfo } from "../sources/wire_format";
import { KEYS, pressKey } from "./keyboard";
import type { MapStatus } from "./map_legend";
import { Minimap } from "./minimap";
import { listenToPointer, type MapActions } from "./pointer";
import { regionOf, type Region } from "./region";
import { Tooltip } from "./tooltip";

/** All that a file of what is seen can be made of. */
export interface Snapshot {
  cells: Cells;
  region: Region;
  status: MapStatus;
  inks: ThemeColours;
}

const NARROW = 560;
const READABLE = 32;
/** Pixels of a pair from which on tokens are named. */
const NAMED = 15;
const GRID = 10;

export class MapView implements MapActions {
  readonly root: HTMLElement;
  readonly canvas: HTMLCanvasElement;
  cursor: Point | null = null;
  private tooltip: Tooltip;
  private tiles: TileCache;
  private heads: HeadFacts;
  private marks: Mark[] = [];
  private marked: Mark | null = null;
  readonly minimap = new Minimap((query, key) => this.centre(query, key));
  private frame = 0;
  private idle = 0;
  private refining: AbortController | null = null;
  private visible: CachedTile[] = [];
  /** Of which nothing is known yet, not even roughly. */
  private missing: Place[] = [];
  private cells: Cells | null = null;
  private status: MapStatus | null = null;
  private level = 0;

  constructor(
    private source: Source,
    private index: Index,
    private state: () => State,
    private change: (part: Partial<State>, quiet?: boolean) => void,
    private report: (status: MapStatus) => void,
    private theme: () => "light" | "dark",
  ) {
    this.canvas = el("canvas", {
      class: "map",
      tabindex: "0",
      role: "application",
      "aria-label": `Attention map. ${KEYS}`,
    });
    this.tooltip = new Tooltip(source, index);
    this.root = el("div", { class: "plot" }, this.canvas, this.tooltip.root, this.tooltip.spoken);
    this.tiles = new TileCache(source, () => this.draw());
    this.heads = new HeadFacts(source, () => this.draw());
    listenToPointer(this.canvas, this);
    this.canvas.addEventListener("keydown", (event) => pressKey(event, this));
    new ResizeObserver(() => this.draw()).observe(this.root);
  }

  private get map(): MapInfo {
    return this.index.maps[this.state().map]!;
  }

  private get box(): Box {
    const { clientWidth, clientHeight } = this.root;
    const [x, y] = clientWidth < NARROW ? [64, 60] : [112, 96];
    const width = Math.max(40, clientWidth - x - 8);
    return { x, y, width, height: Math.max(40, clientHeight - y - 8) };
  }

  get lens(): Lens {
    const { query, key, span } = this.state();
    const { map, box } = this;
    if (!span) return Lens.whole(map, box);
    const zoom = box.width / span;
    return new Lens(map, box, query - box.height / zoom / 2, key - span / 2, zoom).sound();
  }

  private get picked(): Point | null {
    const [query, key] = this.state().picked;
    return query === undefined || key === undefined ? null : { query, key };
  }

  get cell(): number {
    return this.cells?.strongest ? 1 : this.size;
  }

  /** Pairs along one side of what a tile holds. */
  private get size(): number {
    return 1 << this.level;
  }

  look(lens: Lens): void {
    const { query, key, tall, wide } = lens.sound();
    this.change({ query: query + tall / 2, key: key + wide / 2, span: wide }, true);
    this.draw();
  }

  /** Zoom by a factor around a place of the screen. */
  zoom(factor: number, x?: number, y?: number): void {
    const { box } = this;
    const [middle, centre] = [box.x + box.width / 2, box.y + box.height / 2];
    this.look(this.lens.nearer(factor, x ?? middle, y ?? centre));
  }

  all(): void {
    this.change({ query: 0, key: 0, span: 0 }, true);
    this.draw();
  }

  hideTooltip(): void {
    this.tooltip.root.hidden = true;
  }

  open(query: number): void {
    const { texts, pictures } = this.index;
    const { queryText } = this.map;
    const named = texts[queryText] === undefined ? "text" : "sentence";
    const view = pictures[queryText] ? "picture" : named;
    this.change({ view, token: query, direction: "looks" });
  }

  /** Bring a pair into view, large enough to read. */
  show(query: number, key: number): void {
    const { map, box } = this;
    const [tall, wide] = [box.height / READABLE, box.width / READABLE];
    this.look(new Lens(map, box, query - tall / 2, key - wide / 2, READABLE));
    this.point({ query, key });
  }

  private centre(query: number, key: number): void {
    const { map, box, tall, wide, zoom } = this.lens;
    this.look(new Lens(map, box, query - tall / 2, key - wide / 2, zoom));
  }

  /** Mark tokens, and bring one of them into view, near enough to be named. */
  mark(marks: Mark[], now: Mark | null): void {
    this.marks = marks;
    this.marked = now;
    const { lens } = this;
    if (now) {
      const zoom = lens.zoom < NAMED ? READABLE : lens.zoom;
      const [tall, wide] = [lens.box.height / zoom, lens.box.width / zoom];
      const same = zoom === lens.zoom;
      const to = (on: boolean, start: number, shown: number) => {
        const inside = same && now.first >= start && now.last < start + shown;
        return on && !inside ? now.first - shown / 2 : start;
      };
      const [down, right] = same ? [lens.query, lens.key] : [0, 0];
      this.look(
        new Lens(lens.map, lens.box, to(now.rows, down, tall), to(now.columns, right, wide), zoom),
      );
    }
    this.draw();
  }

  /** Put the cursor on a pair and say what is there. */
  point(point: Point | null): void {
    this.cursor = point;
    this.draw();
    if (!point) return this.tooltip.hide();
    const size = SIDE * this.size;
    const [row, column] = [Math.floor(point.query / size), Math.floor(point.key / size)];
    const place = this.place(this.level, row, column);
    this.tooltip.show(point, place, this.lens, this.tiles.peek(place)?.tile ?? null);
  }

  /** Point at a pair, and keep it: the address and a notebook are told. */
  pick(point: Point | null): void {
    this.change({ picked: point ? [point.query, point.key] : [] }, true);
    this.point(point);
  }

  draw(): void {
    if (this.frame) return;
    this.canvas.dataset["ready"] = "no";
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (this.root.isConnected && this.root.clientWidth) this.paint();
    });
  }

  private place(level: number, row: number, column: number): Place {
    const { map, head, quantity } = this.state();
    return { map, head, level, row, column, quantity };
  }

  private paint(): void {
    const { lens } = this;
    const context = this.cleared();
    const inks = themeColours(this.root);
    const cells = (this.cells = this.drawable(lens, inks.ground));
    const { x, y, width, height } = lens.box;
    context.save();
    context.beginPath();
    context.rect(x, y, width, height);
    context.clip();
    paintCells(context, cells);
    paintMissing(context, lens, this.missing, inks);
    if (lens.zoom >= GRID) paintGrid(context, lens, inks.line);
    const numbers = cellNumbers(cells);
    paintNumbers(context, numbers);
    this.canvas.dataset["numbers"] = String(numbers.length);
    paintMarks(context, lens, this.marks, this.marked, inks.accent);
    paintSteps(context, lens, inks.accent);
    const pair = this.cursor ?? this.picked;
    if (pair) paintCursor(context, lens, pair, this.cell, inks.accent);
    context.restore();
    paintFrame(context, lens, inks.frame);
    const { queryText, keyText } = lens.map;
    const { texts } = this.index;
    paintLabels(context, labels(lens, texts[queryText], texts[keyText]), inks, this.cursor);
    this.paintWhole(cells);
    this.tell(cells);
    this.refineSoon();
  }

  private paintWhole(cells: Cells): void {
    const top = Math.max(topLevel(cells.lens.map), this.source.finest(this.state().map));
    const whole = Minimap.needed(cells.lens) ? this.tiles.want(this.place(top, 0, 0)) : null;
    if (whole?.tile) this.minimap.draw(cells, whole);
    else this.minimap.hide();
    this.tiles.waitFor(whole ? [...this.visible, whole] : this.visible);
  }

  /** An empty canvas of the size it is shown at. */
  private cleared(): CanvasRenderingContext2D {
    const ratio = window.devicePixelRatio || 1;
    const { clientWidth, clientHeight } = this.root;
    const [wide, high] = [Math.round(clientWidth * ratio), Math.round(clientHeight * ratio)];
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      this.canvas.width = wide;
      this.canvas.height = high;
    }
    const context = this.canvas.getContext("2d")!;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, clientWidth, clientHeight);
    return context;
  }

  /** What is to be drawn: the tiles in view, or coarser ones until they are there. */
  private drawable(lens: Lens, ground: string): Cells {
    const { map, pool, scale } = this.state();
    const ratio = window.devicePixelRatio || 1;
    const finest = this.source.finest(map);
    const top = Math.max(topLevel(lens.map), finest);
    // A cell is at least a pixel: a smaller one might not be drawn at all.
    const wanted = Math.ceil(Math.log2(1 / (lens.zoom * ratio)));
    this.level = Math.min(top, Math.max(finest, wanted));
    const facts = this.heads.rows(this.state());
    const tiles = this.gather(lens, top);
    const range = rangeOf(largestIn(tiles, lens.map, { pool, scale }, facts), scale);
    const strongest =
      this.level > 0 && lens.zoom * ratio > 2 ? this.heads.strongest(this.state()) : null;
    const colours = { theme: this.theme(), pool, scale, range };
    return { lens, tiles, facts, colours, strongest, ground };
  }

  private gather(lens: Lens, top: number): CachedTile[] {
    const size = SIDE * this.size;
    const tiles = ([first, last]: [number, number]) => [
      Math.floor(first / size),
      Math.ceil(last / size),
    ];
    const [above, below] = tiles(lens.queries);
    const [left, right] = tiles(lens.keys);
    this.visible = [];
    for (let row = above!; row < below!; row++)
      for (let column = left!; column < right!; column++) {
        const place = this.place(this.level, row, column);
        if (!masked(place, lens.map)) this.visible.push(this.tiles.want(place));
      }
    settle(this.visible);
    const shown: CachedTile[] = [];
    this.missing = [];
    for (const held of this.visible) {
      const stand = held.tile ? held : this.coarser(held.place, top);
      if (!stand) this.missing.push(held.place);
      else if (held.tile) shown.push(held);
      else if (!shown.includes(stand)) shown.unshift(stand);
    }
    return shown;
  }

  /** What is seen, once it is all there; read in full, if it must be exact. */
  async snapshot(signal: AbortSignal, exact: boolean): Promise<Snapshot> {
    for (;;) {
      signal.throwIfAborted();
      const { cells, status } = this;
      if (status?.failed) throw new Error(status.failed);
      if (cells && status && !status.loading && !(exact && status.draft)) {
        const region = regionOf(cells.lens, this.size, this.visible, cells.strongest);
        return { cells, region, status, inks: themeColours(this.root) };
      }
      await new Promise((go) => setTimeout(go, 50));
    }
  }

  private coarser(place: Place, top: number): CachedTile | undefined {
    for (let up = 1; place.level + up <= top; up++) {
      const found = this.tiles.peek({
        ...place,
        level: place.level + up,
        row: place.row >> up,
        column: place.column >> up,
      });
      if (found) return found;
    }
    return undefined;
  }

  private tell({ colours, strongest, facts }: Cells): void {
    const unscaled = !facts && (colours.scale === "row" || colours.scale === "ratio");
    const tiles = this.visible.filter((held) => !held.tile && !held.failed).length;
    const loading = tiles + (unscaled ? 1 : 0);
    const drafts = this.visible.filter((held) => held.tile?.read);
    this.status = {
      level: this.level,
      range: colours.range,
      draft: drafts.length ? Math.min(...drafts.map((held) => held.tile!.read)) : 0,
      loading,
      failed: this.visible.find((held) => held.failed)?.failed ?? null,
      finest: this.source.finest(this.state().map),
      beyond: strongest !== null,
    };
    this.report(this.status);
    this.canvas.dataset["ready"] = loading ? "no" : "yes";
    this.canvas.dataset["level"] = String(this.level);
    this.canvas.dataset["drafts"] = String(drafts.length);
  }

  /** Nothing more is asked for: another text has taken the place of this one. */
  close(): void {
    clearTimeout(this.idle);
    this.refining?.abort();
  }

  /** Drafts in view are read in full once nothing has moved for a while, one at a time. */
  private refineSoon(): void {
    clearTimeout(this.idle);
    const drafts = this.visible.filter(({ draft, exact }) => draft && !exact);
    if (this.refining && drafts.some((held) => held.refining)) return;
    this.refining?.abort();
    this.refining = null;
    const next = drafts[0];
    if (!next || this.visible.some((held) => !held.tile && !held.failed)) return;
    this.idle = window.setTimeout(() => {
      const refining = (this.refining = new AbortController());
      this.tiles.refine(next, refining.signal).catch(() => {});
    }, 500);
  }
}

/** Whether a whole tile is masked, as far as a band can tell. */
function masked({ level, row, column }: Place, map: MapInfo): boolean {
  const size = SIDE << level;
  const [low, high] = edgesOf(map);
  const most = (column + 1 - row) * size - 1;
  const least = (column - row - 1) * size + 1;
  return most < low || least > high;
}
