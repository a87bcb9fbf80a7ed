/** What each head gives the logit of the likeliest token, as a grid of layers and heads. */

import { spelled } from "../drawing/token_spelling";
import { el } from "../elements/element";
import type { State } from "../selection/view_state";
import type { Contributions } from "../sources/prediction";
import type { Index } from "../sources/wire_format";
import { layerName } from "./switches";

const signed = (value: number): string =>
  `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(Math.abs(value) < 9.95 ? 2 : 1)}`;

export function contributionGrid(
  { why, maps, token, logit, rest }: Contributions,
  index: Index,
  { map: chosenMap, head: chosenHead }: State,
  choose: (map: number, head: number) => void,
): HTMLElement[] {
  if (why)
    return [
      el(
        "p",
        { class: "note" },
        `What each head adds by itself cannot be told apart here: ${why}. Switching heads off shows what they do.`,
      ),
    ];
  const most = Math.max(1e-9, ...maps.flatMap(({ heads }) => heads.map(Math.abs)));
  const wide = Math.max(...maps.map(({ heads }) => heads.length));
  const said = spelled(token ?? "", 16);
  const told = el("p", { class: "note", role: "status" });
  const start = `Logit ${logit?.toFixed(1)} of ${said}: heads ${signed((logit ?? 0) - (rest ?? 0))}, all else ${signed(rest ?? 0)}.`;
  const tell = (text: string) => (told.textContent = text);
  tell(start);
  const cell = (map: number, head: number, value: number) => {
    const name = `${layerName(index, map)} · head ${head}: ${signed(value)}`;
    const now = map === chosenMap && head === chosenHead;
    const made = el("button", {
      type: "button",
      class: value < 0 ? "against" : "for",
      "aria-label": name,
      "aria-pressed": String(now),
      "data-key": `${map}.${head}`,
      title: name,
      onclick: () => choose(map, head),
      onpointerenter: () => tell(`${name} for ${said}`),
      onfocus: () => tell(`${name} for ${said}`),
    });
    made.style.setProperty("--share", `${Math.round((100 * Math.abs(value)) / most)}%`);
    return made;
  };
  const grid = el(
    "div",
    { class: "given", role: "group", "aria-label": `What heads give ${said}` },
    ...maps.flatMap(({ map, heads }) => {
      const cells = heads.map((value, head) => cell(map, head, value));
      const gap = Array.from({ length: wide - heads.length }, () => el("span"));
      return [
        el("span", { class: "nth" }, layerName(index, map).split(" ").pop()!),
        ...cells,
        ...gap,
      ];
    }),
  );
  grid.style.setProperty("--heads", String(wide));
  grid.addEventListener("pointerleave", () => tell(start));
  // One stop of the Tab key; arrows go from cell to cell.
  const cells = [...grid.querySelectorAll<HTMLElement>("button")];
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
  return [grid, told];
}
