/** Layers × heads, one grid for each number: all there is of layers whose traces were not kept. */

import { css, ink, ramp } from "../drawing/colour";
import { el, refill } from "../elements/element";
import type { State } from "../selection/view_state";
import type { Index } from "../sources/wire_format";
import { figuresOf, known, written, type Column, type Figures } from "./statistics";

const KEEP =
  'Only statistics were kept of these layers, so there are no maps of them. Keep traces with watch(model, keep="traces"), or with regard record --keep traces.';
/** Heads whose numbers have room in their cells. */
const ROOMY = 16;

interface Row {
  map: number;
  head: number;
  figures: Figures;
}

export class HeadGrids {
  readonly root = el("section", { class: "grids", "aria-label": "Layers and heads" });
  private rows: Row[];

  constructor(
    private index: Index,
    private state: () => State,
    private change: (part: Partial<State>) => void,
    private theme: () => "light" | "dark",
  ) {
    this.rows = index.summaries.flatMap(({ heads, statistics }, map) =>
      Array.from({ length: heads }, (_, head) => ({
        map,
        head,
        figures: figuresOf(statistics, head),
      })),
    );
  }

  show(): void {
    refill(
      this.root,
      el("p", { class: "note" }, KEEP),
      ...known(this.rows).map((column) => this.grid(column)),
    );
  }

  private grid(column: Column): HTMLElement {
    const { summaries } = this.index;
    const heads = Math.max(...summaries.map((layer) => layer.heads));
    const values = this.rows.map(({ figures }) => figures[column.name] ?? 0);
    const most = column.share ? 1 : Math.max(0, ...values);
    const numbers = Array.from({ length: heads }, (_, head) =>
      el("th", { scope: "col" }, heads > ROOMY && head % 5 ? "" : String(head)),
    );
    const lines = summaries.map(({ name }, map) =>
      el(
        "tr",
        {},
        el("th", { scope: "row", class: "path", title: name }, name),
        ...this.rows
          .filter((row) => row.map === map)
          .map((row) => el("td", {}, this.cell(row, name, column, most, heads > ROOMY))),
      ),
    );
    const top = column.share ? "100%" : written(most, column);
    return el(
      "div",
      { class: heads > ROOMY ? "grid small" : "grid" },
      el("h2", {}, column.title),
      el(
        "p",
        { class: "note" },
        `${column.about}. ${this.theme() === "dark" ? "Dark to bright" : "Pale to dark"}: 0 to ${top}.`,
      ),
      el(
        "div",
        { class: "scroll" },
        el(
          "table",
          {},
          el("thead", {}, el("tr", {}, el("td", {}), ...numbers)),
          el("tbody", {}, ...lines),
        ),
      ),
    );
  }

  private cell(
    { map, head, figures }: Row,
    name: string,
    column: Column,
    most: number,
    small: boolean,
  ): HTMLElement {
    const figure = figures[column.name];
    const text = written(figure, column);
    const share = figure === undefined || most <= 0 ? 0 : Math.min(1, Math.max(0, figure / most));
    const colour = ramp(this.theme())[Math.round(255 * share)]!;
    const about = `${name}, head ${head}: ${text}`;
    const now = this.state();
    return el(
      "button",
      {
        "data-map": map,
        "data-head": head,
        "data-place": `${column.name},${map},${head}`,
        "aria-label": about,
        "aria-current": now.map === map && now.head === head ? "true" : undefined,
        title: about,
        style: figure === undefined ? undefined : `background:${css(colour)};color:${ink(colour)}`,
        onclick: () => this.change({ map, head }),
      },
      small ? "" : text,
    );
  }
}
