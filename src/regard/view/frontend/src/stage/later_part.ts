/** The views that are not needed first: a part of the program that is loaded when one is opened. */

import type { State, View } from "../selection/view_state";
import type { Example } from "../sources/reader";
import type { Source } from "../sources/source";
import type { Index } from "../sources/wire_format";

/** What fills the stage. */
export interface Shown {
  readonly root: HTMLElement;
  /** What stands beside it. */
  readonly side?: HTMLElement;
  show(): void | Promise<void>;
  /** Another view takes its place. */
  leave?(): void;
  /** A key that no control has taken: whether it was meant for this view. */
  key?(event: KeyboardEvent): boolean;
}

/** What views are made of. */
export interface Given {
  source: Source;
  index: Index;
  state: () => State;
  change: (part: Partial<State>, quiet?: boolean) => void;
  theme: () => "light" | "dark";
  /** Show a pair on the map. */
  jump: (query: number, key: number) => void;
  /** Has an example of the gallery read, where somebody can. */
  gallery: { examples: () => Promise<Example[]>; open: (one: Example) => void } | null;
}

export interface LaterViews {
  views: Partial<Record<View, Shown>>;
  /** Bring a pair of the map into view. */
  look(query: number, key: number): void;
  /** Another text takes the place of this one. */
  close(): void;
}

export type MakeLater = (given: Given) => LaterViews;

declare global {
  /** Where the later part leaves what it makes. */
  var regardLater: MakeLater | undefined;
}

/** Load the later part from its address. */
export async function laterFrom(address: string): Promise<MakeLater> {
  await import(address);
  return globalThis.regardLater!;
}

/** Run the later part that a page holds as text. */
export function laterIn(text: string): Promise<MakeLater> {
  const script = document.createElement("script");
  script.textContent = text;
  document.head.append(script);
  script.remove();
  return Promise.resolve(globalThis.regardLater!);
}
