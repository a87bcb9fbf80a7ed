/** What colours stand for: a strip of all of them, their values, and what is coloured. */

import { el } from "../elements/element";
import { css, ramp } from "./colour";

export interface Legend {
  /** The values at the beginning, in the middle and at the end of the colours. */
  ticks: [string, string, string];
  /** What a cell is. */
  meaning: string;
  /** What is still being read, or cannot be. */
  notes: string[];
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
    el("p", { class: "note void" }, el("span", { class: "swatch" }), "masked, or zero"),
  ];
}
