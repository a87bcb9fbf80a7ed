/** The style of everything, from the general to the particular: the later rules win. */

import compare from "../compare/compare.css";
import elements from "../elements/elements.css";
import headGrids from "../heads/head_grids.css";
import headTable from "../heads/head_table.css";
import overview from "../heads/overview.css";
import gallery from "../gallery/gallery.css";
import map from "../map/map.css";
import picture from "../picture/picture.css";
import predictions from "../predictions/predictions.css";
import reading from "../reading/reading.css";
import badges from "../sentence/badges.css";
import sentence from "../sentence/sentence.css";
import text from "../text/text.css";
import tour from "../tour/tour.css";
import base from "./base.css";
import narrow from "./narrow.css";
import shell from "./shell.css";

export const STYLE = [
  base,
  shell,
  map,
  elements,
  overview,
  headGrids,
  text,
  sentence,
  badges,
  compare,
  picture,
  headTable,
  tour,
  gallery,
  narrow,
  reading,
  predictions,
].join("");
