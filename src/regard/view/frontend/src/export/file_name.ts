/** What files, and the figures in them, are called. */

import { spelled } from "../drawing/token_spelling";
import type { State } from "../selection/view_state";
import type { Index } from "../sources/wire_format";

/** A name that every file system takes. */
export const safeName = (name: string) => name.replace(/[^\w.-]+/g, "-").slice(0, 60);

/** What is looked at: of one layer, or of all of them. */
function parts(index: Index, { map, head }: State, which = `head ${head}`, all = false): string[] {
  return all ? [which] : [index.maps[map]!.name, which];
}

export function fileName(index: Index, state: State, which?: string, all?: boolean): string {
  return parts(index, state, which, all).map(safeName).join("-");
}

export function figureTitle(index: Index, state: State, which?: string, all?: boolean): string {
  return [index.model, ...parts(index, state, which, all)]
    .filter(Boolean)
    .map((part) => spelled(part, 60))
    .join(" · ");
}
