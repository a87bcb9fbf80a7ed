/** What each head gives the logit of the likeliest token, as a grid of layers and heads. */

import { spelled } from "../drawing/token_spelling";
import { el } from "../elements/element";
import { headCells, strength } from "../selection/head_cells";
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
    strength(made, Math.abs(value) / most);
    return made;
  };
  const rows = maps.map(({ map, heads }) => ({
    nth: layerName(index, map).split(" ").pop()!,
    cells: heads.map((value, head) => cell(map, head, value)),
  }));
  const grid = headCells(`What heads give ${said}`, rows);
  grid.addEventListener("pointerleave", () => tell(start));
  return [grid, told];
}
