/** Puts the views into an element. */

import { el } from "../elements/element";
import type { Source } from "../sources/source";
import { Shell, type Options } from "./shell";
import { STYLE } from "./style";

export async function mount(
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
