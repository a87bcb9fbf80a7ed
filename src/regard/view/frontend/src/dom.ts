/** Elements. Text only ever enters as text. */

type Child = Node | string | null | undefined | false;
type Given = Record<string, unknown>;

export function el<K extends keyof HTMLElementTagNameMap>(
  name: K,
  given: Given = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value as EventListener);
    else if (key === "class") made.className = String(value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children) if (child) made.append(child);
  return made;
}

const HIDDEN =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/gu;

/** A token with everything that is no visible character spelled out, cut to a length. */
export function spelled(token: string, longest = 40): string {
  const cut = token.slice(0, 4 * longest);
  const shown = cut
    .replace(HIDDEN, (sign) => {
      const code = sign.codePointAt(0)!;
      if (sign === "\n") return "↵";
      if (sign === "\t") return "⇥";
      if (code < 32) return String.fromCodePoint(0x2400 + code);
      return `\\u${code.toString(16).padStart(4, "0")}`;
    })
    .replace(/^ /, "␣")
    .replace(/ $/, "␣");
  const signs = [...shown];
  const whole = signs.length <= longest && cut.length === token.length;
  return whole ? shown || "∅" : signs.slice(0, longest - 1).join("") + "…";
}

/** A set of choices of which one holds: radio buttons that look like one switch. */
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

/** What an element is called in its root, also when it is made anew. */
function called(node: Element): string {
  const { place, key } = (node as HTMLElement).dataset;
  const value = node instanceof HTMLInputElement ? node.value : node.textContent;
  return [node.tagName, node.id || (place ? `#${place}` : (key ?? value))].join();
}

/** Fill a root anew; what had the focus in it has it again. */
export function refill(root: HTMLElement, ...children: Child[]): void {
  const now = document.activeElement;
  const name = now && root.contains(now) ? called(now) : null;
  root.replaceChildren(...children.filter((child): child is Node | string => Boolean(child)));
  if (name === null) return;
  const all = root.querySelectorAll<HTMLElement>("button, input, select, canvas[tabindex]");
  [...all].find((node) => called(node) === name)?.focus();
}

export function download(name: string, content: Blob): void {
  const url = URL.createObjectURL(content);
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
