/** Type a text, choose who reads it, see how far that is, and stop it. */

import { el } from "../elements/element";
import { roving } from "../elements/roving_tabindex";
import type {
  Example,
  ExampleRequest,
  Reader,
  ReaderStatus,
  ReadingProgress,
  ReadingRequest,
} from "../sources/reader";

const OFTEN = 150;
const TALL = 160;
const KINDS: Record<string, [string, string]> = {
  induction: ["Induction", "Looks at what followed, the last time this token was there"],
  alignment: ["Alignment", "Looks at the token that is being written in other words"],
  previous: ["Previous token", "Looks at the token before"],
  first: ["First token", "Looks at the first token"],
};
const GONE =
  "the app does not answer\n  do: see whether regard view still runs where it was started";

export class ReadingBar {
  readonly root: HTMLFormElement;
  private text = el("textarea", {
    id: "regard-text",
    rows: 1,
    spellcheck: "false",
    placeholder: "Type a text to look at",
    title: "Enter reads it, Shift + Enter begins a line",
    "aria-label": "Text",
  });
  private model = el("select", { id: "regard-model", "aria-label": "Model", title: "Model" });
  private tokens = el("input", {
    id: "regard-tokens",
    type: "number",
    min: 0,
    max: 2000,
    step: 1,
    value: 0,
  });
  private go = el("button", { type: "submit", class: "go" }, "Read");
  private status = el("div", { class: "status", hidden: true });
  /** For who does not see the bar: what begins and what ended, not every step. */
  private spoken = el("div", { class: "unseen", role: "status" });
  private error = el("div", { class: "error", role: "alert", hidden: true });
  private wrote = el("p", { class: "note wrote", hidden: true });
  private known = el("div", { class: "known", hidden: true });
  private about = new Map<string, string>();
  /** The text that was read last. */
  private last = "";
  /** What is to be read, while something else still is. */
  private wanted: ReadingRequest | ExampleRequest | null = null;
  private busy = false;
  /** What is done when an example has been read. */
  private then: (() => void) | null = null;

  constructor(
    private reader: Reader,
    private opened: (edition: number | undefined) => Promise<void>,
    private show: (map: number, head: number) => void,
    private fresh: boolean,
  ) {
    this.root = el(
      "form",
      { class: "reading", "aria-label": "Read another text" },
      this.text,
      el(
        "div",
        { class: "how" },
        this.model,
        el("label", { for: "regard-tokens" }, "continue for"),
        this.tokens,
        el("span", { class: "unit", "aria-hidden": "true" }, "tokens"),
        this.go,
      ),
      this.status,
      this.spoken,
      this.error,
      this.wrote,
      this.known,
    );
    this.root.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.begin();
    });
    this.text.addEventListener("input", () => this.grow());
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.root.requestSubmit();
    });
    this.model.addEventListener("change", () => this.explain());
    void this.start();
  }

  /** What was read last, and whether something is being read already. */
  private async start(): Promise<void> {
    try {
      const current = await this.reader.status();
      this.fill(current);
      // Who opens the app meanwhile waits for what is being read; who loads it again keeps theirs.
      if (current.work.state === "running")
        await (this.fresh ? this.follow(current) : this.watch(current));
    } catch (error) {
      this.complain(String(error));
    }
  }

  /** What this window showed is no longer kept: what it shows now is told here too. */
  async renew(): Promise<void> {
    const current = await this.reader.status();
    // What was typed here meanwhile stays.
    const text = this.text.value === this.last ? current.text : this.text.value;
    this.say(current);
    this.typed({ ...current, text });
    this.note("Other windows had texts read, and this one's is no longer kept: this is the last.");
  }

  /** A text as if it had been typed here. */
  private typed({ model, text }: ReaderStatus): void {
    if (this.about.has(model)) this.model.value = model;
    this.text.value = text;
    this.explain();
    this.grow();
  }

  private fill(current: ReaderStatus): void {
    this.about = new Map(current.models.map(({ name, about }) => [name, about]));
    const now =
      current.model && this.about.has(current.model) ? current.model : current.models[0]?.name;
    this.model.replaceChildren(
      ...current.models.map(({ name, about }) =>
        el("option", { value: name, title: about, selected: name === now }, name),
      ),
    );
    if (!this.text.value) this.text.value = current.text;
    this.say(current);
    this.explain();
    this.grow();
  }

  /** What the model wrote, and the heads of which it is known what they do. */
  private say(current: ReaderStatus): void {
    this.known.hidden = !current.heads.length;
    this.known.replaceChildren(
      el("span", { class: "label" }, "What its heads do"),
      ...current.heads.map(({ kind, map, head }) => {
        const [name, about] = KINDS[kind] ?? [kind, ""];
        const go = () => this.show(map, head);
        return el("button", { type: "button", title: about, onclick: go }, name);
      }),
    );
    roving(this.known);
    this.last = current.text;
    this.wrote.hidden = !current.wrote;
    this.wrote.replaceChildren("Wrote: ", el("bdi", {}, current.wrote));
  }

  private explain(): void {
    this.model.title = this.about.get(this.model.value) ?? "";
  }

  /** As tall as the text, up to a height. */
  private grow(): void {
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(this.text.scrollHeight + 2, TALL)}px`;
  }

  /** Read an example of the gallery; when it is there, it is shown and says what to look at. */
  async example({ name, says }: Example, show: () => void): Promise<void> {
    this.then = () => {
      show();
      this.note(says);
    };
    await this.begin({ example: name });
  }

  /** Read what is typed. What this window had begun to read before that is no longer wanted. */
  private async begin(wanted?: ExampleRequest): Promise<void> {
    this.complain("");
    if (!wanted) this.then = null;
    this.wanted = wanted ?? {
      text: this.text.value,
      model: this.model.value,
      tokens: Math.trunc(Number(this.tokens.value) || 0),
    };
    if (this.busy) {
      await this.reader.stop().catch(() => {});
      return;
    }
    this.busy = true;
    try {
      while (this.wanted) {
        const request: ReadingRequest | ExampleRequest = this.wanted;
        const current = await this.reader.read(request);
        const running = current.work.state === "running";
        if (this.wanted === request && !(current.refused && running)) this.wanted = null;
        if (!current.refused) await this.follow(current);
        // What another window has read is waited for, and not shown here.
        else if (running) await this.watch(current);
        else if (!this.wanted) this.complain(current.refused);
      }
    } catch (error) {
      this.wanted = null;
      const gone = error instanceof TypeError;
      this.complain(gone ? GONE : error instanceof Error ? error.message : String(error));
    } finally {
      this.busy = false;
      this.rest();
    }
  }

  /** Show how far the work is until it ends; then how. */
  private async watch(current: ReaderStatus): Promise<ReaderStatus> {
    const { number } = current.work;
    this.go.disabled = true;
    this.root.setAttribute("aria-busy", "true");
    while (current.work.state === "running" && current.work.number === number) {
      this.progress(current.work);
      await new Promise((next) => setTimeout(next, OFTEN));
      current = await this.reader.status();
    }
    this.rest();
    return current;
  }

  /** Wait for the work of this window, and show what came of it. */
  private async follow(begun: ReaderStatus): Promise<void> {
    const { work } = await this.watch(begun);
    if (this.wanted) return;
    this.complain("");
    // Another window may have begun something before it was seen that this had ended.
    const ended = work.number === begun.work.number ? work.state : "done";
    if (ended === "done") {
      await this.opened(begun.work.edition);
      const current = await this.reader.status();
      this.say(current);
      this.speak("The text was read.");
      if (this.then) this.typed(current);
      this.then?.();
    } else if (ended === "failed") this.complain(work.error ?? "");
    else if (ended === "stopped") this.note("Stopped. What was shown before is still here.");
  }

  private rest(): void {
    this.go.disabled = false;
    this.root.removeAttribute("aria-busy");
    const focused = this.status.contains(document.activeElement);
    if (this.status.querySelector("progress")) this.status.hidden = true;
    if (focused) this.text.focus();
  }

  private speak(text: string): void {
    if (this.spoken.textContent !== text) this.spoken.textContent = text;
  }

  private note(text: string): void {
    this.speak(text);
    this.status.hidden = false;
    this.status.replaceChildren(el("span", {}, text));
  }

  private progress({ doing, done, total, stopping }: ReadingProgress): void {
    const share = total ? `${Math.round((100 * done) / total)}%` : "";
    const many = total ? `${done} of ${total} tokens` : done ? `${done} tokens` : "";
    const text = stopping ? "stopping …" : `${doing} … ${doing === "writing" ? many : share}`;
    this.speak(stopping ? "stopping" : doing);
    let bar = this.status.querySelector("progress");
    if (!bar || this.status.hidden) {
      bar = el("progress", { max: 1, "aria-label": "Progress" });
      this.status.hidden = false;
      this.status.replaceChildren(
        bar,
        el("span", { class: "far" }),
        el(
          "button",
          { type: "button", class: "stop", onclick: () => void this.reader.stop().catch(() => {}) },
          "Stop",
        ),
      );
    }
    if (total) bar.value = done / total;
    else bar.removeAttribute("value");
    this.status.querySelector(".far")!.textContent = text;
    this.status.querySelector<HTMLButtonElement>(".stop")!.disabled = stopping;
  }

  /** An error as the command tells it: what is wrong, then what came, is accepted, and helps. */
  private complain(message: string): void {
    const [problem = "", ...rest] = message.split("\n");
    this.error.hidden = !message;
    const parts = rest.map((line) => /^\s*(got|accepted|do):\s+(.*)$/.exec(line));
    const words: Record<string, string> = { got: "Got", accepted: "Accepted", do: "Try this" };
    this.error.replaceChildren(
      el("strong", {}, problem ? `${problem[0]!.toUpperCase()}${problem.slice(1)}.` : ""),
      ...parts.flatMap((found) =>
        found
          ? [el("span", { class: "label" }, `${words[found[1]!]}`), el("span", {}, found[2]!)]
          : [],
      ),
    );
  }
}
