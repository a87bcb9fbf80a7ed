/** Which layer and head: two lists, and the parts of the model where it has several. */

import { choice } from "../elements/choice";
import { el } from "../elements/element";
import type { MapInfo } from "../sources/wire_format";
import { layerName } from "./layer_names";
import { partOf, partsOf, type Part } from "./model_parts";
import type { State } from "./view_state";

type Change = (part: Partial<State>) => void;

export class LayerPicker {
  readonly root = el("div", { class: "where" });

  /** What there is but one of is not asked for. */
  render(maps: MapInfo[], { map, head }: State, change: Change): void {
    const { heads, keyHeads } = maps[map]!;
    const group = heads / keyHeads;
    const parts = partsOf(maps);
    const part = parts.length > 1 ? partOf(maps[map]!) : "";
    const [, layers] = parts.find(([name]) => name === part)!;
    // The part is named beside it.
    const nameOf = (at: number) => {
      const name = layerName(maps, at);
      const own = part && name.startsWith(part) ? name.slice(part.length + 1) : name;
      return own[0]!.toUpperCase() + own.slice(1);
    };
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
      maps.length > 1
        ? pick(
            "regard-layer",
            "Layer",
            layers.map((at) => [at, nameOf(at), maps[at]!.name]),
            map,
            (at) => change({ map: at, set: [] }),
          )
        : "",
      heads > 1
        ? pick(
            "regard-head",
            "Head",
            Array.from({ length: heads }, (_, at) => [at, title(at)]),
            head,
            (at) => change({ head: at, set: [] }),
          )
        : "",
    );
    if (focused) this.root.querySelector<HTMLElement>(again)?.focus();
  }
}

/** A list of places to choose one of. */
export function pick(
  id: string,
  label: string,
  options: [number, string, string?][],
  now: number,
  take: (at: number) => void,
): HTMLElement {
  const select = el("select", { id, title: label, "aria-label": label });
  for (const [at, name, title] of options)
    select.append(el("option", { value: at, selected: at === now, title }, name));
  select.addEventListener("change", () => take(Number(select.value)));
  return select;
}
