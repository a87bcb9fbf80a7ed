/** One front end for the page, the notebook and the app: where each of them starts. */

import { el } from "./elements/element";
import type { State } from "./selection/view_state";
import { Shell, type Options } from "./shell/shell";
import { STYLE } from "./shell/style";
import { AppSource } from "./sources/app_source";
import { PageSource } from "./sources/page_source";
import type { Source } from "./sources/source";
import { WidgetSource, type Model } from "./sources/widget_source";
import type { Index } from "./sources/wire_format";

async function mount(
  place: HTMLElement,
  source: Source,
  options: Options,
): Promise<Shell | undefined> {
  const sheet = el("style");
  sheet.textContent = STYLE;
  const root = el("div", { class: "regard" }, el("p", { class: "note wait" }, "Opening …"));
  place.replaceChildren(sheet, root);
  try {
    return new Shell(root, source, await source.index(), options);
  } catch (error) {
    const note = `This could not be opened: ${String(error)}`;
    root.replaceChildren(el("p", { class: "note wait" }, note));
    return undefined;
  }
}

/** A page or an app says in its markup where the data are. */
const root = document.getElementById("regard");
if (root) {
  const written = document.getElementById("regard-index");
  const source = written
    ? new PageSource(
        JSON.parse(written.textContent ?? "") as Index,
        (id) => document.getElementById(id)?.textContent ?? "",
      )
    : new AppSource(root.dataset["base"] ?? "./");
  // What is shown inside a notebook's cell has no address of its own.
  void mount(root, source, { address: location.protocol !== "about:" });
}

/** A notebook gives an element and a model: see anywidget. */
export default {
  render({ model, el: place }: { model: Model; el: HTMLElement }): () => void {
    const source = new WidgetSource(model);
    // A notebook may take away what is set on its own element.
    const room = el("div");
    room.style.height = `${Number(model.get("height")) || 640}px`;
    place.append(room);
    const known = () => model.get("view") as Partial<State>;
    const shell = mount(room, source, {
      address: false,
      view: known(),
      changed: (view) => {
        model.set("view", { ...view });
        model.save_changes();
      },
    });
    const moved = () => void shell.then((made) => made?.show(known()));
    model.on("change:view", moved);
    return () => {
      model.off("change:view", moved);
      source.close();
    };
  },
};
