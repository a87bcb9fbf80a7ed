/** Examples that show something: a click has one read, and opens the head to look at. */

import { el } from "../elements/element";
import type { Example } from "../sources/reader";

export class Gallery {
  readonly root = el("div", { class: "gallery", hidden: true });
  private status = el("p", { class: "note", role: "status" });

  constructor(
    private examples: () => Promise<Example[]>,
    private open: (example: Example) => void,
  ) {
    this.root.append(
      el("h2", {}, "Gallery"),
      el("p", { class: "note" }, "Each opens the head in which to see it."),
      this.status,
    );
    void this.fill();
  }

  private async fill(): Promise<void> {
    const found = await this.examples().catch(() => []);
    this.root.hidden = !found.length;
    this.root.append(
      el(
        "ul",
        {},
        ...found.map((one) =>
          el(
            "li",
            {},
            el(
              "button",
              { "data-example": one.name, onclick: () => this.choose(one) },
              el("strong", {}, one.title),
              el("span", {}, one.says),
              el("span", { class: "note" }, one.model),
            ),
          ),
        ),
      ),
    );
  }

  private choose(one: Example): void {
    this.status.textContent = `Opening “${one.title}” …`;
    this.open(one);
  }
}
