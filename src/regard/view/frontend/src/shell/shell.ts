/** The frame around all views: tabs, the choice of a head, keys, theme and address. */

import { el } from "../elements/element";
import { roving } from "../elements/roving_tabindex";
import { LayerPicker } from "../selection/layer_picker";
import {
  linked,
  read,
  START,
  write,
  type Defaults,
  type State,
  type View,
} from "../selection/view_state";
import { SentenceView } from "../sentence/sentence_view";
import type { Source } from "../sources/source";
import type { Index, MapInfo } from "../sources/wire_format";
import type { Hands, Panels } from "../stage/panels";
import type { Given, LaterViews, MakeLater, Shown } from "../stage/later_part";
import { Address } from "./address";
import { TITLES, viewsOf } from "./view_list";

const THEME = "regard-theme";
/** Tokens up to which the sentence is what is seen first; of longer texts it is the map. */
const HOME = 5000;
/** Tokens up to which colours are the weight itself. */
const LINEAR = 200;
export interface Options {
  /** Keep the view in the address of the page. */
  address: boolean;
  /** Loads the views that are not needed first. */
  later: () => Promise<MakeLater>;
  /** Made where other texts can be read. */
  panels?: (hands: Hands) => Panels;
  /** A view to start from, and who is told when it changes. */
  view?: Partial<State>;
  changed?: (view: State) => void;
}

export class Shell {
  private state: State;
  /** Made where the index has maps. */
  private sentence!: SentenceView;
  private make: MakeLater | null = null;
  private loading: Promise<void> | null = null;
  /** Made of the index when one of them is opened. */
  private later: LaterViews | null = null;
  private shown: Shown | null = null;
  private panels: Panels | null = null;
  private model = el("span", { class: "model" });
  private stage = el("main", { class: "stage" });
  private layerPicker = new LayerPicker();
  private tabs = el("nav", { class: "tabs", "aria-label": "Views" });
  private chosen: "light" | "dark" | null = null;
  private system = window.matchMedia("(prefers-color-scheme: dark)");
  private written = 0;
  private address = new Address();

  constructor(
    private root: HTMLElement,
    private source: Source,
    private index: Index,
    private options: Options,
  ) {
    const address = options.address ? location.hash : "";
    const start = read(address.length > 1 ? address : (index.view ?? ""), this.defaults);
    this.state = this.sound({ ...start, ...options.view });
    try {
      const kept = localStorage.getItem(THEME);
      if (kept === "light" || kept === "dark") this.chosen = kept;
    } catch {
      // A page from disk may have no storage; then the system's theme holds.
    }
    this.open(index);
    this.panels =
      options.panels?.({
        change: (part) => this.change(part),
        visit: (where) => this.change(read(where, this.defaults)),
        reopen: () => this.reopen(),
      }) ?? null;
    root.replaceChildren(
      el(
        "header",
        { class: "top" },
        el(
          "a",
          { class: "skip", href: "#", onclick: (event: Event) => this.skip(event) },
          "Skip to the view",
        ),
        el("h1", { class: "brand" }, "regard"),
        this.tabs,
        this.layerPicker.root,
        this.model,
        el(
          "button",
          {
            class: "icon",
            "aria-label": "Light or dark",
            title: "Light or dark",
            onclick: () => this.flip(),
          },
          "◐",
        ),
      ),
      this.panels?.bar ?? "",
      el("div", { class: "body" }, this.stage, this.panels?.panel),
    );
    this.system.addEventListener("change", () => this.render());
    // A page of its own hears keys wherever they are pressed; a cell of a notebook only its own.
    const ears: HTMLElement | Document = options.address ? document : root;
    ears.addEventListener("keydown", (event) => this.key(event as KeyboardEvent));
    if (options.address)
      window.addEventListener("hashchange", () => {
        if (location.hash.slice(1) === write(this.state, this.defaults)) return;
        this.state = this.sound(read(location.hash, this.defaults));
        this.render();
      });
    this.render();
  }

  /** Views of an index, which are made anew for another one. */
  private open(index: Index): void {
    if (this.index !== index && this.index.maps.length) this.sentence.close();
    this.later?.close();
    this.later = null;
    this.index = index;
    this.model.title = this.model.textContent = index.model;
    if (!index.maps.length) return;
    const { source, state, change, theme, jump } = this.given;
    this.sentence = new SentenceView(source, index, state, change, theme, jump);
  }

  /** What views are made of. */
  private get given(): Given {
    return {
      source: this.source,
      index: this.index,
      state: () => this.state,
      change: (part, quiet) => this.change(part, quiet),
      theme: () => this.theme,
      jump: (query, key) => this.jump(query, key),
      gallery: this.panels?.gallery ?? null,
    };
  }

  private jump(query: number, key: number): void {
    const { set, head } = this.state;
    this.change({ view: "map", head: set.length === 1 ? set[0]! : head, picked: [query, key] });
    void this.load().then(() => requestAnimationFrame(() => this.later?.look(query, key)));
  }

  /** What fills the stage; nothing while it is being loaded. */
  private viewed(view: View): Shown | null {
    if (view === "sentence") return this.sentence;
    if (!this.make) {
      void this.load();
      return null;
    }
    this.later ??= this.make(this.given);
    return this.later.views[view]!;
  }

  /** Load the later part; where that fails, it is tried again when a view is opened again. */
  private load(): Promise<void> {
    return (this.loading ??= this.options.later().then(
      (make) => {
        this.make = make;
        this.render();
      },
      (error: unknown) => {
        this.loading = null;
        this.wait(`This view could not be opened: ${String(error)}`);
      },
    ));
  }

  private wait(note: string): void {
    this.stage.replaceChildren(el("p", { class: "note wait" }, note));
  }

  private async reopen(): Promise<void> {
    const before = this.defaults;
    this.open(await this.source.index());
    const { view, scale } = this.state;
    // What nobody chose is what suits the text.
    if (view === before.view) this.state.view = this.defaults.view;
    if (scale === before.scale) this.state.scale = this.defaults.scale;
    this.state = this.sound(this.state);
    // What was chosen of the model holds for the next text as well; places in the text do not.
    const { query, key, span, token, picked } = START;
    this.change({ query, key, span, token, picked });
  }

  private get theme(): "light" | "dark" {
    const { classList, dataset } = document.body;
    const host = dataset["jpThemeLight"];
    const notebook = host ? host === "false" : classList.contains("vscode-dark");
    return this.chosen ?? (notebook || (!host && this.system.matches) ? "dark" : "light");
  }

  private get map(): MapInfo | undefined {
    return this.index.maps[this.state.map];
  }

  /** What is counted by the layer of a view: maps; layers of which there are numbers, if no maps. */
  private get layers(): { heads: number }[] {
    const { maps, summaries } = this.index;
    return maps.length ? maps : summaries;
  }

  private get views(): View[] {
    return viewsOf(this.index, this.source);
  }

  /** What suits a text: words are read as a sentence, as long as they can be. */
  private get defaults(): Defaults {
    const { maps } = this.index;
    const longest = Math.max(0, ...maps.map(({ queries, keys }) => Math.max(queries, keys)));
    const [first, next] = this.views;
    const view = first === "sentence" && longest > HOME ? next! : first!;
    return { view, scale: longest <= LINEAR ? "linear" : "log" };
  }

  private sound(state: State): State {
    const { layers, views } = this;
    const map = Math.min(state.map, layers.length - 1);
    const head = Math.min(state.head, layers[map]!.heads - 1);
    const quantity = this.index.quantities.some(({ name }) => name === state.quantity)
      ? state.quantity
      : "weight";
    const of = this.index.maps[map];
    const [query, key] = state.picked;
    const there =
      query !== undefined && key !== undefined && of && query < of.queries && key < of.keys;
    const view = views.includes(state.view) ? state.view : this.defaults.view;
    return { ...state, view, map, head, quantity, picked: there ? [query, key] : [] };
  }

  private change(part: Partial<State>, quiet = false): void {
    const before = this.state;
    this.state = this.sound({ ...before, ...linked(part, before) });
    const [moved, now] = [this.index.maps[before.map], this.map];
    if (now?.queries !== moved?.queries || now?.keys !== moved?.keys) this.state.span = 0;
    if (this.options.address) this.address.write(before, this.state, this.defaults);
    if (this.options.changed) {
      clearTimeout(this.written);
      this.written = window.setTimeout(() => this.options.changed?.(this.state), 150);
    }
    if (!quiet) this.render();
  }

  /** Show another view; who asked for it is not told of it. */
  show(view: Partial<State>): void {
    const next = this.sound({ ...this.state, ...view });
    if (write(next, this.defaults) === write(this.state, this.defaults)) return;
    this.state = next;
    this.render();
  }

  private flip(): void {
    this.chosen = this.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(THEME, this.chosen);
    } catch {
      // See above.
    }
    this.render();
  }

  private render(): void {
    const { view } = this.state;
    this.root.dataset["theme"] = this.theme;
    this.root.dataset["view"] = view;
    this.renderTabs();
    if (this.map) this.layerPicker.render(this.index.maps, this.state, (part) => this.change(part));
    // Tables and grids show all heads alike.
    this.layerPicker.root.hidden = !this.map || view === "heads" || view === "grids";
    const shown = this.viewed(view);
    if (shown !== this.shown) {
      this.shown?.leave?.();
      this.shown?.side?.remove();
      this.shown = shown;
      if (shown) this.stage.replaceChildren(shown.root);
      if (shown?.side) this.stage.after(shown.side);
    }
    if (shown) void shown.show();
    else this.wait("Opening …");
    this.panels?.show(this.state, this.index);
  }

  /** Past all that stands above: to the first thing in the view that takes keys. */
  private skip(event: Event): void {
    event.preventDefault();
    const first = this.stage.querySelector<HTMLElement>("[tabindex='0'], button, input, select");
    (first ?? this.stage).focus();
  }

  private renderTabs(): void {
    const focused = document.activeElement?.closest(".tabs") !== null;
    this.tabs.replaceChildren(
      ...this.views.map((view) =>
        el(
          "button",
          {
            "aria-current": view === this.state.view ? "page" : undefined,
            "data-view": view,
            onclick: () => this.change({ view }),
          },
          TITLES[view],
        ),
      ),
    );
    roving(this.tabs, "[aria-current]");
    if (focused) this.tabs.querySelector<HTMLElement>("[aria-current]")?.focus();
  }

  private key(event: KeyboardEvent): void {
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (target.closest(`select, textarea, input:not([type="radio"])`)) return;
    const { map, head } = this.state;
    const step = (now: number, by: number, n: number) => (now + by + n) % n;
    if (event.key === "[" || event.key === "]")
      this.change({
        head: step(head, event.key === "]" ? 1 : -1, this.layers[map]!.heads),
        set: [],
      });
    else if (event.key === "{" || event.key === "}")
      this.change({ map: step(map, event.key === "}" ? 1 : -1, this.layers.length), set: [] });
    else if (!this.shown?.key?.(event)) return;
    event.preventDefault();
  }
}
