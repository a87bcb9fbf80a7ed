/** Where the page and the notebook start: the same front end, with nobody to read other texts. */

import { el } from "./elements/element";
import type { State } from "./selection/view_state";
import { mount } from "./shell/mount";
import { PageSource } from "./sources/page_source";
import { WidgetSource, type Model } from "./sources/widget_source";
import type { Index } from "./sources/wire_format";
import { laterFrom, laterIn } from "./stage/later_part";

/** A page holds its data, and the later part of the program, as text. */
const held = (id: string) => document.getElementById(id)?.textContent ?? "";
const root = document.getElementById("regard");
if (root && document.getElementById("regard-index"))
  void mount(root, new PageSource(JSON.parse(held("regard-index")) as Index, held), {
    // What is shown inside a notebook's cell has no address of its own.
    address: location.protocol !== "about:",
    later: () => laterIn(held("regard-later")),
  });

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
      later: async () => {
        const address = URL.createObjectURL(await source.program("later"));
        return laterFrom(address).finally(() => URL.revokeObjectURL(address));
      },
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
