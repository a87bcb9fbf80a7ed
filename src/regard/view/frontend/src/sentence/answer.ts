/** The caption of what is shown, and the words that are looked at most; it stays in sight. */

import { strip } from "../drawing/legend";
import { el } from "../elements/element";
import { aboutKind } from "./badge_words";
import {
  asideNote,
  LEAST,
  pairSentence,
  quoted,
  sentence,
  share,
  type Looks,
  type Texts,
} from "./caption";

export interface Shown {
  name: string;
  /** Undefined while it is not known. */
  badge: string | undefined;
  texts: Texts;
  looks: Looks | null;
  /** The key of a pair that is held or pointed at. */
  key: number | null;
  pinned: boolean;
  /** The weight of the darkest colour. */
  high: number;
  theme: "light" | "dark";
}

/** Room that is kept for it. */
const TALL = 176;

export class Answer {
  readonly root = el("div", { class: "answer" });
  private caption = el("p", { class: "caption", "aria-live": "polite" });
  private targets = el("ol", { class: "targets" });
  private note = el("p", { class: "note" });
  private legend = el("div", { class: "scale" });
  private strips = new Map<string, HTMLElement>();

  constructor(
    private hold: (key: number) => void,
    private map: () => void,
    private unpin: () => void,
    /** Tells how a weight comes about, where somebody can. */
    private learn: ((key: number) => void) | null,
  ) {
    this.root.append(
      this.caption,
      this.targets,
      el("div", { class: "foot" }, this.note, this.legend),
    );
  }

  get tall(): number {
    return Math.max(TALL, this.root.offsetHeight);
  }

  fail(why: string): void {
    this.caption.replaceChildren(el("span", { class: "bad" }, `This could not be read: ${why}`));
  }

  show(told: Shown): void {
    const { name, badge, texts, looks, key } = told;
    const words = looks
      ? key === null
        ? sentence(texts, looks)
        : pairSentence(texts, looks, key)
      : aboutKind(badge ?? "");
    this.caption.replaceChildren(
      el("strong", {}, name),
      badge ? " · " : "",
      badge ? el("span", { class: "badge", "data-badge": badge }, badge) : "",
      ": ",
      el("bdi", {}, words),
    );
    this.targets.replaceChildren(...(looks ? this.items(told, looks) : []));
    this.targets.hidden = !looks?.strongest.length;
    this.note.replaceChildren(
      ...(looks ? [asideNote(texts, looks), " "] : []),
      ...(told.pinned ? this.pinNote() : ["Click a word to pin it; arrow keys move."]),
      ...this.why(told),
    );
    this.legend.replaceChildren(
      el("span", {}, "0"),
      this.strip(told.theme),
      el("span", {}, looks ? share(told.high) : ""),
    );
  }

  /** The colours, which are drawn once. */
  private strip(theme: "light" | "dark"): HTMLElement {
    let found = this.strips.get(theme);
    if (!found) this.strips.set(theme, (found = strip(theme)));
    return found;
  }

  private why({ looks, key }: Shown): HTMLElement[] {
    const at = key ?? looks?.strongest[0];
    const { learn } = this;
    if (!looks || at === undefined || !learn) return [];
    const text = `Why ${share(looks.line.weights[at]!)}?`;
    return [el("button", { class: "plain", onclick: () => learn(at) }, text)];
  }

  private pinNote(): HTMLElement[] {
    return [
      el("button", { class: "plain", onclick: this.unpin }, "Unpin (Esc)"),
      el("button", { class: "plain", onclick: this.map }, "Show this pair on the map"),
    ];
  }

  private items({ texts, key }: Shown, { strongest, line }: Looks): HTMLElement[] {
    const shown = strongest.filter((at, i) => !i || line.weights[at]! >= LEAST);
    const most = Math.max(...shown.map((at) => line.weights[at]!), 1e-9);
    return shown.map((at) => {
      const weight = line.weights[at]!;
      const item = el(
        "button",
        {
          title: "Pin this pair",
          "data-place": at,
          "aria-pressed": key === at ? "true" : undefined,
          onclick: () => this.hold(at),
        },
        el("bdi", { class: "token" }, quoted(texts.keys, at)),
        el("span", { class: "place" }, `#${at}`),
        el(
          "span",
          { class: "meter", "aria-hidden": "true" },
          el("span", { style: `width:${(100 * weight) / most}%` }),
        ),
        el("span", { class: "figure" }, share(weight)),
      );
      return el("li", {}, item);
    });
  }
}
