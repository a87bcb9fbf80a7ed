/** The home: the words, what one of them looks at, and what each head does. */

import { el } from "../elements/element";
import { headName } from "../selection/layer_names";
import type { State } from "../selection/view_state";
import { seenBy, type Source } from "../sources/source";
import type { Index, MapInfo } from "../sources/wire_format";
import { Answer } from "./answer";
import { BadgeGrid, type HeadPlace } from "./badge_grid";
import { example, looksOf, type Looks, type Texts } from "./caption";
import { HeadRows } from "./head_rows";
import { Passage, sidesOf, textsOf, WINDOW } from "./passage";

/** Of a long text, the word that is asked about before one is: on the first screen. */
const FIRST = 60;

export class SentenceView {
  readonly root = el("section", { class: "sentence", "aria-label": "Sentence" });
  /** A place beside the sentence for what else is told of it. */
  readonly beside = el("div", { class: "beside" });
  private passage = new Passage();
  private answer: Answer;
  private grid: BadgeGrid;
  private rows: HeadRows;
  private room = el("div", { class: "room" });
  private turn = el("nav", { class: "turn", "aria-label": "Parts of the text", hidden: true });
  private filled = "";
  private start = 0;
  private hovered: number | null = null;
  private touched: number | null = null;
  private previewed: HeadPlace | null = null;
  private asking: AbortController | null = null;

  constructor(
    source: Source,
    private index: Index,
    private state: () => State,
    private change: (part: Partial<State>) => void,
    private theme: () => "light" | "dark",
    jump: (query: number, key: number) => void,
  ) {
    this.rows = new HeadRows(source, index.maps);
    this.grid = new BadgeGrid(source, index.maps, {
      preview: (place) => this.preview(place),
      choose: ({ map, head }) => this.change({ map, head, set: [] }),
      told: () => void this.update(),
    });
    this.answer = new Answer(
      (key) => this.hold(key),
      () => jump(this.state().picked[0]!, this.state().picked[1]!),
      () => this.change({ picked: [] }),
      source.kind === "app" ? (key) => this.learn(key) : null,
    );
    this.room.append(this.passage.root);
    this.root.append(
      el("div", { class: "reads" }, this.turn, this.room, this.answer.root),
      el("aside", { class: "about", "aria-label": "What heads do" }, this.grid.root, this.beside),
    );
    this.listen();
    new ResizeObserver(() => this.fit()).observe(this.root);
  }

  private get map(): MapInfo {
    return this.index.maps[this.state().map]!;
  }

  private texts(map: MapInfo): Texts {
    return textsOf(this.index, map);
  }

  private get pinned(): number | null {
    return this.state().picked[0] ?? null;
  }

  show(): void {
    const { map, head } = this.state();
    const { queries, keys, queryText, keyText } = this.map;
    const name = [queryText, keyText, queries, keys].join();
    if (this.filled !== name) {
      this.filled = name;
      this.touched = this.hovered = null;
      this.start = this.pinned === null ? 0 : this.near(this.pinned);
      this.fill();
      void this.grid.read(map);
    } else if (this.pinned !== null && !this.passage.word(this.pinned)) {
      this.start = this.near(this.pinned);
      this.fill();
    }
    this.grid.show({ map, head });
    void this.update();
  }

  close(): void {
    this.grid.close();
    this.asking?.abort();
  }

  /** Keys of the whole page, and of a word: whether one was meant for the sentence. */
  key(event: KeyboardEvent): boolean {
    const target = event.target as HTMLElement;
    if (event.key === "Escape" && this.pinned !== null) {
      this.change({ picked: [] });
      return true;
    }
    const word = target.closest<HTMLElement>(".said .word");
    if (!word && target !== document.body) return false;
    const from = word ? placeOf(word) : (this.pinned ?? this.touched ?? this.start);
    const to = this.step(event.key, from);
    if (to === null) return false;
    this.focus(to);
    if (this.pinned !== null) void this.pin(to);
    return true;
  }

  private step(key: string, from: number): number | null {
    const ends: Record<string, number> = { Home: 0, End: this.map.queries - 1 };
    const steps: Record<string, number> = { ArrowLeft: -1, ArrowRight: 1 };
    if (ends[key] !== undefined) return ends[key];
    const to = steps[key] === undefined ? this.line(key, from) : from + steps[key];
    return to !== null && to >= 0 && to < this.map.queries ? to : null;
  }

  /** The nearest word of the line above or below. */
  private line(key: string, from: number): number | null {
    const down = { ArrowUp: -1, ArrowDown: 1 }[key];
    const here = this.passage.word(from)?.getBoundingClientRect();
    if (!down || !here) return null;
    let best: [number, number] | null = null;
    let row: number | null = null;
    for (let at = from + down; ; at += down) {
      const word = this.passage.word(at)?.getBoundingClientRect();
      if (!word) break;
      if (Math.abs(word.top - here.top) < 4) continue;
      row ??= word.top;
      if (Math.abs(word.top - row) >= 4) break;
      const far = Math.abs(word.left - here.left);
      if (!best || far < best[1]) best = [at, far];
    }
    return best && best[0];
  }

  private focus(at: number): void {
    if (!this.passage.word(at)) {
      this.start = this.near(at);
      this.fill();
    }
    this.passage.word(at)?.focus();
  }

  private near(at: number): number {
    return Math.floor(Math.max(0, Math.min(at - WINDOW / 2, this.map.queries - WINDOW)));
  }

  private fill(): void {
    const { map } = this;
    this.passage.fill(...sidesOf(this.texts(map), map), this.start);
    const stop = Math.min(map.queries, this.start + WINDOW);
    this.turn.hidden = map.queries <= WINDOW;
    const turn = (by: number, text: string, off: boolean) => {
      const onclick = () => {
        this.start = Math.max(0, Math.min(this.start + by, map.queries - WINDOW));
        this.fill();
        void this.update();
      };
      return el("button", { disabled: off, onclick }, text);
    };
    this.turn.replaceChildren(
      turn(-WINDOW, "← Earlier", this.start <= 0),
      el("span", {}, `${this.start}–${stop - 1} of ${map.queries}`),
      turn(WINDOW, "Later →", stop >= map.queries),
    );
    this.fit();
  }

  private fit(): void {
    if (!this.root.clientWidth) return;
    const { clientWidth, clientHeight } = this.root;
    this.passage.fit(clientWidth, clientHeight - this.answer.tall);
  }

  private preview(place: HeadPlace | null): void {
    this.previewed = place;
    void this.update();
  }

  /** Ask about a word, and show what comes; what was asked before is forgotten. */
  private async update(): Promise<void> {
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    const { map, head } = this.state();
    const place = this.previewed ?? { map, head };
    const of = this.index.maps[place.map]!;
    const name = [of.queryText, of.keyText, of.queries, of.keys].join();
    // A head over another text has no place on these words.
    if (name !== this.filled) return this.tell(place, null);
    try {
      const query = await this.asker(place);
      if (asking.signal.aborted) return;
      const line =
        this.rows.at(place.map, place.head, query) ??
        (await this.rows.row(place.map, place.head, query, asking.signal));
      if (asking.signal.aborted) return;
      this.tell(place, looksOf(this.texts(of), query, line));
    } catch (error) {
      if (!asking.signal.aborted) this.answer.fail(String(error));
    }
  }

  /** The word that is asked about: what is pinned, or pointed at, or shows best what a head does. */
  private async asker(place: HeadPlace): Promise<number> {
    const { queries, keys } = this.index.maps[place.map]!;
    const asked = this.pinned ?? this.hovered ?? this.touched;
    if (asked !== null && asked < queries) return asked;
    if (!this.rows.short(place.map)) return Math.min(this.start + FIRST, queries - 1);
    const all = await this.rows.all(place.map, place.head);
    const texts = this.texts(this.index.maps[place.map]!);
    return example(texts, this.grid.badge(place) ?? "", all, keys);
  }

  private tell(place: HeadPlace, looks: Looks | null): void {
    const { map, head, picked } = this.state();
    const of = this.index.maps[place.map]!;
    const pinned = looks !== null && looks.query === this.pinned;
    const own = place.map === map && place.head === head;
    const held = pinned && own ? (picked[1] ?? null) : null;
    const painted = looks && { looks, seen: seenBy(of, looks.query), held, pinned };
    const high = this.passage.paint(painted, this.theme());
    const over = pinned && this.hovered !== null && this.hovered !== looks.query;
    this.answer.show({
      name: headName(this.index.maps, place.map, place.head),
      badge: this.grid.badge(place),
      texts: this.texts(of),
      looks,
      key: over ? this.hovered : held,
      pinned,
      high,
      theme: this.theme(),
    });
    this.root.dataset["asked"] = looks ? String(looks.query) : "";
    this.root.dataset["shown"] = `${place.map}.${place.head}`;
  }

  /** Hold a word, and the pair with what it looks at most. */
  private async pin(query: number): Promise<void> {
    const { map, head } = this.state();
    const line = await this.rows.row(map, head, query, new AbortController().signal);
    const { strongest } = looksOf(this.texts(this.map), query, line);
    this.change({ picked: [query, strongest[0] ?? 0] });
  }

  /** Hold another key of the word that is asked about. */
  private hold(key: number): void {
    const query = Number(this.root.dataset["asked"]);
    this.change({ picked: [query, key] });
    this.passage.word(key)?.scrollIntoView({ block: "nearest" });
  }

  /** How the weight that is told of comes about. */
  private learn(key: number): void {
    const { asked, shown } = this.root.dataset;
    const [map, head] = shown!.split(".").map(Number);
    this.change({ view: "learn", map, head, picked: [Number(asked), key], step: 0 });
  }

  private listen(): void {
    const { root } = this.passage;
    const at = (event: Event): number | null => {
      const word = (event.target as HTMLElement).closest<HTMLElement>(".word");
      const side = word?.closest<HTMLElement>(".said")?.dataset["side"];
      return word && (side === "query" || this.pinned !== null) ? placeOf(word) : null;
    };
    const point = (place: number | null) => {
      if (place === this.hovered) return;
      this.hovered = place;
      if (place !== null && this.pinned === null) this.touched = place;
      void this.update();
    };
    root.addEventListener("pointerover", (event) => point(at(event) ?? this.hovered));
    root.addEventListener("pointerleave", () => point(null));
    root.addEventListener("focusin", (event) => {
      const word = (event.target as HTMLElement).closest<HTMLElement>(".word")!;
      for (const each of root.querySelectorAll<HTMLElement>(".word[tabindex='0']"))
        if (each.parentElement === word.parentElement) each.tabIndex = -1;
      word.tabIndex = 0;
      point(at(event));
    });
    root.addEventListener("focusout", () => point(null));
    root.addEventListener("click", (event) => {
      const word = (event.target as HTMLElement).closest<HTMLElement>(".word");
      if (!word) return;
      const place = placeOf(word);
      if (word.closest<HTMLElement>(".said")!.dataset["side"] === "key") this.hold(place);
      else if (place === this.pinned) this.change({ picked: [] });
      else void this.pin(place);
    });
  }
}

const placeOf = (word: HTMLElement) => Number(word.dataset["place"]);
