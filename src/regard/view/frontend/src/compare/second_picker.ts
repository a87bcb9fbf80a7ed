/** What the first head is compared with: a layer and head, and in the app a text and a model. */

import { el } from "../elements/element";
import { pick } from "../selection/layer_picker";
import { layerName } from "../selection/layer_names";
import type { State } from "../selection/view_state";
import type { AppSource } from "../sources/app_source";
import type { Source } from "../sources/source";
import type { Index } from "../sources/wire_format";
import type { Part } from "./difference";
import { readBeside, type Opened } from "./second_text";

/** Whether other texts can be read as well. */
const reads = (source: Source): source is AppSource => "beside" in source;

export class SecondPicker {
  readonly root = el("form", { class: "second", "aria-label": "Compare with" });
  private places = el("span", { class: "where" });
  private text = el("input", { placeholder: "the same text", "aria-label": "Other text" });
  private model = el("select", { "aria-label": "Other model", title: "Model" });
  private opened: [string, Opened] | null = null;
  private asked = false;

  constructor(
    private source: Source,
    private index: Index,
    private change: (part: Partial<State>) => void,
    private tell: (doing: string) => void,
  ) {
    this.root.append(el("span", { class: "label" }, "Compare with"), this.places);
    this.root.addEventListener("submit", (event) => {
      event.preventDefault();
      this.take();
    });
    this.model.addEventListener("change", () => this.take());
  }

  private take(): void {
    this.change({ other: this.text.value.trim(), by: this.model.value, map2: -1, head2: -1 });
  }

  /** Both heads. What somebody has to read first is read. */
  async parts(state: State, signal: AbortSignal): Promise<[Part, Part]> {
    const { map, head, other, by } = state;
    const { source, index } = this;
    await this.offer();
    this.text.value = other;
    this.model.value = by;
    const away = (other || by) && reads(source);
    const there = away ? await this.open(source, other, by, signal) : { source, index };
    const { maps } = there.index;
    const map2 = Math.min(state.map2 < 0 ? map : state.map2, maps.length - 1);
    const { heads } = maps[map2]!;
    // A head is not compared with itself where nothing else differs.
    const next = away || map2 !== map ? head : (head + 1) % heads;
    const head2 = Math.min(state.head2 < 0 ? next : state.head2, heads - 1);
    this.render(there.index, map2, head2);
    return [
      { source, index, map, head },
      { ...there, map: map2, head: head2 },
    ];
  }

  private async open(
    source: AppSource,
    text: string,
    model: string,
    signal: AbortSignal,
  ): Promise<Opened> {
    const name = JSON.stringify([text, model]);
    if (this.opened?.[0] !== name) {
      this.tell("Reading …");
      const told = (doing: string) => this.tell(`Reading the other text: ${doing} …`);
      const opened = await readBeside(source, text, model, told, signal);
      this.opened = [name, opened];
    }
    return this.opened![1];
  }

  private render({ maps }: Index, map: number, head: number): void {
    const layers = maps.map((_, at): [number, string] => [at, layerName(maps, at)]);
    const heads = Array.from({ length: maps[map]!.heads }, (_, at): [number, string] => [
      at,
      `head ${at}`,
    ]);
    const focused = document.activeElement?.id;
    this.places.replaceChildren(
      maps.length > 1
        ? pick("regard-layer2", "Other layer", layers, map, (map2) =>
            this.change({ map2, head2: head }),
          )
        : "",
      heads.length > 1
        ? pick("regard-head2", "Other head", heads, head, (head2) =>
            this.change({ map2: map, head2 }),
          )
        : "",
    );
    if (focused?.endsWith("2")) this.places.querySelector<HTMLElement>(`#${focused}`)?.focus();
  }

  /** Texts and models, where there is a model that read this one. */
  private async offer(): Promise<void> {
    if (this.asked || !reads(this.source)) return;
    this.asked = true;
    const { models, model } = await this.source.status();
    if (!model) return;
    const others = models.filter(({ name }) => name !== model);
    this.model.append(
      el("option", { value: "" }, model),
      ...others.map(({ name, about }) => el("option", { value: name, title: about }, name)),
    );
    this.root.append(this.text, this.model, el("button", {}, "Compare"));
  }
}
