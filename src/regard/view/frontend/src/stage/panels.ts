/** What only the app has: a place to type texts in, and what the model says of them. */

import type { State } from "../selection/view_state";
import type { Index } from "../sources/wire_format";
import type { Given } from "./later_part";

/** What the panels can do to the views. */
export interface Hands {
  change(part: Partial<State>): void;
  /** Show what an address says. */
  visit(address: string): void;
  /** Open the text that was read last. */
  reopen(): Promise<void>;
}

export interface Panels {
  /** Above the views. */
  readonly bar: HTMLElement;
  /** Beside them. */
  readonly panel: HTMLElement;
  readonly gallery: Given["gallery"];
  /** Tell of another state. */
  show(state: State, index: Index): void;
}
