/** What a pixel of the map means, under the colours of the moment. */

import type { Pool, Range, Scale } from "../drawing/colour";
import type { Legend } from "../drawing/legend";
import { number, percent } from "../drawing/number_format";
import type { State } from "../selection/view_state";
import type { Quantity } from "../sources/wire_format";

/** What the map shows at the moment, and how much of it was read. */
export interface MapStatus {
  level: number;
  range: Range;
  /** Rows read of each cell of the coarsest draft in view; 0 when everything was read. */
  draft: number;
  loading: number;
  failed: string | null;
  finest: number;
  /** Whether single pairs are seen on a map whose cells are larger. */
  beyond: boolean;
}

const POOLED: Record<Pool, string> = { max: "largest", mean: "mean", sum: "sum of" };

const UNITS: Record<Scale, string> = {
  linear: "",
  log: "",
  row: ", as a share of the largest weight in its row",
  ratio: ", over what even attention would give",
};

export function legendOf(
  status: MapStatus,
  { pool, scale, quantity }: State,
  quantities: Quantity[],
): Legend {
  const { level, range, draft } = status;
  const tick = (value: number) => {
    if (scale === "ratio") return `${number(value)}×`;
    if (scale === "row") return `${Math.round(100 * value)}%`;
    return pool === "sum" && value > 1 ? number(value) : percent(value, 0);
  };
  const middle =
    scale === "linear" || scale === "row" ? range.high / 2 : Math.sqrt(range.low * range.high);
  const cell = 1 << level;
  const what = quantities.find(({ name }) => name === quantity)?.about ?? quantity;
  const pooled = POOLED[status.beyond ? "mean" : pool];
  const how =
    cell === 1 ? `one pair: its ${what}` : `${cell} × ${cell} pairs: the ${pooled} ${what}`;
  const notes: string[] = [];
  if (status.beyond) notes.push("Full colour: single pairs, the strongest of each row, exactly.");
  if (status.beyond && pool !== "mean")
    notes.push(
      `Behind them the mean: of these cells the ${POOLED[pool]} would say the same again.`,
    );
  else if (status.finest === level && level > 0) notes.push("This page holds no finer cells.");
  if (draft)
    notes.push(`Draft: ${draft} of ${cell} rows of each cell read. The rest is being read.`);
  if (status.loading) notes.push("Reading …");
  return {
    ticks: [tick(range.low), tick(middle), tick(range.high)],
    meaning: `A cell is ${how}${UNITS[scale]}.`,
    notes,
  };
}
