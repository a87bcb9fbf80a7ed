/** The text, shaded by where one token looks, or by who looks at it. */

import { css, ink, place, ramp } from "../drawing/colour";
import { figure } from "../drawing/figure";
import { themeColours } from "../drawing/theme_colours";
import { legendBox, type Legend } from "../drawing/legend";
import { percent } from "../drawing/number_format";
import type { Drawing } from "../drawing/shapes";
import { spelled } from "../drawing/token_spelling";
import { choice } from "../elements/choice";
import { el, refill } from "../elements/element";
import { Menu } from "../elements/menu";
import { pictureItems, tableItem } from "../export/file_menu";
import { figureTitle, fileName } from "../export/file_name";
import { tokenTable } from "../export/token_table";
import { headButtons } from "../selection/head_buttons";
import { layerName, lowered } from "../selection/layer_names";
import { partOf } from "../selection/model_parts";
import {
  directionChoice,
  headsName,
  headsOf,
  questionLine,
  verb,
  weightsOf,
} from "../selection/token_question";
import type { State } from "../selection/view_state";
import { edgesOf, seenBy, type Line, type Source } from "../sources/source";
import type { Index, MapInfo } from "../sources/wire_format";
import { strongestWords } from "./strongest_words";
import { textBody } from "./text_figure";
import { largest, mean, range } from "./weight_line";
import { words, type Colours, type Shading, type Words } from "./words";

const WINDOW = 1500;

/** One token, and the line of weights that it gives or gets. */
interface Answer {
  token: number;
  line: Line;
}

export class TextView {
  readonly root = el("section", { class: "text", "aria-label": "Text" });
  private start = 0;
  private followed = "";
  private asking: AbortController | null = null;
  private answer: Answer | null = null;
  private saving = new Menu("Save …", [
    ...pictureItems(
      (kind) => this.file(kind),
      () => this.drawing(this.answer!),
    ),
    tableItem(
      (kind) => this.file(kind),
      () => {
        const { line, token } = this.answer!;
        const [low, high] = this.seen(token);
        const seen = (at: number) => at >= low && at <= high;
        return tokenTable(line, this.names(this.looks ? "key" : "query"), seen);
      },
    ),
  ]);

  constructor(
    private source: Source,
    private index: Index,
    private state: () => State,
    private change: (part: Partial<State>) => void,
    private theme: () => "light" | "dark",
    private jump: (query: number, key: number) => void,
  ) {}

  private get map(): MapInfo {
    return this.index.maps[this.state().map]!;
  }

  private get looks(): boolean {
    return this.state().direction === "looks";
  }

  /** A row of weights knows two of the four scales: the others differ only between rows. */
  private get scale(): "log" | "linear" {
    const { scale } = this.state();
    return scale === "linear" || scale === "row" ? "linear" : "log";
  }

  /** Whether the words that look are the words that are seen. */
  private get same(): boolean {
    const { queries, keys, queryText, keyText } = this.map;
    return queries === keys && queryText === keyText;
  }

  private get heads(): number[] {
    return headsOf(this.state(), this.map);
  }

  /** Layers over the same texts, in the same part of the model. */
  private get alike(): number[] {
    const kind = (map: MapInfo) =>
      [map.queries, map.keys, map.queryText, map.keyText, partOf(map)].join();
    const mine = kind(this.map);
    return [...this.index.maps.keys()].filter((at) => kind(this.index.maps[at]!) === mine);
  }

  async show(): Promise<void> {
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    const n = this.looks ? this.map.queries : this.map.keys;
    let { token } = this.state();
    if (token < 0 || token >= n) token = n - 1;
    try {
      const line = await this.line(token, asking.signal);
      if (!asking.signal.aborted) this.fill({ token, line });
    } catch (error) {
      if (asking.signal.aborted) return;
      this.root.replaceChildren(
        el("p", { class: "note" }, `This could not be read: ${String(error)}`),
      );
    }
  }

  private async line(token: number, signal: AbortSignal): Promise<Line> {
    const { map, layers, direction } = this.state();
    const ask = (map: number, heads: number[]) =>
      weightsOf(this.source, direction, map, heads, token, signal);
    if (layers === "one") return ask(map, this.heads);
    const all = this.alike.map((at) => ask(at, [...Array(this.index.maps[at]!.heads).keys()]));
    return mean(await Promise.all(all));
  }

  private fill(answer: Answer): void {
    this.answer = answer;
    const { token } = answer;
    const { direction } = this.state();
    const name = this.names(this.looks ? "query" : "key")?.[token];
    refill(
      this.root,
      el(
        "div",
        { class: "ask" },
        directionChoice(direction, this.change),
        choice(
          "Colour",
          [
            ["log", "Log", "Logarithm of the weight, down to a thousandth of the largest"],
            ["linear", "Linear", "The weight itself"],
          ],
          this.scale,
          (scale) => this.change({ scale }),
        ),
        this.layerChoice(),
        this.map.heads > 1
          ? headButtons(this.map, this.heads, this.state().layers === "all", (set) =>
              this.change({ set }),
            )
          : "",
        this.saving.root,
      ),
      el(
        "h2",
        {},
        name === undefined ? "" : el("bdi", { class: "token" }, spelled(name, 32)),
        ` #${token} ${verb(direction)}, in ${this.layer}${this.which()}`,
      ),
      strongestWords(answer.line, this.names(this.looks ? "key" : "query"), (at) =>
        this.looks ? this.jump(token, at) : this.jump(at, token),
      ),
      legendBox(this.legend(answer), this.theme()),
      ...this.texts(answer),
    );
  }

  private names(side: "query" | "key"): string[] | undefined {
    return this.index.texts[side === "query" ? this.map.queryText : this.map.keyText];
  }

  private which(): string {
    return this.state().layers === "all"
      ? `the mean of all heads of ${this.alike.length} layers`
      : headsName(this.heads);
  }

  /** The layer of the heads, inside of a sentence. */
  private get layer(): string {
    const { map, layers } = this.state();
    const name = layers === "one" ? layerName(this.index.maps, map) : "";
    return name && `${lowered(name)} · `;
  }

  private layerChoice(): HTMLElement | string {
    if (this.alike.length < 2) return "";
    return choice(
      "Layers",
      [
        ["one", "This layer"],
        ["all", "All layers", `The mean over all heads of ${this.alike.length} layers`],
      ],
      this.state().layers,
      (layers) => this.change({ layers }),
    );
  }

  /** The first and the last word that the mask lets a token see, or be seen by. */
  private seen(token: number): [number, number] {
    const { band, map } = this;
    const turned = { band: [-band[1], -band[0]] as [number, number], keys: map.queries };
    return seenBy(this.looks ? { band, keys: map.keys } : turned, token);
  }

  /** The layers that are asked. */
  private get asked(): MapInfo[] {
    const { layers, map } = this.state();
    const all = layers === "all" ? this.alike : [map];
    return all.map((at) => this.index.maps[at]!);
  }

  /** The widest band of their masks; a side without an edge is infinite. */
  private get band(): [number, number] {
    const all = this.asked.map(edgesOf);
    return [Math.min(...all.map(([low]) => low)), Math.max(...all.map(([, high]) => high))];
  }

  private legend({ token, line }: Answer): Legend {
    const { mask, starts } = this.map;
    const [before, after] = this.band.map(isFinite);
    const level = this.source.finest(this.state().map);
    const [first, last] = this.seen(token);
    const { low, high } = range(line.weights);
    const middle = this.scale === "log" ? Math.sqrt(low * high) : high / 2;
    const notes: string[] = [];
    if (before || after) {
      const leaves = this.asked.every((map) => map.mask === mask)
        ? `The mask ${mask} leaves`
        : "Masks leave";
      notes.push(
        `${leaves} ${last - first + 1} token${last > first ? "s" : ""}, #${first} to #${last}${before && after ? ", in brackets" : ""}; others are dim.`,
      );
    }
    if (starts.length > 1) notes.push("Underlined: written by the model.");
    if (level)
      notes.push(
        `Exact for the strongest keys of each token; the rest is a mean over ${1 << level} × ${1 << level} pairs.`,
      );
    return {
      ticks: [this.scale === "log" ? percent(low, 0) : "0", percent(middle, 0), percent(high, 0)],
      meaning: `A token is coloured by the weight that it ${this.looks ? "gets" : "gives"}.`,
      notes,
    };
  }

  /** What is asked, for the name of a file. */
  private file(kind: string): string {
    const { direction, layers } = this.state();
    const of = fileName(this.index, this.state(), this.which(), layers === "all");
    return `${of}-token-${this.answer!.token}-${direction}.${kind}`;
  }

  /** What is seen of the text, with its heading and its colours. */
  private drawing(answer: Answer): Drawing {
    const { layers, direction } = this.state();
    const of = figureTitle(this.index, this.state(), this.which(), layers === "all");
    const name = this.names(this.looks ? "query" : "key")?.[answer.token];
    const what = questionLine(name ? spelled(name, 32) : "", answer.token, direction);
    const inks = themeColours(this.root);
    const body = textBody(...this.shaded(answer), inks);
    return figure(`${of} · ${what}`, body, this.legend(answer), inks, this.theme());
  }

  /** The words that answer, and their colours. */
  private shaded({ token, line }: Answer): [Words, Shading] {
    const { starts } = this.map;
    const turned = { looks: "seen", seen: "looks" } as const;
    const text: Words = {
      label: this.same ? "Text" : this.looks ? "Keys" : "Queries",
      names: this.names(this.looks ? "key" : "query"),
      start: this.start,
      stop: Math.min(line.weights.length, this.start + WINDOW),
      self: this.same ? token : -1,
      wrote: this.same && starts.length > 1 ? starts[1]! : Infinity,
      pick: (at) =>
        this.change(
          this.same ? { token: at } : { token: at, direction: turned[this.state().direction] },
        ),
    };
    const shading: Shading = {
      paint: this.paint(line.weights),
      weight: (at) => line.weights[at]!,
      seen: this.seen(token),
      edges: this.band.every(isFinite),
    };
    return [text, shading];
  }

  /** The text; where queries and keys are of two texts, the one that is asked about above. */
  private texts(answer: Answer): (HTMLElement | string)[] {
    const { token, line } = answer;
    const { queries, keys } = this.map;
    const n = line.weights.length;
    const [ours, theirs] = this.looks ? (["query", "key"] as const) : (["key", "query"] as const);
    this.follow(answer);
    const [text, shading] = this.shaded(answer);
    const shaded = words(text, shading);
    const found: (HTMLElement | string)[] = [this.turning(answer, n, text.stop), shaded];
    if (this.same) return found;
    const most = this.looks ? queries : keys;
    const from = Math.max(0, Math.min(token - WINDOW / 2, most - WINDOW));
    const asking = words(
      {
        label: ours === "query" ? "Queries" : "Keys",
        names: this.names(ours),
        start: Math.floor(from),
        stop: Math.min(most, Math.floor(from) + WINDOW),
        self: token,
        wrote: Infinity,
        pick: (at) => this.change({ token: at }),
      },
      null,
    );
    const title = (side: string) => el("h3", {}, side === "query" ? "Queries" : "Keys");
    return [title(ours), asking, title(theirs), ...found];
  }

  /** Begin near the token when another one is asked about. */
  private follow({ token, line: { weights } }: Answer): void {
    const { map, direction } = this.state();
    const question = [map, token, direction].join();
    if (question === this.followed) return;
    this.followed = question;
    const near = this.same ? token : weights.indexOf(largest(weights));
    this.start = Math.floor(Math.max(0, Math.min(near - WINDOW / 2, weights.length - WINDOW)));
  }

  private paint(weights: Float32Array): (at: number) => Colours | null {
    const table = ramp(this.theme());
    const ends = range(weights);
    return (at) => {
      const weight = weights[at]!;
      if (!(weight > 0)) return null;
      const colour = table[Math.round(255 * place(weight, this.scale, ends))]!;
      return { ground: css(colour), ink: ink(colour) };
    };
  }

  /** Pages of a text that is too long to be shown at once. */
  private turning(answer: Answer, n: number, stop: number): HTMLElement | string {
    if (n <= WINDOW) return "";
    const turn = (by: number, text: string, off: boolean) =>
      el(
        "button",
        {
          disabled: off,
          onclick: () => {
            this.start = Math.max(0, Math.min(this.start + by, n - WINDOW));
            this.fill(answer);
          },
        },
        text,
      );
    return el(
      "nav",
      { class: "turn", "aria-label": "Parts of the text" },
      turn(-WINDOW, "← Earlier", this.start <= 0),
      el("span", {}, `${this.start}–${stop - 1} of ${n}`),
      turn(WINDOW, "Later →", stop >= n),
    );
  }
}
