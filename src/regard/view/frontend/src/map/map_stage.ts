/** The map with all that belongs to it: the panel beside it, keys, files. */

import { legendNodes } from "../drawing/legend";
import { el } from "../elements/element";
import { Menu } from "../elements/menu";
import type { Given, Shown } from "../stage/later_part";
import { pressKey } from "./keyboard";
import { mapFiles } from "./map_files";
import { legendOf, type MapStatus } from "./map_legend";
import { choices, facts } from "./map_options";
import { MapView } from "./map_view";
import { StrongestPairs } from "./strongest_pairs";
import { TokenSearch } from "./token_search";

const KEYS =
  "Drag or arrow keys: pan. Wheel or +\u00a0−: zoom. 0: all. /: find. [\u00a0]: head. {\u00a0}: layer. Shift\u00a0+\u00a0arrows: read cells. Enter: sentence.";

export interface MapStage extends Shown {
  /** Bring a pair into view. */
  look(query: number, key: number): void;
  close(): void;
}

export function mapStage({ source, index, state, change, theme }: Given): MapStage {
  const legend = el("div", { class: "legend" });
  const side = el("aside", { class: "side", "aria-label": "How the map is drawn" });
  let said = "";
  const explain = (status: MapStatus) => {
    const found = legendOf(status, state(), index.quantities);
    side.dataset["level"] = String(status.level);
    // Each frame tells of itself, mostly the same as the one before.
    const says = JSON.stringify([found, status.failed, theme()]);
    if (says !== said) legend.replaceChildren(...legendNodes(found, status.failed, theme()));
    said = says;
  };
  const view = new MapView(source, index, state, change, explain, theme);
  const saving = new Menu("Save …", mapFiles(view, index, source, state));
  const search = new TokenSearch(
    index.texts,
    () => index.maps[state().map]!,
    (marks, now) => view.mark(marks, now),
  );
  const pairs = new StrongestPairs(source, index, state, (query, key) => {
    change({ picked: [query, key] }, true);
    view.show(query, key);
    pairs.mark();
  });
  const render = () => {
    const focused = document.activeElement as HTMLInputElement | null;
    const again = focused?.closest(".side") ? focused.value : null;
    search.renew();
    pairs.show();
    side.replaceChildren(
      legend,
      view.minimap.root,
      search.root,
      pairs.root,
      ...choices(state(), index.quantities, (part) => change(part)),
      el(
        "div",
        { class: "buttons", role: "group", "aria-label": "Zoom" },
        el("button", { onclick: () => view.zoom(1.6), "aria-label": "Zoom in" }, "+"),
        el("button", { onclick: () => view.zoom(1 / 1.6), "aria-label": "Zoom out" }, "−"),
        el("button", { onclick: () => view.all() }, "Whole text"),
      ),
      facts(index.maps[state().map]!),
      saving.root,
      el("p", { class: "note keys" }, KEYS),
    );
    if (focused && side.contains(focused)) focused.focus();
    else if (again) side.querySelector<HTMLElement>(`input[value="${CSS.escape(again)}"]`)?.focus();
  };
  return {
    root: view.root,
    side,
    show: () => {
      render();
      view.point(null);
      view.draw();
    },
    key: (event) => {
      const target = event.target as HTMLElement;
      if (event.key === "/") {
        search.focus();
        return true;
      }
      const isForMap = target === document.body || takesKey(target, event.key);
      return isForMap && pressKey(event, view);
    },
    look: (query, key) => view.show(query, key),
    close: () => {
      view.close();
      pairs.close();
    },
  };
}

/** Whether a key that was pressed on a control is none of its own. */
function takesKey(control: HTMLElement, key: string): boolean {
  if (control.closest("canvas, [role='menu'], .words")) return false;
  return control.closest("input") ? "+=-0".includes(key) : key !== "Enter" && key !== " ";
}
