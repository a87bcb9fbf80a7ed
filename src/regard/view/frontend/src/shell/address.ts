/** What is looked at, kept in the address of the page. */

import { write, type Defaults, type State } from "../selection/view_state";

const OFTEN = 150;

export class Address {
  private waiting = 0;

  /** Another view, head or pin is another place to come back to; what moves is not. */
  write(before: State, now: State, defaults: Defaults): void {
    const place = ({ view, map, head, picked, other, by, map2, head2, compare }: State) =>
      [view, map, head, picked.length, other, by, map2, head2, compare].join();
    const address = (state: State) => {
      const words = write(state, defaults);
      return words ? `#${words}` : location.pathname + location.search;
    };
    clearTimeout(this.waiting);
    if (place(before) !== place(now)) {
      history.replaceState(null, "", address(before));
      history.pushState(null, "", address(now));
      return;
    }
    const keep = () => history.replaceState(null, "", address(now));
    this.waiting = window.setTimeout(keep, OFTEN);
  }
}
