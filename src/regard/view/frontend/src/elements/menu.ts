/** A button that opens a list of actions. */

import { el } from "./element";

export interface MenuItem {
  name: string;
  about: string;
  /** What it does; while it lasts, the menu says so, and an Escape ends it. */
  act: (signal: AbortSignal) => Promise<void> | void;
}

export class Menu {
  readonly root: HTMLElement;
  private list = el("div", { class: "list", role: "menu", hidden: true });
  private note = el("span", { class: "note", role: "status" });
  private button: HTMLButtonElement;
  private acting: AbortController | null = null;

  constructor(label: string, items: MenuItem[]) {
    this.button = el("button", { "aria-haspopup": "menu", "aria-expanded": "false" }, label);
    this.list.setAttribute("aria-label", label);
    this.list.append(
      ...items.map((item) =>
        el(
          "button",
          { role: "menuitem", tabindex: "-1", onclick: () => void this.run(item) },
          el("span", { class: "name" }, item.name),
          el("span", { class: "about" }, item.about),
        ),
      ),
    );
    this.root = el("div", { class: "menu" }, this.button, this.list, this.note);
    this.button.addEventListener("click", () => this.open(Boolean(this.list.hidden)));
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.root.addEventListener("focusout", (event) => {
      if (!this.root.contains(event.relatedTarget as Node | null)) this.open(false);
    });
  }

  private get items(): HTMLElement[] {
    return [...this.list.children] as HTMLElement[];
  }

  private open(open: boolean): void {
    this.list.hidden = !open;
    this.button.setAttribute("aria-expanded", String(open));
    if (open) this.items[0]?.focus();
  }

  private key(event: KeyboardEvent): void {
    const { items } = this;
    const now = items.indexOf(document.activeElement as HTMLElement);
    const to = (at: number) => items[(at + items.length) % items.length]?.focus();
    if (event.key === "Escape") {
      this.acting?.abort();
      this.open(false);
      this.button.focus();
    } else if (event.key === "ArrowDown" && this.list.hidden) this.open(true);
    else if (event.key === "ArrowDown") to(now + 1);
    else if (event.key === "ArrowUp" && !this.list.hidden) to(now - 1);
    else if (event.key === "Home") to(0);
    else if (event.key === "End") to(-1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  private async run({ name, act }: MenuItem): Promise<void> {
    this.acting?.abort();
    const acting = (this.acting = new AbortController());
    this.button.focus();
    this.open(false);
    this.note.textContent = `${name} …`;
    try {
      await act(acting.signal);
      this.note.textContent = "";
    } catch (error) {
      const stopped = acting.signal.aborted;
      this.note.textContent = stopped ? "" : `${name} failed: ${String(error)}`;
    }
  }
}
