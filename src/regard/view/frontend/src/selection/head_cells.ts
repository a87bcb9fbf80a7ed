/** A small grid of layers and heads: one stop of the Tab key, arrows go from cell to cell. */

import { el } from "../elements/element";

export interface HeadRow {
  /** What stands before it. */
  nth: string;
  cells: HTMLElement[];
}

export function headCells(label: string, rows: HeadRow[]): HTMLElement {
  const wide = Math.max(...rows.map(({ cells }) => cells.length));
  const grid = el(
    "div",
    { class: "given", role: "group", "aria-label": label },
    ...rows.flatMap(({ nth, cells }) => {
      const gap = Array.from({ length: wide - cells.length }, () => el("span"));
      return [el("span", { class: "nth" }, nth), ...cells, ...gap];
    }),
  );
  grid.style.setProperty("--heads", String(wide));
  const cells = rows.flatMap((row) => row.cells);
  const first = cells.find((each) => each.getAttribute("aria-pressed") === "true") ?? cells[0];
  for (const each of cells) each.tabIndex = each === first ? 0 : -1;
  grid.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide }[event.key];
    const to = cells[cells.indexOf(document.activeElement as HTMLElement) + (by ?? NaN)];
    if (!by || !to) return;
    event.preventDefault();
    event.stopPropagation();
    for (const each of cells) each.tabIndex = each === to ? 0 : -1;
    to.focus();
  });
  return grid;
}

/** How strong the colour of a cell is, from 0 to 1. */
export const strength = (cell: HTMLElement, share: number) =>
  cell.style.setProperty("--share", `${Math.round(100 * share)}%`);
