/** The panels of the app: the bar that has texts read, and the panel of predictions. */

import { PredictionsPanel } from "../predictions/predictions_panel";
import { ReadingBar } from "../reading/reading_bar";
import type { State } from "../selection/view_state";
import type { AppSource } from "../sources/app_source";
import type { Index } from "../sources/wire_format";
import type { Hands, Panels } from "../stage/panels";

export class AppPanels implements Panels {
  readonly gallery: Panels["gallery"];
  private reading: ReadingBar;
  private says: PredictionsPanel;
  private opening: Promise<void> | null = null;

  constructor(
    source: AppSource,
    private hands: Hands,
  ) {
    const show = (map: number, head: number) => hands.change({ map, head, set: [], layers: "one" });
    const read = (edition: number | undefined) => {
      source.turn(edition);
      const again = () => this.again();
      return this.opening ? this.opening.then(again, again) : again();
    };
    const reading = (this.reading = new ReadingBar(source, read, show, source.fresh));
    // Where the app has gone, what is asked next says so.
    source.outdated = () =>
      void this.again()
        .then(() => reading.renew())
        .catch(() => {});
    this.says = new PredictionsPanel(source, (part) => hands.change(part));
    this.gallery = {
      examples: () => source.gallery(),
      open: (one) => void reading.example(one, () => hands.visit(one.address)),
    };
  }

  get bar(): HTMLElement {
    return this.reading.root;
  }

  get panel(): HTMLElement {
    return this.says.root;
  }

  show(state: State, index: Index): void {
    this.says.show(state, index);
  }

  private again(): Promise<void> {
    return (this.opening ??= this.hands.reopen().finally(() => {
      this.opening = null;
    }));
  }
}
