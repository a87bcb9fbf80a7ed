/** Two heads side by side, or what differs: of one text, or of two texts or models. */

import { choice } from "../elements/choice";
import { el, refill } from "../elements/element";
import { headName, lowered } from "../selection/layer_names";
import type { State } from "../selection/view_state";
import { looksOf, quoted, share } from "../sentence/caption";
import { Passage, sidesOf, textsOf, WINDOW } from "../sentence/passage";
import { seenBy, type Line, type Source } from "../sources/source";
import type { Index, MapInfo } from "../sources/wire_format";
import {
  alignedParts,
  difference,
  sharesOf,
  type Difference,
  type Part,
  type Shares,
} from "./difference";
import { DifferenceGrid } from "./difference_grid";
import { SecondPicker } from "./second_picker";
import { shareMap } from "./share_map";
import { paintChanges, type Change } from "./word_difference";

const CHANGES = 3;
const NAMES = ["First", "Second"] as const;
const MEANING = () =>
  el(
    "h3",
    {},
    "What the second looks at ",
    el("span", { class: "more" }, "more"),
    " and ",
    el("span", { class: "less" }, "less"),
  );

/** Both heads, and how they differ; null where the texts are too long to be told apart by token. */
interface Compared {
  parts: [Part, Part];
  shares: [Shares, Shares];
  found: Difference | null;
}

export class CompareView {
  readonly root = el("section", { class: "compare", "aria-label": "Compare" });
  private caption = el("p", { class: "caption", "aria-live": "polite" });
  private moves = el("p", { class: "moves" });
  private note = el("p", { class: "note", role: "status" });
  private passages: [Passage, Passage] = [new Passage(), new Passage()];
  private sides = el("div", { class: "sides" });
  private maps = el("div", { class: "maps" });
  private how = el("div", {});
  private picker: SecondPicker;
  private grid: DifferenceGrid;
  private shown: Compared | null = null;
  private filled: string[] = ["", ""];
  private hovered: number | null = null;
  private asking = new AbortController();

  constructor(
    source: Source,
    index: Index,
    private state: () => State,
    private change: (part: Partial<State>) => void,
    private theme: () => "light" | "dark",
  ) {
    this.picker = new SecondPicker(source, index, change, (text) => (this.note.textContent = text));
    this.grid = new DifferenceGrid(index, (map, head, alone) =>
      change(alone ? { map2: map, head2: head } : { map, head, map2: -1, head2: -1, set: [] }),
    );
    this.root.append(
      el("div", { class: "ask" }, this.picker.root, this.how),
      this.note,
      this.caption,
      this.moves,
      el(
        "div",
        { class: "parts" },
        el("div", {}, this.sides, this.maps),
        el("aside", { "aria-label": "How far heads differ" }, this.grid.root),
      ),
    );
    for (const at of [0, 1]) this.listen(at);
  }

  /** Whether there are two heads, or somebody to read another text. */
  leave(): void {
    this.asking.abort();
  }

  async show(): Promise<void> {
    this.asking.abort();
    const { signal } = (this.asking = new AbortController());
    const { compare } = this.state();
    refill(
      this.how,
      choice(
        "Show",
        [
          ["both", "Side by side"],
          ["difference", "Difference"],
        ],
        compare,
        (now) => this.change({ compare: now }),
      ),
    );
    try {
      const parts = await this.picker.parts(this.state(), signal);
      signal.throwIfAborted();
      const shares = await Promise.all(parts.map((part) => sharesOf(part, signal)));
      signal.throwIfAborted();
      this.compared(parts, shares as [Shares, Shares]);
      await this.grid.show(parts, shares[0]!, signal);
    } catch (error) {
      if (!signal.aborted) this.note.textContent = `This could not be compared: ${words(error)}`;
    }
  }

  private compared(parts: [Part, Part], shares: [Shares, Shares]): void {
    const [one, other] = shares;
    const pairs = one.level === other.level ? alignedParts(...parts, one.level) : null;
    const found = pairs && difference(one, other, pairs);
    this.shown = { parts, shares, found };
    this.hovered = null;
    this.note.textContent = found ? "" : "Too long and unlike to compare by token.";
    const { dataset } = this.root;
    dataset["mean"] = found ? found.mean.toFixed(5) : "";
    dataset["most"] = found ? String(found.queries[found.most]?.[0]) : "";
    this.fill();
    this.draw();
    this.ask();
  }

  /** The words of both; of one of them where the difference is shown. */
  private fill(): void {
    const { parts, found } = this.shown!;
    const both = this.both;
    const boxes = parts.map((part, at) => {
      const map = part.index.maps[part.map]!;
      const texts = textsOf(part.index, map);
      const start = Math.max(0, Math.min(this.query(at, found) - WINDOW / 2, map.queries - WINDOW));
      const name = [part.index.model, map.queryText, map.keyText, map.queries, start].join();
      if (this.filled[at] !== name || at) this.passages[at]!.fill(...sidesOf(texts, map), start);
      this.filled[at] = name;
      return el(
        "div",
        { hidden: !both && at === 1 },
        this.both ? el("h3", {}, this.title(at)) : MEANING(),
        this.passages[at]!.root,
      );
    });
    this.sides.replaceChildren(...boxes);
    for (const [at, passage] of this.passages.entries())
      passage.fit(boxes[at]!.clientWidth, both ? 150 : 260);
  }

  private get both(): boolean {
    return this.state().compare === "both" || !this.shown!.found;
  }

  private map(at: number): MapInfo {
    const { index, map } = this.shown!.parts[at]!;
    return index.maps[map]!;
  }

  private name(at: number): string {
    const { index, map, head } = this.shown!.parts[at]!;
    return headName(index.maps, map, head);
  }

  private title(at: number): string {
    const { index } = this.shown!.parts[at]!;
    const models = this.state().by ? ` · ${index.model}` : "";
    return `${NAMES[at]}: ${lowered(this.name(at))}${models}`;
  }

  /** The token that is asked about, in one of the two texts. */
  private query(at: number, found: Difference | null): number {
    return found?.queries[this.asked(found)]?.[at] ?? this.state().picked[0] ?? 0;
  }

  /** The pair of tokens that is asked about: pointed at, pinned, or that which differs most. */
  private asked(found: Difference): number {
    const { picked } = this.state();
    const { level } = this.shown!.shares[0];
    const pinned = found.queries.findIndex(([query]) => query === (picked[0] ?? -1) >> level);
    return this.hovered ?? (pinned >= 0 ? pinned : found.most);
  }

  private draw(): void {
    const { shares, found } = this.shown!;
    const most = Math.max(
      ...shares.map(({ values }) => values.reduce((a, b) => Math.max(a, b), 0)),
    );
    const drawn = this.both
      ? shares.map(({ rows, columns, values }, at) =>
          shareMap(
            {
              title: NAMES[at]!,
              rows,
              columns,
              high: most,
              value: (r, c) => values[r * columns + c]!,
            },
            this.theme(),
            false,
            (row) => this.point(found?.queries.findIndex((pair) => pair[at] === row) ?? -1),
          ),
        )
      : [this.differenceMap(found!)];
    this.maps.replaceChildren(...drawn);
  }

  private differenceMap({ queries, keys, cells }: Difference): HTMLElement {
    const high = cells.reduce((most, each) => Math.max(most, Math.abs(each)), 1e-6);
    const value = (row: number, column: number) => cells[row * keys.length + column]!;
    const title = `Second less first, ±${share(high)}`;
    const of = { title, rows: queries.length, columns: keys.length, high, value };
    return shareMap(of, this.theme(), true, (row) => this.point(row));
  }

  private point(pair: number): void {
    const next = pair < 0 ? null : pair;
    if (next === this.hovered) return;
    this.hovered = next;
    this.ask();
  }

  /** What is said and painted of the token that is asked about. */
  private ask(): void {
    const { shares, found } = this.shown!;
    this.say();
    if (!found || shares[0].level) return void this.askRows();
    const at = this.asked(found);
    const [a, b] = found.queries[at] ?? [0, 0];
    const lines = shares.map(({ values, columns }, side): Line => {
      const row = side ? b : a;
      return { weights: values.subarray(row * columns, (row + 1) * columns), exact: null };
    });
    this.paint([a, b], lines, this.changes(found, lines));
  }

  /** Rows of long texts are asked for one by one. */
  private async askRows(): Promise<void> {
    const { signal } = this.asking;
    const { parts, found, shares } = this.shown!;
    const cell = 1 << shares[0].level;
    const rows = [0, 1].map((at) => {
      const of = this.query(at, found) * (found ? cell : 1);
      return Math.min(of, this.map(at).queries - 1);
    }) as [number, number];
    const ask = parts.map(({ source, map, head }, at) =>
      source.row(map, [head], rows[at]!, signal),
    );
    const lines = await Promise.all(ask).catch(() => null);
    if (lines && !signal.aborted) this.paint(rows, lines, []);
  }

  private changes({ keys }: Difference, [one, other]: Line[]): Change[] {
    const [mine, theirs] = this.shown!.parts.map(
      ({ index }, at) => index.texts[this.map(at).keyText],
    );
    const found = keys.map(([a, b]): Change => {
      const named = quoted(theirs, b);
      const instead = named === quoted(mine, a) ? "" : named;
      return { key: a, from: one!.weights[a]!, to: other!.weights[b]!, instead };
    });
    return found.sort((a, b) => Math.abs(b.to - b.from) - Math.abs(a.to - a.from));
  }

  private paint(rows: [number, number], lines: Line[], changes: Change[]): void {
    const { parts } = this.shown!;
    const pinned = this.state().picked[0] === rows[0];
    if (!this.both) paintChanges(this.passages[0], rows[0], changes);
    else
      for (const [at, { index }] of parts.entries()) {
        const map = this.map(at);
        const looks = looksOf(textsOf(index, map), rows[at]!, lines[at]!);
        const seen = seenBy(map, rows[at]!);
        this.passages[at]!.paint({ looks, seen, held: null, pinned }, this.theme());
      }
    const [one, other] = parts.map(({ index }, at) => index.texts[this.map(at).queryText]);
    const names = [quoted(one, rows[0]), quoted(other, rows[1])];
    const who = names[0] === names[1] ? names[0] : names.join(" / ");
    const keys = parts[0].index.texts[this.map(0).keyText];
    const told = changes
      .slice(0, CHANGES)
      .filter(({ from, to }) => Math.abs(to - from) >= 0.005)
      .map(({ key, from, to, instead }) => {
        const name = quoted(keys, key) + (instead && ` / ${instead}`);
        return `${name} ${share(from)} → ${share(to)}`;
      });
    const nothing = changes.length ? "looks at the same in both" : "";
    this.moves.textContent = `${who} #${rows[0]}: ${told.join(", ") || nothing}`;
    this.root.dataset["asked"] = rows.join();
  }

  /** What differs most, in a sentence. */
  private say(): void {
    const { found, parts, shares } = this.shown!;
    const [one, other] = [this.name(0), this.name(1)];
    const who = one === other ? `${one} in both` : `${one} and ${lowered(other)}`;
    if (!found) return this.caption.replaceChildren(el("strong", {}, who));
    const { level } = shares[0];
    const about = level ? "about " : "";
    const names = parts[0].index.texts[this.map(0).queryText];
    const [most] = found.queries[found.most] ?? [0];
    const where = level ? `near #${most << level}` : `at ${quoted(names, most)} #${most}`;
    this.caption.replaceChildren(
      el("strong", {}, who),
      `: on average ${about}${share(found.mean)} of a token’s attention goes elsewhere, most ${where}, ${share(found.rows[found.most] ?? 0)}.`,
    );
  }

  private listen(at: number): void {
    const { root } = this.passages[at]!;
    const pair = (event: Event): number => {
      const word = (event.target as HTMLElement).closest<HTMLElement>(
        ".said[data-side=query] .word",
      );
      const { found, shares } = this.shown ?? {};
      if (!word || !found) return -1;
      const place = Number(word.dataset["place"]) >> shares![0].level;
      return found.queries.findIndex((each) => each[at] === place);
    };
    root.addEventListener("pointerover", (event) => {
      const now = pair(event);
      if (now >= 0) this.point(now);
    });
    root.addEventListener("focusin", (event) => this.point(pair(event)));
    root.addEventListener("pointerleave", () => this.point(-1));
    root.addEventListener("click", (event) => {
      const now = pair(event);
      if (now < 0) return;
      const query = this.shown!.found!.queries[now]![0] << this.shown!.shares[0].level;
      const held = this.state().picked[0] === query;
      this.change({ picked: held ? [] : [query, 0] });
    });
  }
}

const words = (error: unknown) => (error instanceof Error ? error.message : String(error));
