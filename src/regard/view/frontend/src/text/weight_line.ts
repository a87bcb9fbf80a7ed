/** The numbers of a line of weights: its largest, where its colours begin and end, a mean of lines. */

import type { Range } from "../drawing/colour";
import type { Line } from "../sources/source";

export function largest(weights: Float32Array): number {
  let most = 0;
  for (const weight of weights) most = Math.max(most, weight);
  return most;
}

/** The weights where the colours begin and end: on a logarithmic scale, at a thousandth. */
export function range(weights: Float32Array): Range {
  const high = largest(weights) || 1;
  return { low: high * 1e-3, high };
}

/** The mean of lines; exact where all of them are. */
export function mean(lines: Line[]): Line {
  const weights = new Float32Array(lines[0]!.weights.length);
  for (const line of lines)
    for (const [at, weight] of line.weights.entries()) weights[at]! += weight / lines.length;
  const sets = lines.flatMap(({ exact }) => (exact ? [exact] : []));
  const sure = sets[0] && [...sets[0]].filter((at) => sets.every((set) => set.has(at)));
  return { weights, exact: sure ? new Set(sure) : null };
}
