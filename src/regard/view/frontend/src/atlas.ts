/** The map: any region of a head's weights, from the whole text down to single pairs. */

import { css, ink, percent, place as placed, ramp, type Range } from "./colour";
import { el, spelled } from "./dom";
import { SIDE, topLevel, type Index, type MapInfo } from "./format";
import { shown as allowed, type Place, type Source, type Strongest } from "./sources";
import type { State } from "./state";
import { largestIn, picture, rangeOf, RowFacts, scaled, Tiles, value, type Held } from "./tiles";

export interface Reading {
  level: number;
  range: Range;
  /** Rows read of each cell of the coarsest draft in view; 0 when everything was read. */
  draft: number;
  loading: number;
  failed: string | null;
  finest: number;
  /** Whether single pairs are seen on a map whose cells are larger. */
  beyond: boolean;
}

interface Point {
  query: number;
  key: number;
}

const FONT = "12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";

export class Atlas {
  readonly root: HTMLElement;
  readonly canvas: HTMLCanvasElement;
  private tip = el("div", { class: "tip", role: "tooltip", hidden: true });
  private spoken = el("div", { class: "unseen", "aria-live": "polite" });
  private tiles: Tiles;
  private facts = new Map<string, RowFacts | null>();
  private best = new Map<string, Strongest | null>();
  private cursor: Point | null = null;
  private pointers = new Map<number, { x: number; y: number }>();
  private moved = 0;
  private frame = 0;
  private idle = 0;
  private asking: AbortController | null = null;
  private refining: AbortController | null = null;
  private visible: Held[] = [];
  private range: Range = { low: 1e-4, high: 1 };
  private level = 0;

  constructor(
    private source: Source,
    private index: Index,
    private state: () => State,
    private change: (part: Partial<State>, quiet?: boolean) => void,
    private report: (reading: Reading) => void,
    private theme: () => "light" | "dark",
  ) {
    this.canvas = el("canvas", {
      class: "map",
      tabindex: "0",
      role: "application",
      "aria-label":
        "Attention map. Arrow keys pan, plus and minus zoom, 0 shows everything, shift with arrow keys moves a cursor, Enter opens the text.",
    });
    this.root = el("div", { class: "plot" }, this.canvas, this.tip, this.spoken);
    this.tiles = new Tiles(source, () => this.draw());
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.root);
  }

  private get map(): MapInfo {
    return this.index.maps[this.state().map]!;
  }

  private get gutter(): { left: number; top: number } {
    const narrow = this.root.clientWidth < 560;
    return { left: narrow ? 64 : 112, top: narrow ? 60 : 96 };
  }

  private get plot(): { x: number; y: number; width: number; height: number } {
    const { left, top } = this.gutter;
    return {
      x: left,
      y: top,
      width: Math.max(40, this.root.clientWidth - left - 8),
      height: Math.max(40, this.root.clientHeight - top - 8),
    };
  }

  /** Where the map lies: the first query and key in view, and pixels per pair. */
  private get lens(): { query: number; key: number; zoom: number } {
    const { query, key, span } = this.state();
    const { width, height } = this.plot;
    if (!span) {
      const { queries, keys } = this.map;
      return { query: 0, key: 0, zoom: Math.min(width / keys, height / queries, 48) };
    }
    const zoom = width / span;
    return { query: query - height / zoom / 2, key: key - span / 2, zoom };
  }

  private look(query: number, key: number, zoom: number): void {
    const { queries, keys } = this.map;
    const { width, height } = this.plot;
    const least = Math.min(width / keys, height / queries, 48) * 0.8;
    const near = Math.min(64, Math.max(least, zoom));
    const rows = height / near;
    const columns = width / near;
    const fit = (start: number, shown: number, n: number) =>
      shown >= n
        ? Math.min(0, Math.max(start, n - shown))
        : Math.min(Math.max(start, 0), n - shown);
    const q = fit(query, rows, queries);
    const k = fit(key, columns, keys);
    this.change({ query: q + rows / 2, key: k + columns / 2, span: columns }, true);
    this.draw();
  }

  /** Zoom by a factor around a place of the screen. */
  zoom(factor: number, x?: number, y?: number): void {
    const { query, key, zoom } = this.lens;
    const plot = this.plot;
    const dx = (x ?? plot.x + plot.width / 2) - plot.x;
    const dy = (y ?? plot.y + plot.height / 2) - plot.y;
    const next = Math.min(64, zoom * factor);
    this.look(query + dy / zoom - dy / next, key + dx / zoom - dx / next, next);
  }

  all(): void {
    this.change({ query: 0, key: 0, span: 0 }, true);
    this.draw();
  }

  /** Bring a pair into view, large enough to read. */
  show(query: number, key: number): void {
    const { width, height } = this.plot;
    const zoom = 24;
    this.look(query - height / zoom / 2, key - width / zoom / 2, zoom);
    this.point({ query, key });
  }

  draw(): void {
    if (!this.frame)
      this.frame = requestAnimationFrame(() => {
        this.frame = 0;
        if (this.root.isConnected && this.root.clientWidth) this.paint();
      });
  }

  private head(level: number, row: number, column: number): Place {
    const { map, head, quantity } = this.state();
    return { map, head, level, row, column, quantity };
  }

  private paint(): void {
    const ratio = window.devicePixelRatio || 1;
    const { clientWidth: wide, clientHeight: high } = this.root;
    if (
      this.canvas.width !== Math.round(wide * ratio) ||
      this.canvas.height !== Math.round(high * ratio)
    ) {
      this.canvas.width = Math.round(wide * ratio);
      this.canvas.height = Math.round(high * ratio);
    }
    const context = this.canvas.getContext("2d")!;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, wide, high);
    const style = getComputedStyle(this.root);
    const colour = (name: string) => style.getPropertyValue(name).trim();
    const { query, key, zoom } = this.lens;
    const plot = this.plot;
    const { pool, scale } = this.state();
    const map = this.map;
    const facts = this.rowFacts();

    const finest = this.source.finest(this.state().map);
    const top = Math.max(topLevel(map), finest);
    // A cell is at least a pixel: a smaller one might not be drawn at all.
    const wanted = Math.ceil(Math.log2(1 / (zoom * ratio)));
    const level = Math.min(top, Math.max(finest, wanted));
    this.level = level;
    const size = SIDE << level;
    const rows = this.among(query, plot.height / zoom, map.queries, size);
    const columns = this.among(key, plot.width / zoom, map.keys, size);
    this.visible = [];
    const shown: Held[] = [];
    for (let row = rows[0]; row < rows[1]; row++)
      for (let column = columns[0]; column < columns[1]; column++) {
        const place = this.head(level, row, column);
        if (this.hidden(place)) continue;
        const held = this.tiles.want(place);
        this.visible.push(held);
        if (held.tile) shown.push(held);
        else {
          const stand = this.coarser(place, top);
          if (stand && !shown.includes(stand)) shown.unshift(stand);
        }
      }
    const most = largestIn(shown, map, pool, scale, facts);
    this.range = rangeOf(most, scale);
    const colours = { theme: this.theme(), pool, scale, range: this.range };

    context.save();
    context.beginPath();
    context.rect(plot.x, plot.y, plot.width, plot.height);
    context.clip();
    context.fillStyle = colour("--ground");
    context.fillRect(
      plot.x - key * zoom,
      plot.y - query * zoom,
      map.keys * zoom,
      map.queries * zoom,
    );
    context.imageSmoothingEnabled = false;
    // Past the finest cells there are, only the strongest pairs are known: the rest stands back.
    const best = level > 0 && zoom * ratio > 2 ? this.strongest() : null;
    if (best) context.globalAlpha = 0.4;
    const under = best ? { ...colours, pool: "mean" as const } : colours;
    for (const held of shown) {
      const image = picture(held, map, under, facts);
      if (!image) continue;
      const cell = 1 << held.place.level;
      const x = plot.x + (held.place.column * SIDE * cell - key) * zoom;
      const y = plot.y + (held.place.row * SIDE * cell - query) * zoom;
      context.drawImage(image, x, y, image.width * cell * zoom, image.height * cell * zoom);
    }
    context.globalAlpha = 1;
    if (best) {
      this.paintHidden(context, colour("--ground"), query, key, zoom);
      this.paintStrongest(context, best, query, key, zoom);
    }
    if (zoom >= 10) this.paintGrid(context, colour("--line"), query, key, zoom);
    this.paintSteps(context, colour("--accent"), query, zoom);
    this.paintCursor(context, colour("--accent"), query, key, zoom);
    context.restore();
    context.strokeStyle = colour("--line-strong");
    context.lineWidth = 1;
    const right = Math.min(plot.x + plot.width, plot.x + (map.keys - key) * zoom);
    const bottom = Math.min(plot.y + plot.height, plot.y + (map.queries - query) * zoom);
    const left = Math.max(plot.x, plot.x - key * zoom);
    const upper = Math.max(plot.y, plot.y - query * zoom);
    context.strokeRect(left - 0.5, upper - 0.5, right - left + 1, bottom - upper + 1);
    this.paintAxes(context, colour("--ink"), colour("--faint"), query, key, zoom);

    const loading = this.visible.filter((held) => !held.tile && !held.failed).length;
    const drafts = this.visible.filter((held) => held.tile?.read);
    this.report({
      level,
      range: this.range,
      draft: drafts.length ? Math.min(...drafts.map((held) => held.tile!.read)) : 0,
      loading,
      failed: this.visible.find((held) => held.failed)?.failed ?? null,
      finest,
      beyond: best !== null,
    });
    this.canvas.dataset["ready"] = loading ? "no" : "yes";
    this.canvas.dataset["level"] = String(level);
    this.refineSoon();
  }

  private among(start: number, length: number, n: number, size: number): [number, number] {
    const first = Math.max(0, Math.floor(start / size));
    return [
      first,
      Math.max(first, Math.min(Math.ceil(n / size), Math.ceil((start + length) / size))),
    ];
  }

  /** Whether the mask lets nothing of a tile be seen, as far as a band can tell. */
  private hidden(place: Place): boolean {
    const band = this.map.band;
    if (!band) return false;
    const size = SIDE << place.level;
    const q0 = place.row * size;
    const k0 = place.column * size;
    const [low, high] = band;
    const most = k0 + size - 1 - q0;
    const least = k0 - (q0 + size - 1);
    return (low !== null && most < low) || (high !== null && least > high);
  }

  private coarser(place: Place, top: number): Held | undefined {
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

  private rowFacts(): RowFacts | null {
    const { map, head, scale } = this.state();
    if (scale !== "row" && scale !== "ratio") return null;
    const name = `${map},${head}`;
    const found = this.facts.get(name);
    if (found !== undefined) return found;
    this.facts.set(name, null);
    Promise.all([this.source.largest(map, head), this.source.visible(map)]).then(
      ([largest, visible]) => {
        this.facts.set(name, new RowFacts(largest, visible));
        this.draw();
      },
      () => this.facts.delete(name),
    );
    return null;
  }

  /** Drafts in view are read in full once nothing has moved for a while, one at a time. */
  private refineSoon(): void {
    clearTimeout(this.idle);
    const drafts = this.visible.filter((held) => held.tile?.read);
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

  private strongest(): Strongest | null {
    const { map, head } = this.state();
    const name = `${map},${head}`;
    const found = this.best.get(name);
    if (found !== undefined) return found;
    this.best.set(name, null);
    void this.source.strongest(map, head).then((strongest) => {
      this.best.set(name, strongest);
      if (strongest) this.draw();
    });
    return null;
  }

  /** The mask's edge, pair by pair, over cells that straddle it. */
  private paintHidden(
    context: CanvasRenderingContext2D,
    colour: string,
    query: number,
    key: number,
    zoom: number,
  ): void {
    const band = this.map.band;
    if (!band) return;
    const { x, y, width, height } = this.plot;
    const last = Math.min(this.map.queries, Math.ceil(query + height / zoom));
    context.fillStyle = colour;
    for (let q = Math.max(0, Math.floor(query)); q < last; q++) {
      const top = y + (q - query) * zoom;
      const across = (k: number) => x + (Math.max(0, Math.min(k, this.map.keys)) - key) * zoom;
      const [low, high] = band;
      if (high !== null) {
        const from = across(q + high + 1);
        context.fillRect(
          from,
          top,
          Math.max(0, Math.min(across(Infinity), x + width) - from),
          zoom,
        );
      }
      if (low !== null) context.fillRect(across(0), top, across(q + low) - across(0), zoom);
    }
  }

  private paintStrongest(
    context: CanvasRenderingContext2D,
    found: Strongest,
    query: number,
    key: number,
    zoom: number,
  ): void {
    const { scale } = this.state();
    const plot = this.plot;
    const table = ramp(this.theme());
    const facts = this.rowFacts()?.at(0) ?? null;
    const last = Math.min(this.map.queries, Math.ceil(query + plot.height / zoom));
    for (let q = Math.max(0, Math.floor(query)); q < last; q++)
      for (let i = 0; i < found.count; i++) {
        const weight = found.weights[q * found.count + i]!;
        const k = found.keys[q * found.count + i]!;
        if (weight <= 0 || k < key - 1 || k > key + plot.width / zoom) continue;
        const share = placed(scaled(weight, scale, facts, q), scale, this.range);
        context.fillStyle = css(table[Math.round(255 * share)]!);
        context.fillRect(plot.x + (k - key) * zoom, plot.y + (q - query) * zoom, zoom, zoom);
      }
  }

  private paintGrid(
    context: CanvasRenderingContext2D,
    colour: string,
    query: number,
    key: number,
    zoom: number,
  ): void {
    const { x, y, width, height } = this.plot;
    const { queries, keys } = this.map;
    const [x1, y1] = [
      Math.min(x + width, x + (keys - key) * zoom),
      Math.min(y + height, y + (queries - query) * zoom),
    ];
    const [x0, y0] = [Math.max(x, x - key * zoom), Math.max(y, y - query * zoom)];
    context.strokeStyle = colour;
    context.lineWidth = 1;
    context.beginPath();
    for (let k = Math.ceil(Math.max(0, key)); k <= Math.min(keys, key + width / zoom); k++) {
      const at = Math.round(x + (k - key) * zoom) - 0.5;
      context.moveTo(at, y0);
      context.lineTo(at, y1);
    }
    for (
      let q = Math.ceil(Math.max(0, query));
      q <= Math.min(queries, query + height / zoom);
      q++
    ) {
      const at = Math.round(y + (q - query) * zoom) - 0.5;
      context.moveTo(x0, at);
      context.lineTo(x1, at);
    }
    context.stroke();
  }

  /** Where generating began: the first step below what the model was given. */
  private paintSteps(
    context: CanvasRenderingContext2D,
    colour: string,
    query: number,
    zoom: number,
  ): void {
    const first = this.map.starts[1];
    if (first === undefined) return;
    const { x, y, width } = this.plot;
    const at = y + (first - query) * zoom;
    context.strokeStyle = colour;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(x, at);
    context.lineTo(x + width, at);
    context.stroke();
    context.setLineDash([]);
  }

  private paintCursor(
    context: CanvasRenderingContext2D,
    colour: string,
    query: number,
    key: number,
    zoom: number,
  ): void {
    const [pickedQuery, pickedKey] = this.state().picked;
    const picked = pickedKey === undefined ? null : { query: pickedQuery!, key: pickedKey };
    const pair = this.cursor ?? picked;
    if (!pair) return;
    const cell = this.cellSize();
    const { x, y, width, height } = this.plot;
    const left = x + (Math.floor(pair.key / cell) * cell - key) * zoom;
    const top = y + (Math.floor(pair.query / cell) * cell - query) * zoom;
    const side = Math.max(cell * zoom, 1);
    context.globalAlpha = 0.09;
    context.fillStyle = colour;
    const { queries, keys } = this.map;
    const [x0, y0] = [Math.max(x, x - key * zoom), Math.max(y, y - query * zoom)];
    const x1 = Math.min(x + width, x + (keys - key) * zoom);
    const y1 = Math.min(y + height, y + (queries - query) * zoom);
    context.fillRect(x0, top, x1 - x0, Math.max(side, 2));
    context.fillRect(left, y0, Math.max(side, 2), y1 - y0);
    context.globalAlpha = 1;
    context.strokeStyle = colour;
    context.lineWidth = 1.5;
    if (side >= 4) context.strokeRect(left, top, side, side);
  }

  private paintAxes(
    context: CanvasRenderingContext2D,
    strong: string,
    faint: string,
    query: number,
    key: number,
    zoom: number,
  ): void {
    const { x, y, width, height } = this.plot;
    const { queries, keys, queryText, keyText } = this.map;
    const { left, top } = this.gutter;
    const rowTokens = this.index.texts[queryText];
    const keyTokens = this.index.texts[keyText];
    context.font = FONT;
    context.textBaseline = "middle";
    const label = (tokens: string[] | undefined, at: number, step: number, room: number) => {
      const letters = Math.max(3, Math.floor((room - 12) / 7.3));
      const token = tokens?.[at];
      if (token === undefined) return String(at);
      if (step === 1) return spelled(token, letters);
      const number = `${at} `;
      if (letters - number.length < 6) return String(at);
      return number + spelled(token, letters - number.length);
    };
    const step = Math.max(1, niceStep(15 / zoom));
    for (let q = Math.ceil(Math.max(0, query) / step) * step; q < queries; q += step) {
      const middle = y + (q - query + 0.5) * zoom;
      if (middle > y + height) break;
      if (middle < y) continue;
      context.fillStyle = this.cursor?.query === q ? strong : faint;
      context.textAlign = "right";
      context.fillText(label(rowTokens, q, step, left), x - 8, middle, left - 12);
    }
    for (let k = Math.ceil(Math.max(0, key) / step) * step; k < keys; k += step) {
      const middle = x + (k - key + 0.5) * zoom;
      if (middle > x + width) break;
      if (middle < x) continue;
      context.fillStyle = this.cursor?.key === k ? strong : faint;
      context.save();
      context.translate(middle, y - 8);
      context.rotate(-Math.PI / 2);
      context.textAlign = "left";
      context.fillText(label(keyTokens, k, step, top), 0, 0, top - 12);
      context.restore();
    }
    context.fillStyle = faint;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.fillText("keys →", x - 8, 12);
    context.fillText("queries ↓", x - 8, 28, left - 12);
  }

  private cellSize(): number {
    return 1 << this.level;
  }

  private at(x: number, y: number): Point | null {
    const { query, key, zoom } = this.lens;
    const plot = this.plot;
    if (x < plot.x || y < plot.y) return null;
    const q = Math.floor(query + (y - plot.y) / zoom);
    const k = Math.floor(key + (x - plot.x) / zoom);
    const { queries, keys } = this.map;
    return q >= 0 && q < queries && k >= 0 && k < keys ? { query: q, key: k } : null;
  }

  /** Put the cursor on a pair and say what is there. */
  point(point: Point | null): void {
    this.asking?.abort();
    this.cursor = point;
    this.draw();
    this.tip.hidden = !point;
    if (!point) return;
    const { query, key } = point;
    const info = this.map;
    const level = this.level;
    const cell = 1 << level;
    const row = Math.floor(query / cell);
    const column = Math.floor(key / cell);
    const place = this.head(level, Math.floor(row / SIDE), Math.floor(column / SIDE));
    const held = this.tiles.peek(place);
    const word = (text: number, at: number) => this.index.texts[text]?.[at];
    const token = (text: number, at: number) => {
      const found = word(text, at);
      return el(
        "span",
        { class: "pair" },
        found === undefined ? null : el("bdi", { class: "token" }, spelled(found, 28)),
        el("span", { class: "place" }, `#${at}`),
      );
    };
    const lines: Node[] = [
      el("div", { class: "who" }, token(info.queryText, query), "→", token(info.keyText, key)),
    ];
    const exact = el("div", { class: "what" }, " ");
    lines.push(exact);
    if (held?.tile && level > 0) {
      const at = (row % SIDE) * held.tile.columns + (column % SIDE);
      const inside = `${cell} × ${cell} pairs`;
      const mean = percent(value(held.tile, at, row % SIDE, column % SIDE, place, info, "mean"));
      lines.push(
        el(
          "div",
          { class: "cell" },
          `in this cell of ${inside}: mean ${mean}, max ${percent(held.tile.most[at]!)}`,
        ),
      );
    }
    this.tip.replaceChildren(...lines);
    delete this.tip.dataset["weight"];
    this.moveTip(point);
    const asking = (this.asking = new AbortController());
    const say = (weight: number | null, rank: number | null) => {
      if (!allowed(info, query, key)) exact.textContent = "hidden by the mask";
      else if (weight === null) exact.textContent = "known as part of its cell";
      else if (rank === null) exact.textContent = `at most ${percent(weight)}`;
      else exact.textContent = `${percent(weight)}${weight ? `, rank ${rank}` : ""}`;
      if (weight !== null && rank !== null) this.tip.dataset["weight"] = String(weight);
      const [from, to] = [word(info.queryText, query) ?? "", word(info.keyText, key) ?? ""];
      this.spoken.textContent = `${spelled(from)} ${query} to ${spelled(to)} ${key}: ${exact.textContent}`;
    };
    window.setTimeout(() => {
      if (asking.signal.aborted) return;
      this.source.cell(place, query, key, asking.signal).then(
        (found) => !asking.signal.aborted && say(found?.weight ?? null, found?.rank ?? null),
        () => {},
      );
    }, 40);
  }

  /** Point at a pair, and keep it: the address and a notebook are told. */
  private pick(point: Point | null): void {
    this.change({ picked: point ? [point.query, point.key] : [] }, true);
    this.point(point);
  }

  private moveTip({ query, key }: Point): void {
    const lens = this.lens;
    const plot = this.plot;
    const x = plot.x + (key + 1 - lens.key) * lens.zoom;
    const y = plot.y + (query + 1 - lens.query) * lens.zoom;
    const { offsetWidth: wide, offsetHeight: high } = this.tip;
    const { clientWidth, clientHeight } = this.root;
    const left = x + 14 + wide > clientWidth ? x - lens.zoom - 14 - wide : x + 14;
    const top = y + 14 + high > clientHeight ? y - lens.zoom - 14 - high : y + 14;
    const inside = (at: number, size: number, room: number) =>
      Math.max(4, Math.min(at, room - size - 4));
    this.tip.style.left = `${inside(left, wide, clientWidth)}px`;
    this.tip.style.top = `${inside(top, high, clientHeight)}px`;
  }

  private listen(): void {
    const { canvas } = this;
    canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        const step = event.deltaMode ? 30 : 1;
        this.zoom(
          Math.exp((-event.deltaY * step) / (event.ctrlKey ? 120 : 400)),
          event.offsetX,
          event.offsetY,
        );
      },
      { passive: false },
    );
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
      this.moved = 0;
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = this.pointers.get(event.pointerId);
      const now = { x: event.offsetX, y: event.offsetY };
      if (!before) {
        this.point(this.at(now.x, now.y));
        return;
      }
      const others = [...this.pointers].filter(([id]) => id !== event.pointerId);
      this.pointers.set(event.pointerId, now);
      const other = others[0]?.[1];
      if (other) {
        const apart = (p: { x: number; y: number }) => Math.hypot(p.x - other.x, p.y - other.y);
        this.zoom(
          apart(now) / Math.max(1, apart(before)),
          (now.x + other.x) / 2,
          (now.y + other.y) / 2,
        );
        return;
      }
      this.moved += Math.hypot(now.x - before.x, now.y - before.y);
      if (this.moved < 4) return;
      const { query, key, zoom } = this.lens;
      this.tip.hidden = true;
      this.look(query - (now.y - before.y) / zoom, key - (now.x - before.x) / zoom, zoom);
    });
    const up = (event: PointerEvent) => {
      this.pointers.delete(event.pointerId);
      if (event.type === "pointerup" && this.moved < 4)
        this.pick(this.at(event.offsetX, event.offsetY));
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("dblclick", (event) => this.zoom(4, event.offsetX, event.offsetY));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  private key(event: KeyboardEvent): void {
    const arrows: Record<string, [number, number]> = {
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
    };
    const arrow = arrows[event.key];
    const { query, key, zoom } = this.lens;
    const plot = this.plot;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (arrow && event.shiftKey) {
      const cell = this.cellSize();
      const { queries, keys } = this.map;
      const from = this.cursor ?? {
        query: Math.floor(Math.max(0, query) + plot.height / zoom / 2),
        key: Math.floor(Math.max(0, key) + plot.width / zoom / 2),
      };
      const inside = (at: number, n: number) => Math.max(0, Math.min(at, n - 1));
      this.pick({
        query: inside(from.query + arrow[0] * cell, queries),
        key: inside(from.key + arrow[1] * cell, keys),
      });
    } else if (arrow) {
      const step = 80 / zoom;
      this.look(query + arrow[0] * step, key + arrow[1] * step, zoom);
    } else if (event.key === "+" || event.key === "=") this.zoom(1.5);
    else if (event.key === "-") this.zoom(1 / 1.5);
    else if (event.key === "0") this.all();
    else if (event.key === "Escape") this.pick(null);
    else if (event.key === "Enter" && this.cursor)
      this.change({ view: "text", token: this.cursor.query, direction: "looks" });
    else return;
    event.preventDefault();
  }

  /** The cells in view as text: one line a cell. */
  csv(): string {
    const map = this.map;
    const { query, key, zoom } = this.lens;
    const plot = this.plot;
    const cell = this.cellSize();
    const quote = (text: string | undefined) => `"${(text ?? "").replaceAll('"', '""')}"`;
    const lines = ["query,key,query_token,key_token,cell,mean,max"];
    for (const held of this.visible) {
      const tile = held.tile;
      if (!tile) continue;
      for (let r = 0; r < tile.rows; r++)
        for (let c = 0; c < tile.columns; c++) {
          const q = (held.place.row * SIDE + r) * cell;
          const k = (held.place.column * SIDE + c) * cell;
          if (q + cell <= query || q >= query + plot.height / zoom) continue;
          if (k + cell <= key || k >= key + plot.width / zoom) continue;
          const at = r * tile.columns + c;
          const tokens = [this.index.texts[map.queryText]?.[q], this.index.texts[map.keyText]?.[k]];
          lines.push([q, k, ...tokens.map(quote), cell, tile.mean[at], tile.most[at]].join());
        }
    }
    return lines.join("\n") + "\n";
  }

  /** The colour of a value, and the ink on it: for legends. */
  paints(share: number): [string, string] {
    const found = ramp(this.theme())[Math.round(255 * share)]!;
    return [css(found), ink(found)];
  }
}

/** The next of 1, 2, 5, 10, 20 ... */
function niceStep(least: number): number {
  if (least <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(least));
  for (const step of [1, 2, 5, 10]) if (step * power >= least) return step * power;
  return 10 * power;
}
