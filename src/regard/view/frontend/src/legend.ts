/** What a pixel of the map means, under the colours of the moment. */

import type { Reading } from "./atlas";
import { css, number, percent, ramp, type Pool, type Scale } from "./colour";
import { el } from "./dom";
import type { Quantity } from "./format";
import type { State } from "./state";

export interface Legend {
  /** The values at the beginning, in the middle and at the end of the colours. */
  ticks: [string, string, string];
  /** What a cell is. */
  meaning: string;
  /** What is still being read, or cannot be. */
  notes: string[];
}

const POOLED: Record<Pool, string> = { max: "largest", mean: "mean", sum: "sum of" };

const UNITS: Record<Scale, string> = {
  linear: "",
  log: "",
  row: ", as a share of the largest weight in its row",
  ratio: ", over what even attention would give",
};

export function legendOf(
  reading: Reading,
  { pool, scale, quantity }: State,
  quantities: Quantity[],
): Legend {
  const { level, range, draft } = reading;
  const tick = (value: number) => {
    if (scale === "ratio") return `${number(value)}×`;
    if (scale === "row") return `${Math.round(100 * value)}%`;
    return pool === "sum" && value > 1 ? number(value) : percent(value, 0);
  };
  const middle =
    scale === "linear" || scale === "row" ? range.high / 2 : Math.sqrt(range.low * range.high);
  const cell = 1 << level;
  const what = quantities.find(({ name }) => name === quantity)?.about ?? quantity;
  const pooled = POOLED[reading.beyond ? "mean" : pool];
  const how =
    cell === 1 ? `one pair: its ${what}` : `${cell} × ${cell} pairs: the ${pooled} ${what}`;
  const notes: string[] = [];
  if (reading.beyond) notes.push("Full colour: single pairs, the strongest of each row, exactly.");
  else if (reading.finest === level && level > 0) notes.push("This page holds no finer cells.");
  if (draft)
    notes.push(`Draft: ${draft} of ${cell} rows of each cell read. The rest is being read.`);
  if (reading.loading) notes.push("Reading …");
  return {
    ticks: [tick(range.low), tick(middle), tick(range.high)],
    meaning: `A cell is ${how}${UNITS[scale]}.`,
    notes,
  };
}

/** All colours in a row, from the least to the most. */
export function strip(theme: "light" | "dark"): HTMLCanvasElement {
  const made = el("canvas", { width: 256, height: 1, class: "strip", "aria-hidden": "true" });
  const context = made.getContext("2d")!;
  for (const [at, colour] of ramp(theme).entries()) {
    context.fillStyle = css(colour);
    context.fillRect(at, 0, 1, 1);
  }
  return made;
}

function nodes({ ticks, meaning, notes }: Legend, theme: "light" | "dark"): HTMLElement[] {
  return [
    strip(theme),
    el("div", { class: "ticks" }, ...ticks.map((tick) => el("span", {}, tick))),
    el("p", { class: "note" }, [meaning, ...notes].join(" ")),
  ];
}

export const legendBox = (legend: Legend, theme: "light" | "dark") =>
  el("div", { class: "legend" }, ...nodes(legend, theme));

export function legendNodes(legend: Legend, failed: string | null, theme: "light" | "dark") {
  return [
    ...nodes(legend, theme),
    failed
      ? el("p", { class: "note bad", role: "alert" }, `A tile could not be read: ${failed}`)
      : "",
    el("p", { class: "note void" }, el("span", { class: "swatch" }), "hidden by the mask, or zero"),
  ];
}
