/** How the map is drawn, and what is known of the layer. */

import { POOLS, SCALES, type Pool, type Scale } from "../drawing/colour";
import { choice } from "../elements/choice";
import { el } from "../elements/element";
import type { State } from "../selection/view_state";
import type { MapInfo, Quantity } from "../sources/wire_format";

const POOL_NAMES: Record<Pool, string> = { max: "Max", mean: "Mean", sum: "Sum" };
const SCALE_NAMES: Record<Scale, [string, string]> = {
  log: ["Log", "Logarithm of the weight, down to a ten-thousandth of the largest in view"],
  linear: ["Linear", "The weight itself; long texts go pale"],
  row: ["Row", "Share of the largest weight of each row"],
  ratio: ["Ratio", "Times what the key would get if all visible keys were alike"],
};

export function choices(
  { pool, scale, quantity }: State,
  quantities: Quantity[],
  change: (part: Partial<State>) => void,
): HTMLElement[] {
  const made = [
    choice(
      "Colour",
      SCALES.map((each) => [each, ...SCALE_NAMES[each]]),
      scale,
      (value) => change({ scale: value }),
    ),
    choice(
      "A cell shows the",
      POOLS.map((each) => [each, POOL_NAMES[each]]),
      pool,
      (value) => change({ pool: value }),
    ),
  ];
  made[1]!.classList.add("pool");
  if (quantities.length > 1)
    made.push(
      choice(
        "Of the",
        quantities.map(({ name, title, about }) => [name, title, about]),
        quantity,
        (value) => change({ quantity: value }),
      ),
    );
  return made;
}

export function facts({
  queries,
  keys,
  heads,
  keyHeads,
  mask,
  backend,
  starts,
}: MapInfo): HTMLElement {
  const known: [string, string][] = [
    ["Queries × keys", `${queries.toLocaleString("en")} × ${keys.toLocaleString("en")}`],
    ["Heads", heads === keyHeads ? `${heads}` : `${heads} over ${keyHeads} key heads`],
    ["Mask", mask],
    ["Computed by", backend],
  ];
  if (starts.length > 1)
    known.push(["Generated", `${starts.length - 1} steps after ${starts[1]} tokens`]);
  return el(
    "dl",
    { class: "facts" },
    ...known.flatMap(([name, fact]) => [el("dt", {}, name), el("dd", {}, fact)]),
  );
}
