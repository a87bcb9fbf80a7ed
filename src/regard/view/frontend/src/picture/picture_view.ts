/** A picture, shaded by where one token looks, or by who looks at it. */

import { css, ink, ramp } from "../drawing/colour";
import { canvasBody, figure } from "../drawing/figure";
import { themeColours } from "../drawing/theme_colours";
import { legendBox, type Legend } from "../drawing/legend";
import { exactly, percent } from "../drawing/number_format";
import type { Drawing } from "../drawing/shapes";
import { spelled } from "../drawing/token_spelling";
import { el, refill } from "../elements/element";
import { Menu } from "../elements/menu";
import { pictureItems, tableItem } from "../export/file_menu";
import { figureTitle, fileName } from "../export/file_name";
import { tokenTable } from "../export/token_table";
import {
  directionChoice,
  headsName,
  headsOf,
  questionLine,
  verb,
  weightsOf,
} from "../selection/token_question";
import type { State } from "../selection/view_state";
import { shown, type Line, type Source } from "../sources/source";
import type { Index, MapInfo, Picture } from "../sources/wire_format";
import { decoded, patchAt, RAMP, shade } from "./patch_shading";

const SIDE = 560;
const THUMB = 112;
const MOST_WORDS = 1500;
const STEPS: Record<string, [number, number]> = {
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
};

/** One side of the pairs: the tokens that are asked about, or those that answer. */
interface Panel {
  text: number;
  weights: Float32Array | null;
  chosen: number | null;
  pick: ((token: number) => void) | null;
}

export class PictureView {
  readonly root = el("section", { class: "picture", "aria-label": "Picture" });
  private asking: AbortController | null = null;

  constructor(
    private source: Source,
    private index: Index,
    private state: () => State,
    private change: (part: Partial<State>) => void,
  ) {}

  private get map(): MapInfo {
    return this.index.maps[this.state().map]!;
  }

  private get heads(): number[] {
    return headsOf(this.state(), this.map);
  }

  private get token(): number {
    const { token, direction } = this.state();
    const { queries, keys, queryText, keyText } = this.map;
    const n = direction === "looks" ? queries : keys;
    if (token >= 0 && token < n) return token;
    // The first token is the one that stands for the whole picture, where there is one.
    const own = this.index.pictures[direction === "looks" ? queryText : keyText];
    return own && !own.first ? Math.floor((own.rows * own.columns) / 2 + own.columns / 2) : 0;
  }

  async show(): Promise<void> {
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    const { queryText, keyText } = this.map;
    if (!this.index.pictures[queryText] && !this.index.pictures[keyText]) {
      const none = "This layer looks at no picture. Choose another layer.";
      this.root.replaceChildren(el("p", { class: "note" }, none));
      return;
    }
    try {
      const line = await this.line(this.heads, asking.signal);
      if (!asking.signal.aborted) this.fill(line, asking.signal);
    } catch (error) {
      if (asking.signal.aborted) return;
      const note = `This could not be read: ${String(error)}`;
      this.root.replaceChildren(el("p", { class: "note" }, note));
    }
  }

  private line(heads: number[], signal: AbortSignal): Promise<Line> {
    const { map, direction } = this.state();
    return weightsOf(this.source, direction, map, heads, this.token, signal);
  }

  private fill(line: Line, signal: AbortSignal): void {
    const { weights } = line;
    const { direction } = this.state();
    const { queryText, keyText } = this.map;
    const looks = direction === "looks";
    const [own, other] = looks ? [queryText, keyText] : [keyText, queryText];
    const pick = (token: number) => this.change({ token });
    const chosen = this.token;
    const panels: Panel[] =
      own === other
        ? [{ text: own, weights, chosen, pick }]
        : [
            { text: own, weights: null, chosen, pick },
            { text: other, weights, chosen: null, pick: null },
          ];
    const legend = this.legend(other, weights);
    const status = el("p", { class: "note told", "aria-live": "polite" }, " ");
    refill(
      this.root,
      el(
        "div",
        { class: "ask" },
        directionChoice(direction, this.change),
        this.saving(other, line, legend),
      ),
      el(
        "h2",
        {},
        el("bdi", { class: "token" }, this.called(own, chosen)),
        ` #${chosen} ${verb(direction)}, in ${headsName(this.heads)}`,
      ),
      el(
        "div",
        { class: "panels" },
        el("div", {}, ...panels.map((panel) => this.panel(panel, status)), status),
        el(
          "div",
          { class: "beside" },
          legend ? legendBox(legend, RAMP) : null,
          this.thumbs(other, signal),
        ),
      ),
    );
  }

  private name(text: number, at: number): string {
    const token = this.index.texts[text]?.[at];
    return token === undefined ? `#${at}` : spelled(token, 32);
  }

  private called(text: number, at: number): string {
    const picture = this.index.pictures[text];
    const inside = picture && !this.words(text).includes(at);
    return inside ? `patch ${this.name(text, at)}` : this.name(text, at);
  }

  /** The tokens of one side: those of a picture on it, the others as words. */
  private panel(panel: Panel, status: HTMLElement): HTMLElement {
    const picture = this.index.pictures[panel.text] ?? null;
    const places = this.words(panel.text);
    const most = (panel.weights ?? new Float32Array()).reduce((a, b) => Math.max(a, b), 0);
    const left = places.splice(MOST_WORDS).length;
    return el(
      "div",
      { class: "panel" },
      places.length
        ? el("div", { class: "words" }, ...places.map((at) => this.word(panel, at, most)))
        : null,
      left ? el("p", { class: "note" }, `and ${left} more tokens`) : null,
      picture ? this.canvas(panel, picture, status) : null,
    );
  }

  /** The tokens of a text that are no patches. */
  private words(text: number): number[] {
    const { queries, keys, queryText } = this.map;
    const n = text === queryText ? queries : keys;
    const picture = this.index.pictures[text];
    const all = Array.from({ length: n }, (_, at) => at);
    if (!picture) return all;
    const last = picture.first + picture.rows * picture.columns;
    return all.filter((at) => at < picture.first || at >= last);
  }

  private word({ text, weights, chosen, pick }: Panel, at: number, most: number): HTMLElement {
    const share = weights ? weights[at]! / most : 0;
    const colour = ramp(RAMP)[Math.round(255 * Math.min(1, share || 0))]!;
    return el(
      "button",
      {
        class: at === chosen ? "word self" : "word",
        style: weights ? `background:${css(colour)};color:${ink(colour)}` : undefined,
        title: weights ? `#${at} ${exactly(weights[at]!)}` : `#${at}`,
        "aria-pressed": pick ? String(at === chosen) : undefined,
        "data-place": at,
        disabled: !pick,
        onclick: () => pick?.(at),
      },
      el("bdi", {}, this.name(text, at)),
      weights ? el("span", { class: "figure" }, ` ${percent(weights[at]!)}`) : null,
    );
  }

  private canvas(panel: Panel, picture: Picture, status: HTMLElement): HTMLElement {
    const { weights, chosen, pick } = panel;
    const moves = pick ? "Click a patch or use the arrow keys to choose another." : "";
    const canvas = el("canvas", {
      class: pick ? "shaded picks" : "shaded",
      role: pick ? "application" : "img",
      tabindex: pick ? "0" : undefined,
      "aria-label": `The picture in ${picture.rows} × ${picture.columns} patches. ${moves}`,
    });
    const accent = themeColours(this.root).accent;
    const most = weights ? mostOf(picture, weights) : 0;
    const paint = (hover: number | null) =>
      void decoded(picture).then((image) => {
        const marked = chosen === null ? [] : [{ place: chosen, colour: accent }];
        if (hover !== null) marked.push({ place: hover, colour: "#ffffff" });
        shade(canvas, image, { picture, weights, most, marked });
        canvas.dataset["ready"] = "yes";
      });
    void decoded(picture).then((image) => {
      const ratio = window.devicePixelRatio || 1;
      const scale = SIDE / Math.max(image.naturalWidth, image.naturalHeight);
      canvas.width = Math.round(image.naturalWidth * scale * ratio);
      canvas.height = Math.round(image.naturalHeight * scale * ratio);
      canvas.style.width = `${Math.round(image.naturalWidth * scale)}px`;
      paint(null);
    });
    const at = (event: PointerEvent | MouseEvent) =>
      patchAt(picture, event.offsetX / canvas.clientWidth, event.offsetY / canvas.clientHeight);
    canvas.addEventListener("pointermove", (event) => {
      paint(at(event));
      status.textContent = this.told(panel, at(event));
    });
    canvas.addEventListener("pointerleave", () => {
      paint(null);
      status.textContent = " ";
    });
    if (pick) {
      canvas.addEventListener("click", (event) => pick(at(event)));
      canvas.addEventListener("keydown", (event) => {
        const step = STEPS[event.key];
        if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        pick(moved(picture, chosen ?? 0, ...step));
      });
    }
    return canvas;
  }

  /** A patch in words: its place, its weight and its rank among all tokens. */
  private told({ text, weights }: Panel, at: number): string {
    const place = `${this.called(text, at)} #${at}`;
    if (!weights) return place;
    const weight = weights[at]!;
    const rank = 1 + weights.reduce((n, other) => n + (other > weight ? 1 : 0), 0);
    return `${place}: ${exactly(weight)}, rank ${rank} of ${weights.length}`;
  }

  private legend(text: number, weights: Float32Array): Legend | null {
    const picture = this.index.pictures[text];
    if (!picture) return null;
    const most = mostOf(picture, weights);
    const patches = weights.slice(picture.first, picture.first + picture.rows * picture.columns);
    const sum = patches.reduce((total, weight) => total + weight, 0);
    const level = this.source.finest(this.state().map);
    return {
      ticks: ["0", percent(most / 2, 0), percent(most, 0)],
      meaning:
        this.state().direction === "looks"
          ? `A patch is coloured by the weight that it gets; all of them together get ${percent(sum)}.`
          : "A patch is coloured by the weight that it gives.",
      notes: level
        ? [`Single pairs are known as means over ${1 << level} × ${1 << level} of them.`]
        : [],
    };
  }

  /** The shaded picture, if there is one, and what every token weighs. */
  private saving(text: number, line: Line, legend: Legend | null): HTMLElement {
    const { direction } = this.state();
    const of = fileName(this.index, this.state(), headsName(this.heads));
    const file = (kind: string) => `${of}-token-${this.token}-${direction}.${kind}`;
    const table = tableItem(file, () =>
      tokenTable(line, this.index.texts[text], (at) => this.seen(at, line.weights[at]!)),
    );
    const items = legend ? [...pictureItems(file, () => this.drawing(legend)), table] : [table];
    return new Menu("Save …", items).root;
  }

  /** Whether the mask lets the token that is asked about see another, or be seen by it. Where the
   * mask is no band, nobody told: then what is exactly zero counts as masked. */
  private seen(at: number, weight: number): boolean {
    const { token, map } = this;
    if (map.mask !== "none" && !map.band) return weight > 0;
    return this.state().direction === "looks" ? shown(map, token, at) : shown(map, at, token);
  }

  private drawing(legend: Legend): Drawing {
    const drawn = [...this.root.querySelectorAll<HTMLCanvasElement>("canvas.shaded")].at(-1)!;
    const of = figureTitle(this.index, this.state(), headsName(this.heads));
    const { direction } = this.state();
    const { queryText, keyText } = this.map;
    const own = this.called(direction === "looks" ? queryText : keyText, this.token);
    const what = questionLine(own, this.token, direction);
    return figure(`${of} · ${what}`, canvasBody(drawn), legend, themeColours(this.root), RAMP);
  }

  /** The same question to every head of the layer, side by side. */
  private thumbs(text: number, signal: AbortSignal): HTMLElement {
    const picture = this.index.pictures[text];
    const box = el("div", { class: "thumbs", role: "group", "aria-label": "Heads" });
    if (!picture) return box;
    const all = Array.from({ length: this.map.heads }, (_, head) => head);
    const now = this.heads;
    const add = (label: string, heads: number[], part: Partial<State>) => {
      const canvas = el("canvas", { "aria-hidden": "true" });
      const here = heads.length === now.length && heads.every((head, at) => head === now[at]);
      const name = heads.length > 1 ? "the mean of all heads" : `head ${heads[0]}`;
      box.append(
        el(
          "button",
          {
            class: "thumb",
            "aria-label": name,
            "aria-current": here ? "true" : undefined,
            onclick: () => this.change(part),
          },
          canvas,
          el("span", {}, label),
        ),
      );
      void this.thumb(canvas, picture, heads, signal);
    };
    const bare = el("canvas", { "aria-hidden": "true" });
    box.append(el("div", { class: "thumb" }, bare, el("span", {}, "picture")));
    void this.thumb(bare, picture, [], signal);
    if (all.length > 1) add("mean", all, { set: all });
    for (const head of all) add(String(head), [head], { head, set: [] });
    return box;
  }

  /** A small picture, shaded by some heads or by none. */
  private async thumb(
    canvas: HTMLCanvasElement,
    picture: Picture,
    heads: number[],
    signal: AbortSignal,
  ): Promise<void> {
    try {
      const line = heads.length ? this.line(heads, signal) : null;
      const [image, found] = await Promise.all([decoded(picture), line]);
      const weights = found?.weights ?? null;
      const most = weights ? mostOf(picture, weights) : 0;
      canvas.width = THUMB;
      canvas.height = Math.round((THUMB * image.naturalHeight) / image.naturalWidth);
      canvas.style.aspectRatio = `${canvas.width} / ${canvas.height}`;
      shade(canvas, image, { picture, weights, most, marked: [] });
      canvas.dataset["ready"] = "yes";
    } catch {
      canvas.dataset["ready"] = "failed";
    }
  }
}

/** The most that any patch counts for. */
function mostOf({ first, rows, columns }: Picture, weights: Float32Array): number {
  let most = 0;
  for (let at = first; at < first + rows * columns; at++) most = Math.max(most, weights[at]!);
  return most;
}

/** The next patch in a direction; from a token that is none, the first. */
function moved({ first, rows, columns }: Picture, from: number, down: number, right: number) {
  const at = from - first;
  if (at < 0 || at >= rows * columns) return first;
  const row = Math.min(rows - 1, Math.max(0, Math.floor(at / columns) + down));
  const column = Math.min(columns - 1, Math.max(0, (at % columns) + right));
  return first + row * columns + column;
}
