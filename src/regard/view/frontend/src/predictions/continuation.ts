/** Let the model go on from a place: token by token, until it ends or is stopped. */

import { percent } from "../drawing/number_format";
import { el } from "../elements/element";
import type { Foreteller } from "../sources/prediction";

export class Continuation {
  readonly root: HTMLFormElement;
  private tokens = input("regard-more", { min: 1, max: 2000, step: 1, value: 20 });
  private temperature = input("regard-temperature", { min: 0, max: 10, step: 0.1, value: 0.8 });
  private seed = input("regard-seed", { min: 0, step: 1, value: 0 });
  private go = el("button", { type: "submit" }, "Go on");
  private out = el("p", { class: "written", hidden: true });
  private note = el("p", { class: "note", role: "status", hidden: true });
  private running: AbortController | null = null;

  constructor(
    private source: Foreteller,
    private asked: () => { at: number; off: string },
  ) {
    this.root = el(
      "form",
      { class: "goes-on", "aria-label": "Let the model go on" },
      el("label", { for: "regard-more" }, "Continue for"),
      this.tokens,
      el("span", {}, "tokens"),
      el("span", {}, el("label", { for: "regard-temperature" }, "temperature "), this.temperature),
      el("span", {}, el("label", { for: "regard-seed" }, "seed "), this.seed),
      this.go,
      this.out,
      this.note,
    );
    this.root.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else void this.begin();
    });
  }

  stop(): void {
    this.running?.abort();
  }

  /** What was written is of another text. */
  clear(): void {
    this.stop();
    this.out.replaceChildren();
    this.out.hidden = this.note.hidden = true;
  }

  private say(text: string): void {
    this.note.textContent = text;
    this.note.hidden = !text;
  }

  private async begin(): Promise<void> {
    const running = (this.running = new AbortController());
    const how = {
      ...this.asked(),
      tokens: Math.trunc(Number(this.tokens.value)),
      temperature: Number(this.temperature.value),
      seed: Math.trunc(Number(this.seed.value)),
    };
    this.go.textContent = "Stop";
    this.out.replaceChildren();
    this.out.hidden = false;
    this.say("");
    let many = 0;
    let ended = false;
    try {
      for await (const { token, probability, ends } of this.source.continuation(
        how,
        running.signal,
      )) {
        if (running.signal.aborted) break;
        many++;
        ended = ends;
        const title = percent(probability);
        this.out.append(ends ? el("span", { class: "note" }, " ∎") : el("span", { title }, token));
        this.out.scrollTop = this.out.scrollHeight;
      }
      if (running.signal.aborted) this.say(`Stopped after ${many} tokens.`);
      else this.say(ended ? "The model ended the text." : "");
    } catch (error) {
      if (running.signal.aborted) this.say(`Stopped after ${many} tokens.`);
      else this.say(error instanceof Error ? error.message : String(error));
    } finally {
      if (this.running === running) this.running = null;
      this.go.textContent = "Go on";
      this.out.hidden = !many;
    }
  }
}

function input(id: string, given: Record<string, number>): HTMLInputElement {
  return el("input", { id, type: "number", inputmode: "decimal", ...given });
}
