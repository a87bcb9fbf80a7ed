/** The frame around all views: tabs, the choice of a head, keys, theme and address. */

import { CompareView } from "../compare/compare_view";
import { legendNodes } from "../drawing/legend";
import { el } from "../elements/element";
import { roving } from "../elements/roving";
import { Menu } from "../elements/menu";
import { HeadGrids } from "../heads/head_grids";
import { HeadTable } from "../heads/head_table";
import { Overview } from "../heads/overview";
import { Gallery } from "../gallery/gallery";
import { pressKey } from "../map/keyboard";
import { mapFiles } from "../map/map_files";
import { legendOf, type MapStatus } from "../map/map_legend";
import { choices, facts } from "../map/map_options";
import { MapView } from "../map/map_view";
import { PictureView } from "../picture/picture_view";
import { PredictionsPanel } from "../predictions/predictions_panel";
import { ReadingBar } from "../reading/reading_bar";
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
import { AppSource } from "../sources/app_source";
import type { Source } from "../sources/source";
import type { Index, MapInfo } from "../sources/wire_format";
import { SentenceView } from "../sentence/sentence_view";
import { TextView } from "../text/text_view";
import { TourView } from "../tour/tour_view";
import { Address } from "./address";

const TITLES: Record<View, string> = {
  sentence: "Sentence",
  map: "Map",
  compare: "Compare",
  picture: "Picture",
  overview: "Overview",
  text: "Text",
  grids: "Grids",
  heads: "Heads",
  learn: "Learn",
};
const THEME = "regard-theme";
/** Tokens up to which the sentence is what is seen first; of longer texts it is the map. */
const HOME = 5000;
/** Tokens up to which colours are the weight itself. */
const LINEAR = 200;
const KEYS =
  "Drag or arrow keys: pan. Wheel or +\u00a0−: zoom. 0: all. [\u00a0]: head. {\u00a0}: layer. Shift\u00a0+\u00a0arrows: read cells. Enter: sentence.";

export interface Options {
  /** Keep the view in the address of the page. */
  address: boolean;
  /** A view to start from, and who is told when it changes. */
  view?: Partial<State>;
  changed?: (view: State) => void;
}

export class Shell {
  private state: State;
  /** Made, like the six below it, where the index has maps. */
  private mapView!: MapView;
  private sentence!: SentenceView;
  private compare!: CompareView;
  private text!: TextView;
  private overview!: Overview;
  private picture!: PictureView;
  private tour!: TourView;
  private gallery: Gallery | null = null;
  private bar!: ReadingBar;
  private saving!: Menu;
  private grids!: HeadGrids;
  private heads!: HeadTable;
  private says: PredictionsPanel | null = null;
  private model = el("span", { class: "model" });
  private stage = el("main", { class: "stage" });
  private side = el("aside", { class: "side", "aria-label": "How the map is drawn" });
  private legend = el("div", { class: "legend" });
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
    if (source instanceof AppSource)
      this.gallery = new Gallery(
        () => source.gallery(),
        (one) => void this.bar.example(one, () => this.change(read(one.address, this.defaults))),
      );
    this.open(index);
    if (source instanceof AppSource)
      this.says = new PredictionsPanel(source, (part) => this.change(part));
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
      source instanceof AppSource ? this.reading(source) : "",
      el("div", { class: "body" }, this.stage, this.side, this.says?.root),
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
    const { source } = this;
    if (this.index !== index && this.index.maps.length) {
      this.mapView.close();
      this.sentence.close();
      this.compare.leave();
    }
    this.index = index;
    this.model.title = this.model.textContent = index.model;
    const state = () => this.state;
    const theme = () => this.theme;
    const change = (part: Partial<State>, quiet?: boolean) => this.change(part, quiet);
    this.grids = new HeadGrids(index, state, change, theme);
    this.heads = new HeadTable(source, index, change);
    if (!index.maps.length) return;
    this.mapView = new MapView(
      source,
      index,
      state,
      change,
      (status) => this.explain(status),
      theme,
    );
    const jump = (query: number, key: number) => {
      const { set, head } = this.state;
      this.change({ view: "map", head: set.length === 1 ? set[0]! : head, picked: [query, key] });
      requestAnimationFrame(() => this.mapView.show(query, key));
    };
    this.sentence = new SentenceView(source, index, state, change, theme, jump);
    this.compare = new CompareView(source, index, state, change, theme);
    this.text = new TextView(source, index, state, change, theme, jump);
    this.tour = new TourView(source, index, state, change, this.gallery?.root ?? null);
    this.saving = new Menu("Save …", mapFiles(this.mapView, index, source, state));
    this.picture = new PictureView(source, index, state, change);
    this.overview = new Overview(source, index, state, change, theme);
  }

  /** The place to type another text in, which then takes the place of this one. */
  private reading(source: AppSource): HTMLElement {
    let opening: Promise<void> | null = null;
    const again = (): Promise<void> =>
      (opening ??= this.reopen().finally(() => {
        opening = null;
      }));
    const show = (map: number, head: number) => this.change({ map, head, set: [], layers: "one" });
    const read = (edition: number | undefined) => {
      source.turn(edition);
      return opening ? opening.then(again, again) : again();
    };
    const bar = (this.bar = new ReadingBar(source, read, show, source.fresh));
    // Where the app has gone, what is asked next says so.
    source.outdated = () =>
      void again()
        .then(() => bar.renew())
        .catch(() => {});
    return bar.root;
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
    const { maps, summaries } = this.index;
    const mapped = maps.length > 0;
    const there: Record<View, boolean> = {
      sentence: SentenceView.of(this.index),
      compare: CompareView.of(this.index, this.source),
      map: mapped,
      picture: PictureView.of(this.index),
      overview: mapped,
      text: mapped,
      grids: summaries.length > 0,
      heads: true,
      learn: TourView.of(this.source, this.index),
    };
    return (Object.keys(TITLES) as View[]).filter((view) => there[view]);
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
    const views = {
      sentence: this.sentence,
      compare: this.compare,
      map: this.mapView,
      picture: this.picture,
      overview: this.overview,
      text: this.text,
      grids: this.grids,
      heads: this.heads,
      learn: this.tour,
    };
    if (this.stage.firstChild !== views[view].root) {
      this.stage.replaceChildren(views[view].root);
      for (const each of [this.compare, this.overview, this.heads])
        if (each !== views[view]) each?.leave();
    }
    this.side.hidden = view !== "map";
    if (view === "map" && this.map) {
      this.renderSide(this.map);
      this.mapView.point(null);
      this.mapView.draw();
    } else if (view !== "map") void views[view].show();
    this.says?.show(this.state, this.index);
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

  private renderSide(map: MapInfo): void {
    const focused = document.activeElement as HTMLInputElement | null;
    const again = focused?.closest(".side") ? focused.value : null;
    const { mapView } = this;
    this.side.replaceChildren(
      this.legend,
      ...choices(this.state, this.index.quantities, (part) => this.change(part)),
      el(
        "div",
        { class: "buttons", role: "group", "aria-label": "Zoom" },
        el("button", { onclick: () => mapView.zoom(1.6), "aria-label": "Zoom in" }, "+"),
        el("button", { onclick: () => mapView.zoom(1 / 1.6), "aria-label": "Zoom out" }, "−"),
        el("button", { onclick: () => mapView.all() }, "Whole text"),
      ),
      facts(map),
      this.saving.root,
      el("p", { class: "note keys" }, KEYS),
    );
    if (again) this.side.querySelector<HTMLElement>(`input[value="${CSS.escape(again)}"]`)?.focus();
  }

  private explain(status: MapStatus): void {
    const legend = legendOf(status, this.state, this.index.quantities);
    this.side.dataset["level"] = String(status.level);
    this.legend.replaceChildren(...legendNodes(legend, status.failed, this.theme));
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
    else if (this.state.view === "map" && (target === document.body || heard(target, event.key)))
      return pressKey(event, this.mapView);
    else if (this.state.view === "sentence" && this.sentence.key(event)) event.preventDefault();
    else return;
    event.preventDefault();
  }
}

/** Whether a key that was pressed on a control is none of its own. */
function heard(control: HTMLElement, key: string): boolean {
  if (control.closest("canvas, [role='menu'], .words")) return false;
  return control.closest("input") ? "+=-0".includes(key) : key !== "Enter" && key !== " ";
}
