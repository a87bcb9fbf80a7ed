/** Every head in a table: sorted by a number, filtered by what heads are known to do. */

import { el, refill } from "../elements/element";
import { csv } from "../export/csv";
import { download } from "../export/download";
import { headName } from "../selection/layer_names";
import type { State } from "../selection/view_state";
import { aboutKind, badgeOf } from "../sentence/badge_words";
import type { Source } from "../sources/source";
import type { Index, Statistics } from "../sources/wire_format";
import { figuresOf, known, written, type Column, type Figures } from "./statistics";

interface Row {
  /** Its map, if its layer has one. */
  map: number | null;
  /** The order of its layer. */
  layer: number;
  head: number;
  name: string;
  figures: Figures;
}

const KINDS: [string, string, (row: Row, most: number) => boolean][] = [
  ["all", "All heads", () => true],
  ["sink", "Sink: over half on the first token", ({ figures }) => (figures["first"] ?? 0) > 0.5],
  ["previous", "Previous token: over 40%", ({ figures }) => (figures["previous"] ?? 0) > 0.4],
  ["self", "Self: over 40%", ({ figures }) => (figures["self"] ?? 0) > 0.4],
  ["sharp", "Sharp: entropy below 1 nat", ({ figures }) => (figures["entropy"] ?? 9) < 1],
  [
    "spread",
    "Spread: 80% of the largest entropy",
    ({ figures }, most) => (figures["entropy"] ?? 0) > 0.8 * most,
  ],
];

/** The table as it is seen: filtered and in its order. */
function save(rows: Row[], columns: Column[]): void {
  const names = columns.map(({ name }) => name);
  const lines = rows.map(({ name, head, figures }) => [
    name,
    head,
    ...names.map((n) => figures[n]),
  ]);
  const text = csv(["layer", "head", ...names], lines);
  download("heads.csv", new Blob([text], { type: "text/csv" }));
}

export class HeadTable {
  readonly root = el("section", { class: "heads", "aria-label": "Heads" });
  private rows: Row[] = [];
  private sort = { name: "place", down: false };
  private kind = "all";
  /** Layers that were read. */
  private read = 0;
  /** What each head of a map does, in a word. */
  private badges = new Map<number, string[]>();
  private asking: AbortController | null = null;

  constructor(
    private source: Source,
    private index: Index,
    private change: (part: Partial<State>) => void,
  ) {}

  async show(): Promise<void> {
    if (this.asking) return;
    const { maps, summaries } = this.index;
    const { signal } = (this.asking = new AbortController());
    try {
      while (this.read < maps.length) {
        const map = this.read;
        this.fill(`Reading layer ${map + 1} of ${maps.length} …`);
        const found = await this.source.statistics(map, signal);
        if (signal.aborted) return;
        this.add(map, map, maps[map]!, found);
        this.read++;
      }
      if (this.read === maps.length)
        for (const [place, summary] of summaries.entries())
          this.add(null, maps.length + place, summary, summary.statistics);
      this.read = Infinity;
      this.fill("");
      await this.readBadges(signal);
    } catch (error) {
      if (signal.aborted) return;
      this.asking = null;
      this.fill(`This could not be read: ${String(error)}`);
    }
  }

  /** What heads do takes longer than their numbers, and is filled in. */
  private async readBadges(signal: AbortSignal): Promise<void> {
    for (const map of this.index.maps.keys()) {
      if (this.badges.has(map)) continue;
      const found = await this.source.badges(map, signal);
      if (signal.aborted) return;
      this.badges.set(map, found ?? []);
      if (found) this.fill("");
    }
  }

  private badge({ map, head }: Row): HTMLElement | null {
    if (map === null) return null;
    const own = this.badges.get(map)?.[head];
    const found = badgeOf(own, this.index.maps[map]!.known[head]);
    if (!found) return null;
    const here = found === own;
    const given = {
      class: here ? "badge" : "badge usual",
      "data-badge": found,
      title: `${aboutKind(found)}${here ? "" : " over many texts"}`,
    };
    return el("span", given, found);
  }

  /** What nobody looks at any more is not read on. */
  leave(): void {
    if (this.read === Infinity && this.badges.size === this.index.maps.length) return;
    this.asking?.abort();
    this.asking = null;
  }

  private add(
    map: number | null,
    layer: number,
    { name, heads }: { name: string; heads: number },
    found: Statistics,
  ): void {
    for (let head = 0; head < heads; head++)
      this.rows.push({ map, layer, head, name, figures: figuresOf(found, head) });
  }

  private fill(note: string): void {
    const most = Math.max(0, ...this.rows.map((row) => row.figures["entropy"] ?? 0));
    const keep = KINDS.find(([name]) => name === this.kind)![2];
    const shown = this.rows.filter((row) => keep(row, most));
    const { name, down } = this.sort;
    const value = (row: Row) =>
      name === "place" ? row.layer * 1e6 + row.head : (row.figures[name] ?? -Infinity);
    shown.sort((a, b) => (down ? value(b) - value(a) : value(a) - value(b)));
    const columns = known(this.rows);
    const header = (key: string, title: string, about: string) =>
      el(
        "th",
        {
          scope: "col",
          "aria-sort": name === key ? (down ? "descending" : "ascending") : undefined,
          class: key === "place" ? undefined : "figure",
        },
        el(
          "button",
          {
            title: about,
            "data-key": key,
            onclick: () => {
              this.sort = { name: key, down: name === key ? !down : key !== "place" };
              this.fill("");
            },
          },
          title,
          el(
            "span",
            { class: "arrow", "aria-hidden": "true" },
            name === key ? (down ? "↓" : "↑") : "",
          ),
        ),
      );
    const tops = new Map(
      columns.map((column) => [
        column.name,
        Math.max(1e-9, ...this.rows.map((row) => Math.abs(row.figures[column.name] ?? 0))),
      ]),
    );
    const open = ({ map, head }: Row) =>
      map === null ? undefined : () => this.change({ view: "map", map, head, span: 0 });
    const called = (row: Row) => {
      const { map, name, head } = row;
      const words = [
        el("span", {}, map === null ? `Head ${head}` : headName(this.index.maps, map, head)),
        el("span", { class: "path place" }, name),
        this.badge(row),
      ];
      if (map === null) return el("span", { class: "jump" }, ...words);
      return el("button", { class: "jump", title: "Show its map" }, ...words);
    };
    const line = (row: Row) =>
      el(
        "tr",
        { onclick: open(row) },
        el("th", { scope: "row" }, called(row)),
        ...columns.map((column) => {
          const figure = row.figures[column.name];
          const share =
            figure === undefined
              ? 0
              : Math.abs(figure) / (column.share ? 1 : tops.get(column.name)!);
          return el(
            "td",
            { class: "figure" },
            el("span", {
              class: "bar",
              style: `width:calc(${share.toFixed(3)} * (100% - 16px))`,
              "aria-hidden": "true",
            }),
            el("span", {}, written(figure, column)),
          );
        }),
      );
    const filter = el("select", { id: "regard-kind" });
    for (const [key, title] of KINDS)
      filter.append(el("option", { value: key, selected: key === this.kind }, title));
    filter.addEventListener("change", () => {
      this.kind = filter.value;
      this.fill("");
    });
    refill(
      this.root,
      el(
        "div",
        { class: "ask" },
        el("label", { for: "regard-kind" }, "Show"),
        filter,
        el("span", { class: "note" }, note || `${shown.length} of ${this.rows.length} heads`),
        el("button", { disabled: Boolean(note), onclick: () => save(shown, columns) }, "Save CSV"),
      ),
      shown.length
        ? el(
            "div",
            { class: "scroll" },
            el(
              "table",
              {},
              el(
                "thead",
                {},
                el(
                  "tr",
                  {},
                  header("place", "Head", "By layer and head"),
                  ...columns.map((c) => header(c.name, c.title, c.about)),
                ),
              ),
              el("tbody", {}, ...shown.map(line)),
            ),
          )
        : el(
            "p",
            { class: "note" },
            note ? "" : "No head is of this kind. Choose another, or all heads.",
          ),
    );
  }
}
