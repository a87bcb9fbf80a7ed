/** The colours of the theme, as the style sheet sets them. */

export interface ThemeColours {
  paper: string;
  ground: string;
  line: string;
  frame: string;
  ink: string;
  faint: string;
  accent: string;
}

export function themeColours(root: HTMLElement): ThemeColours {
  const style = getComputedStyle(root);
  const colour = (name: string) => style.getPropertyValue(name).trim();
  return {
    paper: colour("--paper"),
    ground: colour("--ground"),
    line: colour("--line"),
    frame: colour("--line-strong"),
    ink: colour("--ink"),
    faint: colour("--faint"),
    accent: colour("--accent"),
  };
}
