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
