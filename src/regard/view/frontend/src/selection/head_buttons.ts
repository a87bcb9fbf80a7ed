/** Heads to average: one button each, those that share keys in one bracket. */

import { el } from "../elements/element";
import type { MapInfo } from "../sources/wire_format";

export function headButtons(
  { heads, keyHeads }: MapInfo,
  chosen: number[],
  off: boolean,
  pick: (set: number[]) => void,
): HTMLElement {
  const group = heads / keyHeads;
  const toggle = (head: number) => {
    const next = new Set(chosen);
    if (next.has(head)) next.delete(head);
    else next.add(head);
    pick([...next].sort((a, b) => a - b));
  };
  const button = (head: number) =>
    el(
      "button",
      {
        "aria-pressed": String(!off && chosen.includes(head)),
        "data-head": head,
        disabled: off,
        title: group > 1 ? `head ${head}, key head ${Math.floor(head / group)}` : `head ${head}`,
        onclick: () => toggle(head),
      },
      String(head),
    );
  const places = [...Array(heads).keys()];
  const several = group > 1 && keyHeads > 1;
  const brackets = several
    ? [...Array(keyHeads).keys()].map((key) =>
        el(
          "div",
          { class: "shared", role: "group", "aria-label": `heads that share key head ${key}` },
          el("div", { class: "row" }, ...places.slice(key * group, (key + 1) * group).map(button)),
          el("span", { class: "label", "aria-hidden": "true" }, `keys ${key}`),
        ),
      )
    : places.map(button);
  const name = group > 1 && !several ? "Heads, which share one key head" : "Heads";
  return el(
    "div",
    { class: several ? "set grouped" : "set", role: "group", "aria-label": "Heads to average" },
    el("span", { class: "label" }, name),
    ...brackets,
    el("button", { class: "plain", disabled: off, onclick: () => pick(places) }, "all"),
  );
}
