/** Find tokens on the map, one after the other. */

import { spelled } from "../drawing/token_spelling";
import { el } from "../elements/element";
import type { Mark } from "../plot/marks";
import type { MapInfo } from "../sources/wire_format";
import { marksOf } from "./token_matches";

export class TokenSearch {
  readonly root: HTMLElement;
  private input = el("input", {
    type: "search",
    id: "regard-find",
    placeholder: "Find a token",
    "aria-label": "Find a token",
    autocomplete: "off",
    spellcheck: "false",
  });
  private status = el("p", { class: "note", role: "status" });
  private steps: HTMLButtonElement[];
  private marks: Mark[] = [];
  private now = 0;

  constructor(
    private texts: string[][],
    private map: () => MapInfo,
    /** Told what was found, and which of it to show. */
    private show: (marks: Mark[], now: Mark | null) => void,
  ) {
    const step = (by: number, name: string, sign: string) =>
      el("button", { "aria-label": name, title: name, onclick: () => this.step(by) }, sign);
    this.steps = [step(-1, "Previous", "↑"), step(1, "Next", "↓")];
    this.root = el(
      "div",
      { class: "find", role: "search" },
      el("div", { class: "row" }, this.input, ...this.steps),
      this.status,
    );
    this.input.addEventListener("input", () => this.search());
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.input.value) {
        this.input.value = "";
        this.search();
      } else if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
      else return;
      event.preventDefault();
    });
    this.showStatus();
  }

  focus(): void {
    this.input.focus();
    this.input.select();
  }

  /** Another map may be over other texts. */
  renew(): void {
    const { map } = this;
    this.root.hidden = !(this.texts[map().queryText] ?? this.texts[map().keyText]);
    if (this.input.value) this.found(this.now);
  }

  private search(): void {
    this.found(0);
    if (this.marks.length) this.show(this.marks, this.marks[0]!);
  }

  private found(now: number): void {
    this.marks = marksOf(this.map(), this.texts, this.input.value);
    this.now = Math.min(now, Math.max(0, this.marks.length - 1));
    this.show(this.marks, null);
    this.showStatus();
  }

  private step(by: number): void {
    const { length } = this.marks;
    if (!length) return;
    this.now = (this.now + by + length) % length;
    this.show(this.marks, this.marks[this.now]!);
    this.showStatus();
  }

  private showStatus(): void {
    const { marks, now, input } = this;
    const mark = marks[now];
    for (const button of this.steps) button.hidden = marks.length < 2;
    this.status.hidden = !input.value.trim();
    if (!mark) {
      this.status.textContent = "Not in this text.";
      return;
    }
    const tokens = this.texts[mark.rows ? this.map().queryText : this.map().keyText]!;
    const words = spelled(
      tokens
        .slice(mark.first, mark.last + 1)
        .join("")
        .trim(),
      24,
    );
    const whose = mark.rows && mark.columns ? "" : mark.rows ? ", a query" : ", a key";
    this.status.textContent = `${now + 1} of ${marks.length}: ${words} #${mark.first}${whose}`;
  }
}
