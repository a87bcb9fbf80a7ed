/** A set of choices of which one holds: radio buttons that look like one switch. */

import { el } from "./element";

export function choice<T extends string>(
  label: string,
  options: [T, string, string?][],
  now: T,
  pick: (value: T) => void,
): HTMLElement {
  const name = `choice-${Math.random().toString(36).slice(2)}`;
  const boxes = options.map(([value, text, title]) => {
    const box = el("input", { type: "radio", name, value, checked: value === now });
    box.addEventListener("change", () => pick(value));
    return el("label", { title }, box, el("span", {}, text));
  });
  return el("fieldset", { class: "choice" }, el("legend", {}, label), ...boxes);
}
