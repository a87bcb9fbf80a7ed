/** What is said of the pair that is pointed at. */

import { exactly, percent } from "../drawing/number_format";
import { spelled } from "../drawing/token_spelling";
import { el } from "../elements/element";
import type { Lens, Point } from "../plot/lens";
import { shown as allowed, type Cell, type Place, type Source } from "../sources/source";
import { SIDE, type Index, type MapInfo, type Tile } from "../sources/wire_format";

const WAIT = 40;
const GAP = 14;
const EDGE = 4;

export class Tooltip {
  readonly root = el("div", { class: "tip", role: "tooltip", hidden: true });
  readonly spoken = el("div", { class: "unseen", "aria-live": "polite" });
  private asking: AbortController | null = null;

  constructor(
    private source: Source,
    private index: Index,
  ) {}

  hide(): void {
    this.asking?.abort();
    this.root.hidden = true;
  }

  /** Say what is at a pair; its exact weight is asked for once the pointer rests. */
  show(point: Point, place: Place, lens: Lens, tile: Tile | null): void {
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    const { map } = lens;
    const exact = el("div", { class: "what" }, " ");
    this.root.replaceChildren(
      el(
        "div",
        { class: "who" },
        this.token(map.queryText, point.query),
        "→",
        this.token(map.keyText, point.key),
      ),
      exact,
      tile && place.level > 0 ? this.around(point, place, tile) : "",
    );
    this.root.hidden = false;
    delete this.root.dataset["weight"];
    this.move(point, lens);
    window.setTimeout(() => {
      if (asking.signal.aborted) return;
      this.source.cell(place, point.query, point.key, asking.signal).then(
        (found) => {
          if (asking.signal.aborted) return;
          exact.textContent = weightText(map, point, found);
          if (found && found.rank !== null) this.root.dataset["weight"] = String(found.weight);
          this.speak(map, point, exact.textContent);
        },
        () => {},
      );
    }, WAIT);
  }

  private word(text: number, at: number): string | undefined {
    return this.index.texts[text]?.[at];
  }

  private token(text: number, at: number): HTMLElement {
    const found = this.word(text, at);
    return el(
      "span",
      { class: "pair" },
      found === undefined ? null : el("bdi", { class: "token" }, spelled(found, 28)),
      el("span", { class: "place" }, `#${at}`),
    );
  }

  /** What is known of the cell that the pair is in. */
  private around(point: Point, place: Place, tile: Tile): HTMLElement {
    const [row, column] = [(point.query >> place.level) % SIDE, (point.key >> place.level) % SIDE];
    const at = row * tile.columns + column;
    const side = 1 << place.level;
    const mean = percent(tile.mean[at]!);
    const most = percent(tile.most[at]!);
    const about = `in this cell of ${side} × ${side} pairs: mean ${mean}, max ${most}`;
    return el("div", { class: "cell" }, about);
  }

  private speak(map: MapInfo, { query, key }: Point, what: string): void {
    const from = spelled(this.word(map.queryText, query) ?? "");
    const to = spelled(this.word(map.keyText, key) ?? "");
    this.spoken.textContent = `${from} ${query} to ${to} ${key}: ${what}`;
  }

  /** Beside the pair, and inside of the plot. */
  private move({ query, key }: Point, lens: Lens): void {
    const x = lens.x(key + 1);
    const y = lens.y(query + 1);
    const { offsetWidth: wide, offsetHeight: high } = this.root;
    const { clientWidth, clientHeight } = this.root.parentElement!;
    const left = x + GAP + wide > clientWidth ? x - lens.zoom - GAP - wide : x + GAP;
    const top = y + GAP + high > clientHeight ? y - lens.zoom - GAP - high : y + GAP;
    const inside = (at: number, size: number, room: number) =>
      Math.max(EDGE, Math.min(at, room - size - EDGE));
    this.root.style.left = `${inside(left, wide, clientWidth)}px`;
    this.root.style.top = `${inside(top, high, clientHeight)}px`;
  }
}

function weightText(map: MapInfo, { query, key }: Point, found: Cell | null): string {
  if (!allowed(map, query, key)) return "masked";
  if (found === null) return "known as part of its cell";
  const { weight, rank } = found;
  if (rank === null) return `at most ${percent(weight, 0)}`;
  return `${exactly(weight)}${weight ? `, rank ${rank}` : ""}`;
}
