/** The words with the most weight in a line. */

import { percent } from "../drawing/number_format";
import { spelled } from "../drawing/token_spelling";
import { el } from "../elements/element";
import type { Line } from "../sources/source";

const MOST = 12;

/** Each is a button that opens its pair. */
export function strongestWords(
  { weights, exact }: Line,
  names: string[] | undefined,
  open: (at: number) => void,
): HTMLElement {
  const order = [...weights.keys()]
    .filter((at) => weights[at]! > 0 && (!exact || exact.has(at)))
    .sort((a, b) => weights[b]! - weights[a]!)
    .slice(0, MOST);
  if (!order.length)
    return el("p", { class: "note" }, "Nothing: every pair is masked, or all weights are zero.");
  const most = weights[order[0]!]!;
  const item = (at: number) =>
    el(
      "button",
      { title: "Show this pair on the map", onclick: () => open(at) },
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
