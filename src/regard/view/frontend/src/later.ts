/** The later part: every view but the home, for the page, the notebook and the app. */

import { CompareView } from "./compare/compare_view";
import { Gallery } from "./gallery/gallery";
import { HeadGrids } from "./heads/head_grids";
import { HeadTable } from "./heads/head_table";
import { Overview } from "./heads/overview";
import { mapStage } from "./map/map_stage";
import { PictureView } from "./picture/picture_view";
import type { Given, LaterViews } from "./stage/later_part";
import { TextView } from "./text/text_view";
import { TourView } from "./tour/tour_view";

globalThis.regardLater = (given: Given): LaterViews => {
  const { source, index, state, change, theme } = given;
  const heads = new HeadTable(source, index, change);
  const views: LaterViews["views"] = { heads, grids: new HeadGrids(index, state, change, theme) };
  // Where no traces were kept, there are only numbers of heads.
  if (!index.maps.length) return { views, look: () => {}, close: () => {} };
  const map = mapStage(given);
  const gallery = given.gallery && new Gallery(given.gallery.examples, given.gallery.open);
  const compare = new CompareView(source, index, state, change, theme);
  Object.assign(views, {
    map,
    compare,
    picture: new PictureView(source, index, state, change),
    overview: new Overview(source, index, state, change, theme),
    text: new TextView(source, index, state, change, theme, given.jump),
    learn: new TourView(source, index, state, change, gallery?.root ?? null),
  });
  return {
    views,
    look: (query, key) => map.look(query, key),
    close: () => {
      map.close();
      compare.leave();
    },
  };
};
