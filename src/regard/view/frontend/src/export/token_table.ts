/** The weights of tokens as a table. */

import type { Line } from "../sources/source";
import { csv } from "./csv";

/** What each token weighs in an answer, and whether that is exact. */
export function tokenTable({ weights, exact }: Line, names: string[] | undefined): string {
  const rows = Array.from(weights, (weight, at) => {
    return [at, names?.[at] ?? "", weight, exact === null || exact.has(at)];
  });
  return csv(["index", "token", "weight", "exact"], rows);
}
