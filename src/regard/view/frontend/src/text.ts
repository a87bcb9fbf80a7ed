/** The text, shaded by where one token looks, or by who looks at it. */

import { css, ink, percent, place, ramp } from "./colour";
import { choice, el, spelled } from "./dom";
import type { Index, MapInfo } from "./format";
import type { Line, Source } from "./sources";
import type { State } from "./state";

const WINDOW = 1500;
const STRONGEST = 12;

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

  private get heads(): number[] {
    const { set, head } = this.state();
    const known = set.filter((each) => each < this.map.heads);
    return known.length ? known : [head];
  }

  async show(): Promise<void> {
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    const { direction } = this.state();
    const info = this.map;
    const looks = direction === "looks";
    const asked = looks ? info.queries : info.keys;
    let { token } = this.state();
    if (token < 0 || token >= asked) token = asked - 1;
    const heads = this.heads;
    let line: Line;
    try {
      line = looks
        ? await this.source.row(this.state().map, heads, token, asking.signal)
        : await this.source.column(this.state().map, heads, token, asking.signal);
    } catch (error) {
      if (asking.signal.aborted) return;
      this.root.replaceChildren(
        el("p", { class: "note" }, `This could not be read: ${String(error)}`),
      );
      return;
    }
    if (!asking.signal.aborted) this.fill(token, line);
  }

  private fill(token: number, line: Line): void {
    const { weights, exact } = line;
    const { direction } = this.state();
    const info = this.map;
    const looks = direction === "looks";
    const words = this.index.texts[looks ? info.keyText : info.queryText];
    const own = this.index.texts[looks ? info.queryText : info.keyText];
    const name = (at: number, text = words) => text?.[at] ?? `#${at}`;
    let most = 0;
    for (const weight of weights) most = Math.max(most, weight);
    const order = [...weights.keys()].sort((a, b) => weights[b]! - weights[a]!);
    const strongest = order
      .filter((at) => weights[at]! > 0 && (!exact || exact.has(at)))
      .slice(0, STRONGEST);
    const table = ramp(this.theme());
    const range = { low: most * 1e-3 || 1e-9, high: most || 1 };
    const paint = (weight: number) => {
      if (!(weight > 0)) return "";
      const colour = table[Math.round(255 * place(weight, "log", range))]!;
      return `background:${css(colour)};color:${ink(colour)}`;
    };
    const pair = (at: number) => (looks ? [token, at] : [at, token]) as [number, number];
    const list = el(
      "ol",
      { class: "strongest" },
      ...strongest.map((at) =>
        el(
          "li",
          {},
          el(
            "button",
            { title: "Show this pair on the map", onclick: () => this.jump(...pair(at)) },
            el("bdi", { class: "token" }, spelled(name(at), 24)),
            el("span", { class: "place" }, `#${at}`),
            el(
              "span",
              { class: "meter" },
              el("span", { style: `width:${(100 * weights[at]!) / most}%` }),
            ),
            el("span", { class: "figure" }, percent(weights[at]!)),
          ),
        ),
      ),
    );
    const seen = `${this.state().map},${token},${direction}`;
    if (seen !== this.followed) {
      const near = words === own ? token : (strongest[0] ?? 0);
      this.start = Math.max(0, Math.min(near - WINDOW / 2, weights.length - WINDOW));
      this.followed = seen;
    }
    const stop = Math.min(weights.length, this.start + WINDOW);
    const body = el("div", { class: "words" });
    for (let at = Math.floor(this.start); at < stop; at++) {
      const self = words === own && at === token;
      const word = el(
        "button",
        {
          class: `word${self ? " self" : ""}${/^[ \u0120\u2581]/u.test(name(at)) ? " spaced" : ""}`,
          style: paint(weights[at]!),
          title: `#${at} ${percent(weights[at]!)}`,
          "aria-pressed": self ? "true" : undefined,
          "data-place": at,
        },
        el("bdi", {}, spelled(name(at).replace(/^[ \u0120\u2581](?=.)/su, ""), 60)),
      );
      body.append(word);
      if (name(at).includes("\n")) body.append(el("br"));
    }
    body.addEventListener("click", (event) => {
      const found = (event.target as HTMLElement).closest<HTMLElement>(".word");
      if (found && (words === own || looks === (words === own)))
        this.change({ token: Number(found.dataset["place"]) });
    });
    const turn = (by: number, text: string, off: boolean) =>
      el(
        "button",
        {
          disabled: off,
          onclick: () => {
            this.start = Math.max(0, Math.min(this.start + by, weights.length - WINDOW));
            this.fill(token, line);
          },
        },
        text,
      );
    const long = weights.length > WINDOW;
    const heads = this.heads;
    const which = heads.length === 1 ? `head ${heads[0]}` : `the mean of ${heads.length} heads`;
    const deed = looks ? "looks at" : "is seen by";
    const level = this.source.finest(this.state().map);
    this.root.replaceChildren(
      el(
        "div",
        { class: "ask" },
        choice(
          "Direction",
          [
            ["looks", "Looks at"],
            ["seen", "Is seen by"],
          ],
          direction,
          (value) => this.change({ direction: value }),
        ),
        this.headSet(),
      ),
      el(
        "h2",
        {},
        el("bdi", { class: "token" }, spelled(name(token, own), 32)),
        ` #${token} ${deed}, in ${which}`,
      ),
      strongest.length ? list : el("p", { class: "note" }, "Nothing: the mask hides every pair."),
      level
        ? el(
            "p",
            { class: "note" },
            `Exact for the strongest keys of each token; the rest is a mean over ${1 << level} × ${1 << level} pairs.`,
          )
        : "",
      long
        ? el(
            "nav",
            { class: "turn", "aria-label": "Parts of the text" },
            turn(-WINDOW, "← Earlier", this.start <= 0),
            el("span", {}, `${Math.floor(this.start)}–${stop - 1} of ${weights.length}`),
            turn(WINDOW, "Later →", stop >= weights.length),
          )
        : "",
      body,
    );
  }

  /** One button a head, those that share keys side by side. */
  private headSet(): HTMLElement {
    const { heads, keyHeads } = this.map;
    const chosen = new Set(this.heads);
    const group = heads / keyHeads;
    const toggle = (head: number) => {
      if (chosen.has(head)) chosen.delete(head);
      else chosen.add(head);
      this.change({ set: [...chosen].sort((a, b) => a - b) });
    };
    const box = el("div", { class: "set", role: "group", "aria-label": "Heads to average" });
    box.append(el("span", { class: "label" }, "Heads"));
    for (let head = 0; head < heads; head++)
      box.append(
        el(
          "button",
          {
            class: group > 1 && head && head % group === 0 ? "apart" : undefined,
            "aria-pressed": String(chosen.has(head)),
            title:
              group > 1 ? `head ${head}, key head ${Math.floor(head / group)}` : `head ${head}`,
            onclick: () => toggle(head),
          },
          String(head),
        ),
      );
    box.append(
      el(
        "button",
        { class: "plain", onclick: () => this.change({ set: [...Array(heads).keys()] }) },
        "all",
      ),
    );
    return box;
  }
}
