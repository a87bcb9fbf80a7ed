/** What the model says at a place of the text, and what it would say with parts of it off. */

import { spelled } from "../drawing/token_spelling";
import { el, refill } from "../elements/element";
import { partOf } from "../selection/model_parts";
import type { State } from "../selection/view_state";
import type { Contributions, Foreteller, Prediction } from "../sources/prediction";
import type { Reader } from "../sources/reader";
import type { Index } from "../sources/wire_format";
import { bars, difference, following } from "./bars";
import { Continuation } from "./continuation";
import { contributionGrid } from "./contribution_grid";
import { layerName, same, switchName, written, type Switch } from "./switches";

const OPEN = "regard-says";
/** Where there is room for it beside the map it is open from the start. */
const ROOM = 1100;
/** Milliseconds that a place has to be looked at before it is asked about. */
const PAUSE = 60;

type Change = (part: Partial<State>) => void;

export class PredictionsPanel {
  readonly root = el("aside", { class: "says", "aria-label": "Predictions", hidden: true });
  private place = el("div", { class: "spot" });
  private said = el("div", { class: "said", "aria-live": "polite" });
  private whatIf = el("div", { class: "what-if" });
  private given = el("div", { class: "parts" });
  private note = el("p", { class: "note bad", role: "alert", hidden: true });
  private opener = el("button", {
    class: "opener",
    "aria-expanded": "false",
    onclick: () => this.toggle(),
  });
  private rest = el("div", { class: "inside" });
  private continuation: Continuation;
  private index: Index | null = null;
  private state!: State;
  private off: Switch[] = [];
  /** The place that was chosen last, here or in a view; -1: the last of the text. */
  private chosen = -1;
  private places = 0;
  private asking: AbortController | null = null;
  private waiting = 0;
  private now: Prediction | null = null;
  private parts: Contributions | null = null;

  constructor(
    private source: Foreteller & Reader,
    private change: Change,
  ) {
    this.continuation = new Continuation(source, () => ({ at: this.at, off: written(this.off) }));
    this.rest.append(
      this.place,
      this.said,
      this.note,
      el("h3", {}, "What if"),
      this.whatIf,
      el("h3", {}, "Which heads say so"),
      this.given,
      el("h3", {}, "How it goes on"),
      this.continuation.root,
    );
    this.opener.append(el("span", {}, "What the model says"));
    this.root.append(el("h2", { class: "unseen" }, "What the model says"), this.opener, this.rest);
    this.open(remembered() ?? window.innerWidth >= ROOM);
  }

  /** The view has changed, or the text. */
  show(state: State, index: Index): void {
    const before = this.state as State | undefined;
    this.state = state;
    const [picked = -1, token] = [state.picked[0], state.token];
    // Of a pair that was picked and a token that was chosen, the later one counts.
    if (picked !== (before?.picked[0] ?? -1)) this.chosen = picked >= 0 ? picked : token;
    else if (!before || token !== before.token) this.chosen = token >= 0 ? token : picked;
    if (index !== this.index) void this.begin(index);
    else if (this.places) this.update();
  }

  private get isOpen(): boolean {
    return this.opener.getAttribute("aria-expanded") === "true";
  }

  private open(open: boolean): void {
    this.opener.setAttribute("aria-expanded", String(open));
    this.root.classList.toggle("closed", !open);
    this.rest.hidden = !open;
  }

  private toggle(): void {
    this.open(!this.isOpen);
    try {
      localStorage.setItem(OPEN, this.isOpen ? "open" : "closed");
    } catch {
      // Then it is as wide as the window says, the next time.
    }
    if (this.places) this.update();
    // The map has another width now.
    window.dispatchEvent(new Event("resize"));
  }

  /** Another text: whether its model foretells anything. */
  private async begin(index: Index): Promise<void> {
    this.index = index;
    this.places = 0;
    this.asking?.abort();
    clearTimeout(this.waiting);
    this.now = this.parts = null;
    // Heads stay off for the next text of the same model; tokens are others.
    this.off = this.off.filter(
      (one) =>
        (one.kind === "head" && one.head < (index.maps[one.map]?.heads ?? 0)) ||
        (one.kind === "layer" && one.map < index.maps.length),
    );
    this.continuation.clear();
    const status = await this.source.status().catch(() => null);
    if (this.index !== index || !status || !index.maps.length) return;
    this.root.hidden = !status.says && !status.silent;
    this.root.classList.toggle("silent", !status.says);
    this.complain(status.says ? "" : status.silent);
    // All places that are read have a row, in the last of the layers at least.
    this.places = status.says ? index.maps[index.maps.length - 1]!.queries : 0;
    if (this.places) this.update();
  }

  /** The place that is asked about. */
  private get at(): number {
    const last = this.places - 1;
    // A token of what an encoder reads is no place where something is foretold.
    const encodes = partOf(this.index!.maps[this.state.map]!) === "Encoder";
    return this.chosen < 0 || encodes ? last : Math.min(last, this.chosen);
  }

  private move(at: number): void {
    this.chosen = at;
    this.update();
  }

  private update(): void {
    this.renderSwitches();
    if (!this.isOpen) return;
    const [at, off] = [this.at, written(this.off)];
    const asked = JSON.stringify([at, off]);
    if (this.place.dataset["asked"] === asked && this.now) return this.renderGiven();
    this.place.dataset["asked"] = asked;
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    this.root.setAttribute("aria-busy", "true");
    clearTimeout(this.waiting);
    // Who holds an arrow key down asks for the last place alone.
    this.waiting = window.setTimeout(() => void this.ask(at, off, asking.signal), PAUSE);
  }

  private async ask(at: number, off: string, signal: AbortSignal): Promise<void> {
    try {
      const found = await this.source.prediction(at, off, signal);
      signal.throwIfAborted();
      const token = this.likeliest(found);
      const fresh = at !== this.now?.at || !this.parts;
      this.now = found;
      this.complain("");
      this.renderPlace(found);
      this.said.replaceChildren(this.moved(found) ?? "", bars(found), following(found));
      this.root.removeAttribute("aria-busy");
      if (fresh) {
        const parts = await this.source.contributions(at, token, signal);
        signal.throwIfAborted();
        this.parts = parts;
      }
      this.renderGiven();
    } catch (error) {
      if (signal.aborted) return;
      this.root.removeAttribute("aria-busy");
      delete this.place.dataset["asked"];
      this.complain(error instanceof Error ? error.message : String(error));
    }
  }

  private likeliest({ tokens }: Prediction): number {
    return tokens.reduce((best, one) =>
      one.before.probability > best.before.probability ? one : best,
    ).id;
  }

  private moved({ moved, tokens }: Prediction): HTMLElement | null {
    if (moved === null) return null;
    const now = tokens.reduce((best, one) =>
      (one.after?.probability ?? 0) > (best.after?.probability ?? 0) ? one : best,
    );
    const before = tokens.find(({ before }) => before.rank === 1) ?? now;
    const name = (token: string) => `‘${spelled(token.trim() || token, 16)}’`;
    const by = (now.after?.probability ?? 0) - now.before.probability;
    const text =
      moved < 0.0005
        ? "What is off changes nothing here."
        : now.id === before.id
          ? `Still ${name(now.token)}, ${difference(by)} points.`
          : `Now ${name(now.token)} instead of ${name(before.token)}.`;
    const share = moved < 0.0005 ? "" : ` ${(100 * moved).toFixed(1)} % of all probability moved.`;
    return el("p", { class: "moved" }, el("strong", {}, text), share);
  }

  private renderPlace({ at, places, context }: Prediction): void {
    const step = (by: number, sign: string, name: string) =>
      el(
        "button",
        {
          type: "button",
          "aria-label": name,
          title: name,
          "data-key": name,
          disabled: at + by < 0 || at + by >= places,
          onclick: () => this.move(this.at + by),
        },
        sign,
      );
    const before = context.slice(0, -1).join("");
    const last = context[context.length - 1] ?? "";
    refill(
      this.place,
      step(-1, "◂", "The token before"),
      el(
        "p",
        { class: "context", title: `After token ${at}` },
        el("bdi", {}, el("span", {}, before)),
        el("mark", {}, last || "∅"),
        el("span", { class: "place" }, ` #${at}, then …`),
      ),
      step(1, "▸", "The token after"),
    );
  }

  private renderSwitches(): void {
    const index = this.index!;
    const { map, head, picked } = this.state;
    const [query, key] = picked;
    const offers: [string, Switch][] = [
      [`${layerName(index, map)} · head ${head}`, { kind: "head", map, head }],
      [`${layerName(index, map)} · all heads`, { kind: "layer", map }],
    ];
    if (query !== undefined && key !== undefined) {
      const edge: Switch = { kind: "edge", map, query, key };
      const pair: Switch = { kind: "pair", map, query, key, head };
      offers.push([`${switchName(index, edge)} everywhere`, edge]);
      offers.push([`${switchName(index, edge)} in this head`, pair]);
    }
    const isOff = (one: Switch) => this.off.some((each) => same(each, one));
    const set = (off: Switch[]) => {
      this.off = off;
      this.update();
    };
    const chips = this.off.map((one) =>
      el(
        "button",
        {
          type: "button",
          class: "chip",
          "aria-label": `Switch on: ${switchName(index, one)}`,
          "data-key": written([one]),
          onclick: () => set(this.off.filter((each) => each !== one)),
        },
        el("span", {}, switchName(index, one)),
        el("span", { "aria-hidden": "true" }, "×"),
      ),
    );
    refill(
      this.whatIf,
      el(
        "div",
        { class: "offers", role: "group", "aria-label": "Switch off" },
        el("span", { class: "label" }, "Switch off"),
        ...offers.map(([name, one]) =>
          el(
            "button",
            {
              type: "button",
              "data-key": `off ${written([one])}`,
              disabled: isOff(one),
              onclick: () => set([...this.off, one]),
            },
            name,
          ),
        ),
      ),
      chips.length
        ? el(
            "div",
            { class: "chips", role: "group", "aria-label": "Switched off" },
            el("span", { class: "label" }, "Off"),
            ...chips,
            el("button", { type: "button", class: "plain", onclick: () => set([]) }, "All on"),
          )
        : query === undefined &&
            el(
              "p",
              { class: "note" },
              "Pick a pair in the map to cut the edge between two tokens.",
            ),
    );
  }

  private renderGiven(): void {
    if (!this.parts) return;
    const choose = (map: number, head: number) => this.change({ map, head, set: [] });
    refill(this.given, ...contributionGrid(this.parts, this.index!, this.state, choose));
  }

  private complain(text: string): void {
    this.note.textContent = text;
    this.note.hidden = !text;
  }
}

function remembered(): boolean | null {
  try {
    const kept = localStorage.getItem(OPEN);
    return kept === null ? null : kept === "open";
  } catch {
    return null;
  }
}
