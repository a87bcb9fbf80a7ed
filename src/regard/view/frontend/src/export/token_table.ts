/** The weights of tokens as a table. */

import type { Line } from "../sources/source";
import { csv } from "./csv";

/** What each token weighs in an answer, nothing where it is masked, and whether that is exact. */
export function tokenTable(
  { weights, exact }: Line,
  names: string[] | undefined,
  seen: (at: number) => boolean = () => true,
): string {
  const rows = Array.from(weights, (weight, at) => {
    const found = seen(at) ? weight : undefined;
    return [at, names?.[at] ?? "", found, exact === null || exact.has(at)];
  });
  return csv(["index", "token", "weight", "exact"], rows);
}
