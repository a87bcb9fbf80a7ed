/** Layers × heads: each thumbnail is a map of the whole text. */

import { themeColours } from "../drawing/theme_colours";
import type { Drawing } from "../drawing/shapes";
import { el } from "../elements/element";
import { Menu } from "../elements/menu";
import { pictureItems } from "../export/file_menu";
import { safeName } from "../export/file_name";
import { heldTile } from "../plot/tile_cache";
import { largestIn, rangeOf, tileImage } from "../plot/tile_image";
import { headName, layerName } from "../selection/layer_names";
import type { State } from "../selection/view_state";
import type { Source } from "../sources/source";
import { topLevel, type Index } from "../sources/wire_format";
import { overviewFigure, type Row } from "./overview_figure";

const COLOURS = "Each map is coloured by its own largest weight, on a logarithmic scale.";
const MOST = 8;
/** Cells that are seen one by one in a thumbnail, and stay sharp. */
const SMALL = 48;

/** How many heads stand side by side: as many in each row, where that can be. */
function perRow(heads: number): number {
  return Math.ceil(heads / Math.ceil(heads / MOST));
}

export class Overview {
  readonly root = el("section", { class: "overview", "aria-label": "Layers and heads" });
  private failed = el("p", { class: "note", role: "alert", hidden: true });
  private drawn = "";
  private waiting: { canvas: HTMLCanvasElement; map: number; head: number }[] = [];
  private seen: IntersectionObserver;
  private asking = new AbortController();

  constructor(
    private source: Source,
    private index: Index,
    private state: () => State,
    private change: (part: Partial<State>) => void,
    private theme: () => "light" | "dark",
  ) {
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const found = this.waiting.find(({ canvas }) => canvas === entry.target);
        if (!entry.isIntersecting || !found) continue;
        this.seen.unobserve(entry.target);
        void this.paint(found.canvas, found.map, found.head);
      }
    });
  }

  show(): void {
    const { map, head, pool } = this.state();
    const name = [this.theme(), pool].join();
    if (this.drawn !== name) {
      this.drawn = name;
      this.fill();
    } else
      for (const { canvas } of this.waiting)
        if (!canvas.dataset["ready"]) this.seen.observe(canvas);
    for (const each of this.root.querySelectorAll<HTMLElement>(".thumb")) {
      const here = each.dataset["map"] === String(map) && each.dataset["head"] === String(head);
      if (here) each.setAttribute("aria-current", "true");
      else each.removeAttribute("aria-current");
    }
  }

  /** What nobody looks at any more is not waited for: others would wait behind it. */
  leave(): void {
    this.asking.abort();
    this.asking = new AbortController();
    this.seen.disconnect();
  }

  private fill(): void {
    this.seen.disconnect();
    this.waiting = [];
    const rows = this.index.maps.map((info, map) => {
      const group = info.heads / info.keyHeads;
      const thumbs = Array.from({ length: info.heads }, (_, head) => {
        const canvas = el("canvas", { width: 96, height: 96, "aria-hidden": "true" });
        this.waiting.push({ canvas, map, head });
        this.seen.observe(canvas);
        return el(
          "button",
          {
            class: group > 1 && head && head % group === 0 ? "thumb apart" : "thumb",
            "data-map": map,
            "data-head": head,
            "aria-label": headName(this.index.maps, map, head),
            onclick: () => this.change({ view: "map", map, head, span: 0 }),
          },
          canvas,
          el("span", {}, String(head)),
        );
      });
      const size = `${info.queries} × ${info.keys}`;
      const shared = group > 1 ? `, ${info.keyHeads} key heads` : "";
      return el(
        "div",
        { class: "layer" },
        el(
          "h2",
          {},
          el("span", {}, layerName(this.index.maps, map)),
          el("span", { class: "path place" }, info.name),
          el("span", { class: "place" }, `${size}${shared} · mask ${info.mask}`),
        ),
        el("div", { class: "thumbs", style: `--per: ${perRow(info.heads)}` }, ...thumbs),
      );
    });
    this.failed.hidden = true;
    this.root.replaceChildren(this.failed, this.saving(), ...rows);
  }

  private async paint(canvas: HTMLCanvasElement, map: number, head: number): Promise<void> {
    try {
      const image = await this.image(map, head, this.asking.signal);
      canvas.dataset["ready"] = "yes";
      if (!image) return;
      canvas.width = image.width;
      canvas.height = image.height;
      if (image.width <= SMALL) canvas.style.imageRendering = "pixelated";
      canvas.getContext("2d")!.drawImage(image, 0, 0);
    } catch (error) {
      // Stopped, as another view or text is there to be drawn.
      if (error instanceof DOMException) return;
      canvas.dataset["ready"] = "failed";
      this.failed.hidden = false;
      this.failed.textContent = `Some heads could not be drawn: ${String(error)}`;
    }
  }

  /** The whole map of a head as one picture; none, if it is empty. */
  private async image(
    map: number,
    head: number,
    signal?: AbortSignal,
  ): Promise<HTMLCanvasElement | null> {
    const info = this.index.maps[map]!;
    const level = Math.max(topLevel(info), this.source.finest(map));
    const place = { map, head, level, row: 0, column: 0, quantity: "weight" };
    const tile = await this.source.tile(place, signal);
    const held = heldTile(place, tile);
    const { pool } = this.state();
    const range = rangeOf(largestIn([held], info, { pool, scale: "log" }, null), "log");
    return tileImage(held, info, { theme: this.theme(), pool, scale: "log", range }, null);
  }

  /** All heads as a drawing. */
  private async drawing(signal: AbortSignal): Promise<Drawing> {
    const rows: Row[] = [];
    for (const [map, info] of this.index.maps.entries()) {
      const heads = Array.from({ length: info.heads }, (_, head) => this.image(map, head, signal));
      const about = `${info.queries} × ${info.keys} · mask ${info.mask}`;
      const across = perRow(info.heads);
      rows.push({ name: info.name, about, across, heads: await Promise.all(heads) });
    }
    const title = [this.index.model, COLOURS].filter(Boolean).join(" · ");
    return overviewFigure(title, rows, themeColours(this.root));
  }

  private saving(): HTMLElement {
    const name = `${safeName(this.index.model || "regard")}-heads`;
    const items = pictureItems(
      (kind) => `${name}.${kind}`,
      (signal) => this.drawing(signal),
    );
    const note = el("p", { class: "note" }, `${COLOURS} A click opens it.`);
    return el("div", { class: "ask" }, note, new Menu("Save …", items).root);
  }
}
