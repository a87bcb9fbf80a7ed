/** Tokens with their probabilities as bars: as the model is, and below with what is off. */

import { percent } from "../drawing/number_format";
import { spelled } from "../drawing/token_spelling";
import { el } from "../elements/element";
import type { Foretold, Prediction } from "../sources/prediction";

export function bars({ tokens, next, moved }: Prediction): HTMLElement {
  const most = Math.max(
    ...tokens.map(({ before, after }) => Math.max(before.probability, after?.probability ?? 0)),
  );
  const bar = (probability: number, kind: string) => {
    const made = el("span", { class: `share ${kind}` });
    made.style.width = `${(100 * probability) / most}%`;
    return made;
  };
  const row = ({ id, token, before, after }: Foretold) =>
    el(
      "tr",
      { "data-id": id, class: id === next?.id ? "follows" : undefined },
      el("th", { scope: "row", title: spelled(token, 200) }, el("bdi", {}, spelled(token, 16))),
      el(
        "td",
        { class: "shares", "aria-hidden": "true" },
        bar(before.probability, "before"),
        after ? bar(after.probability, "after") : null,
      ),
      el("td", { class: "number" }, percent(before.probability)),
      after ? el("td", { class: "number after" }, percent(after.probability)) : null,
      after
        ? el("td", { class: "number" }, difference(after.probability - before.probability))
        : null,
    );
  const whatIf = moved !== null;
  const heading = (name: string, kind = "") => el("th", { scope: "col", class: kind }, name);
  return el(
    "table",
    { class: whatIf ? "bars compared" : "bars" },
    el("caption", { class: "unseen" }, "The likeliest next tokens"),
    el(
      "thead",
      { class: whatIf ? undefined : "unseen" },
      el(
        "tr",
        {},
        heading("next token"),
        el("td", {}),
        heading(whatIf ? "was" : "probability"),
        whatIf ? heading("now", "after") : null,
        whatIf ? heading("change") : null,
      ),
    ),
    el("tbody", {}, ...tokens.map(row)),
  );
}

/** In points of a percent. */
export function difference(by: number): string {
  const points = 100 * by;
  if (Math.abs(points) < 0.05) return "±0";
  return `${points > 0 ? "+" : "−"}${Math.abs(points).toFixed(1)}`;
}

/** Where the token that does follow stands. */
export function following({ next }: Prediction): HTMLElement {
  if (!next) return el("p", { class: "note following" }, "Here the text ends.");
  const place = ({ rank, probability }: Foretold["before"]) =>
    `rank ${rank.toLocaleString("en")}, ${percent(probability)}`;
  return el(
    "p",
    { class: "following" },
    "The text has ",
    el("bdi", { class: "token" }, spelled(next.token, 24)),
    `: ${place(next.before)}`,
    next.after ? el("span", { class: "after" }, ` → ${place(next.after)}`) : null,
  );
}
