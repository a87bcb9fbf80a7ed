/** Buttons that are one stop of the Tab key: arrow keys go from one to the next. */

const STEPS: Record<string, number> = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };

/** The first that fits the selector is where Tab stops; else the first of all. */
export function roving(group: HTMLElement, now = "button"): void {
  const all = [...group.querySelectorAll<HTMLElement>("button")];
  const stop = (at: HTMLElement | null | undefined) => {
    for (const each of all) each.tabIndex = each === at ? 0 : -1;
  };
  stop(group.querySelector<HTMLElement>(now) ?? all[0]);
  group.onkeydown = (event) => {
    const by = STEPS[event.key];
    const from = all.indexOf(event.target as HTMLElement);
    if (!by || from < 0) return;
    event.preventDefault();
    const to = all[(from + by + all.length) % all.length];
    stop(to);
    to?.focus();
  };
}
