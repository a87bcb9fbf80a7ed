/** Which layer and head: two lists, and the parts of the model where it has several. */

import { choice } from "../elements/choice";
import { el } from "../elements/element";
import type { MapInfo } from "../sources/wire_format";
import { partOf, partsOf, type Part } from "./model_parts";
import type { State } from "./view_state";

type Change = (part: Partial<State>) => void;

export class LayerPicker {
  readonly root = el("div", { class: "where" });

  render(maps: MapInfo[], { map, head }: State, change: Change): void {
    const { heads, keyHeads } = maps[map]!;
    const group = heads / keyHeads;
    const parts = partsOf(maps);
    const part = parts.length > 1 ? partOf(maps[map]!) : "";
    const [, layers] = parts.find(([name]) => name === part)!;
    const title = (at: number) =>
      group > 1 ? `head ${at} · keys ${Math.floor(at / group)}` : `head ${at}`;
    const focused = document.activeElement?.closest<HTMLInputElement>(".where *");
    const again = focused?.id ? `#${focused.id}` : `input[value="${focused?.value ?? ""}"]`;
    this.root.replaceChildren(
      parts.length > 1
        ? choice(
            "Part of the model",
            parts.map(([name]) => [name, name]),
            part,
            (name: Part) => {
              const [, places] = parts.find(([each]) => each === name)!;
              change({ map: places[0]!, set: [] });
            },
          )
        : "",
      pick(
        "regard-layer",
        "Layer",
        layers.map((at) => [at, maps[at]!.name]),
        map,
        (at) => change({ map: at, set: [] }),
      ),
      pick(
        "regard-head",
        "Head",
        Array.from({ length: heads }, (_, at) => [at, title(at)]),
        head,
        (at) => change({ head: at, set: [] }),
      ),
    );
    if (focused) this.root.querySelector<HTMLElement>(again)?.focus();
  }
}

function pick(
  id: string,
  label: string,
  options: [number, string][],
  now: number,
  take: (at: number) => void,
): HTMLElement {
  const select = el("select", { id, title: label, "aria-label": label });
  for (const [at, name] of options)
    select.append(el("option", { value: at, selected: at === now }, name));
  select.addEventListener("change", () => take(Number(select.value)));
  return select;
}
