/** Typefaces of what is drawn. */

export const MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";
export const SANS = "system-ui, sans-serif";
