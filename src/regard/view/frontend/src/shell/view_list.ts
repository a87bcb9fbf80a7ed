/** The views, and which of them there are of what was seen. */

import type { View } from "../selection/view_state";
import type { Source } from "../sources/source";
import type { Index } from "../sources/wire_format";

export const TITLES: Record<View, string> = {
  sentence: "Sentence",
  map: "Map",
  compare: "Compare",
  picture: "Picture",
  overview: "Overview",
  text: "Text",
  grids: "Grids",
  heads: "Heads",
  learn: "Learn",
};

export function viewsOf({ maps, summaries, texts, pictures, tour }: Index, source: Source): View[] {
  const mapped = maps.length > 0;
  const there: Record<View, boolean> = {
    // Places without a name, and patches, are no sentence.
    sentence: maps.some(({ queryText }) => texts[queryText] !== undefined && !pictures[queryText]),
    compare: maps.length > 1 || (maps[0]?.heads ?? 0) > 1 || (mapped && "beside" in source),
    map: mapped,
    picture: pictures.some((picture) => picture !== null),
    overview: mapped,
    text: mapped,
    grids: summaries.length > 0,
    heads: true,
    learn: mapped && (source.kind === "app" || Boolean(tour)),
  };
  return (Object.keys(TITLES) as View[]).filter((view) => there[view]);
}
