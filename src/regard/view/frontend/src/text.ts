/** The text, shaded by where one token looks, or by who looks at it. */

import { css, ink, percent, place, ramp } from "./colour";
import { choice, el, spelled } from "./dom";
import type { Index, MapInfo } from "./format";
import { headSet } from "./headset";
import { partOf } from "./parts";
import { answered, deed, directionChoice, headsOf, named } from "./question";
import type { Line, Source } from "./sources";
import type { State } from "./state";
import { words, type Shading } from "./words";

const WINDOW = 1500;
const STRONGEST = 12;

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
    const asked = this.looks ? this.map.queries : this.map.keys;
    let { token } = this.state();
    if (token < 0 || token >= asked) token = asked - 1;
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
      answered(this.source, direction, map, heads, token, signal);
    if (layers === "one") return ask(map, this.heads);
    const all = this.alike.map((at) => ask(at, [...Array(this.index.maps[at]!.heads).keys()]));
    return mean(await Promise.all(all));
  }

  private fill(answer: Answer): void {
    const focused = document.activeElement?.closest<HTMLElement>(".text .word");
    const again = focused?.dataset["place"];
    const { token } = answer;
    const { direction } = this.state();
    const own = this.names(this.looks ? "query" : "key");
    const name = own?.[token];
    this.root.replaceChildren(
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
          ? headSet(this.map, this.heads, this.state().layers === "all", (set) =>
              this.change({ set }),
            )
          : "",
      ),
      el(
        "h2",
        {},
        name === undefined ? "" : el("bdi", { class: "token" }, spelled(name, 32)),
        ` #${token} ${deed(direction)}, in ${this.which()}`,
      ),
      this.strongest(answer),
      ...this.notes(answer),
      ...this.texts(answer),
    );
    if (again !== undefined)
      this.root.querySelector<HTMLElement>(`.word[data-place="${again}"]`)?.focus();
  }

  private names(side: "query" | "key"): string[] | undefined {
    return this.index.texts[side === "query" ? this.map.queryText : this.map.keyText];
  }

  private which(): string {
    return this.state().layers === "all"
      ? `the mean of all heads of ${this.alike.length} layers`
      : named(this.heads);
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

  /** The words with the most weight; each leads to its pair on the map. */
  private strongest({ token, line }: Answer): HTMLElement {
    const { weights, exact } = line;
    const names = this.names(this.looks ? "key" : "query");
    const order = [...weights.keys()]
      .filter((at) => weights[at]! > 0 && (!exact || exact.has(at)))
      .sort((a, b) => weights[b]! - weights[a]!)
      .slice(0, STRONGEST);
    if (!order.length)
      return el("p", { class: "note" }, "Nothing: the mask hides every pair, or all are zero.");
    const most = weights[order[0]!]!;
    const item = (at: number) =>
      el(
        "button",
        {
          title: "Show this pair on the map",
          onclick: () => (this.looks ? this.jump(token, at) : this.jump(at, token)),
        },
        el("bdi", { class: "token" }, names?.[at] === undefined ? "" : spelled(names[at]!, 24)),
        el("span", { class: "place" }, `#${at}`),
        el(
          "span",
          { class: "meter" },
          el("span", { style: `width:${(100 * weights[at]!) / most}%` }),
        ),
        el("span", { class: "figure" }, percent(weights[at]!)),
      );
    return el("ol", { class: "strongest" }, ...order.map((at) => el("li", {}, item(at))));
  }

  /** The first and the last word that the mask lets a token see, or be seen by. */
  private seen(token: number): [number, number] {
    const { band, queries, keys } = this.map;
    const [low, high] = band ?? [null, null];
    const n = this.looks ? keys : queries;
    const [from, to] = this.looks ? [low, high] : [high && -high, low && -low];
    const at = (edge: number | null, otherwise: number) =>
      edge === null ? otherwise : Math.max(0, Math.min(token + edge, n - 1));
    return [at(from, 0), at(to, n - 1)];
  }

  private notes({ token }: Answer): HTMLElement[] {
    const { band, mask, starts } = this.map;
    const level = this.source.finest(this.state().map);
    const [first, last] = this.seen(token);
    const said: string[] = [];
    if (band && (band[0] !== null || band[1] !== null))
      said.push(
        `The mask ${mask} leaves ${last - first + 1} ${last === first ? "token" : "tokens"}, #${first} to #${last}${band[0] === null || band[1] === null ? "" : ", in brackets"}; those it hides are dim.`,
      );
    if (starts.length > 1) said.push("Underlined: written by the model.");
    if (level)
      said.push(
        `Exact for the strongest keys of each token; the rest is a mean over ${1 << level} × ${1 << level} pairs.`,
      );
    return said.length ? [el("p", { class: "note" }, said.join(" "))] : [];
  }

  /** The text; where queries and keys are of two texts, the one that is asked about above. */
  private texts(answer: Answer): (HTMLElement | string)[] {
    const { token, line } = answer;
    const { queries, keys, band, starts } = this.map;
    const n = line.weights.length;
    const [ours, theirs] = this.looks ? (["query", "key"] as const) : (["key", "query"] as const);
    const wrote = this.same && starts.length > 1 ? starts[1]! : Infinity;
    this.follow(answer);
    const stop = Math.min(n, this.start + WINDOW);
    const shading: Shading = {
      paint: this.paint(line.weights),
      weight: (at) => line.weights[at]!,
      seen: this.seen(token),
      edges: Boolean(band && band[0] !== null && band[1] !== null),
    };
    const turned = { looks: "seen", seen: "looks" } as const;
    const shaded = words(
      {
        label: this.same ? "Text" : ours === "query" ? "Keys" : "Queries",
        names: this.names(theirs),
        start: this.start,
        stop,
        self: this.same ? token : -1,
        wrote,
        pick: (at) =>
          this.change(
            this.same ? { token: at } : { token: at, direction: turned[this.state().direction] },
          ),
      },
      shading,
    );
    const found: (HTMLElement | string)[] = [this.turning(answer, n, stop), shaded];
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
    const asked = [map, token, direction].join();
    if (asked === this.followed) return;
    this.followed = asked;
    const near = this.same ? token : weights.indexOf(largest(weights));
    this.start = Math.floor(Math.max(0, Math.min(near - WINDOW / 2, weights.length - WINDOW)));
  }

  private paint(weights: Float32Array): (at: number) => string {
    const most = largest(weights);
    const table = ramp(this.theme());
    const range = { low: most * 1e-3 || 1e-9, high: most || 1 };
    return (at) => {
      const weight = weights[at]!;
      if (!(weight > 0)) return "";
      const colour = table[Math.round(255 * place(weight, this.scale, range))]!;
      return `background:${css(colour)};color:${ink(colour)}`;
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

function largest(weights: Float32Array): number {
  let most = 0;
  for (const weight of weights) most = Math.max(most, weight);
  return most;
}

/** The mean of lines; exact where all of them are. */
function mean(lines: Line[]): Line {
  const weights = new Float32Array(lines[0]!.weights.length);
  for (const line of lines)
    for (const [at, weight] of line.weights.entries()) weights[at]! += weight / lines.length;
  const sets = lines.flatMap(({ exact }) => (exact ? [exact] : []));
  const sure = sets[0] && [...sets[0]].filter((at) => sets.every((set) => set.has(at)));
  return { weights, exact: sure ? new Set(sure) : null };
}
