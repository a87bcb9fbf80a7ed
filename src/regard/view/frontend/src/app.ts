/** Where the app starts: its markup says where the data are. */

import { AppPanels } from "./panels/app_panels";
import { mount } from "./shell/mount";
import { AppSource } from "./sources/app_source";
import { laterFrom } from "./stage/later_part";

const root = document.getElementById("regard")!;
const base = root.dataset["base"] ?? "./";
const source = new AppSource(base);
void mount(root, source, {
  // What is shown inside a notebook's cell has no address of its own.
  address: location.protocol !== "about:",
  later: () => laterFrom(new URL(`${base}later.js`, document.baseURI).href),
  panels: (hands) => new AppPanels(source, hands),
});
