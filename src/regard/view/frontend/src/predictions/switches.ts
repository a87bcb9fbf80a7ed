/** What is switched off: heads, layers, edges between tokens; and what each is called. */

import { spelled } from "../drawing/token_spelling";
import { partOf, partsOf } from "../selection/model_parts";
import type { Index } from "../sources/wire_format";

export type Switch =
  | { kind: "head"; map: number; head: number }
  | { kind: "layer"; map: number }
  | { kind: "edge"; map: number; query: number; key: number }
  | { kind: "pair"; map: number; query: number; key: number; head: number };

/** As the app is asked. */
export function written(off: Switch[]): string {
  return off
    .map((one) => {
      if (one.kind === "head") return `head:${one.map}:${one.head}`;
      if (one.kind === "layer") return `layer:${one.map}`;
      const edge = `${one.kind}:${one.map}:${one.query}:${one.key}`;
      return one.kind === "edge" ? edge : `${edge}:${one.head}`;
    })
    .join();
}

/** A layer by its number in its part of the model. */
export function layerName({ maps }: Index, map: number): string {
  const parts = partsOf(maps);
  const part = parts.length > 1 ? partOf(maps[map]!) : "";
  const [, places] = parts.find(([name]) => name === part)!;
  return `${part || "Layer"} ${places.indexOf(map)}`;
}

export function switchName(index: Index, one: Switch): string {
  const layer = layerName(index, one.map);
  if (one.kind === "head") return `${layer} · head ${one.head}`;
  if (one.kind === "layer") return `${layer} · all heads`;
  const { queryText, keyText } = index.maps[one.map]!;
  const token = (text: number, at: number) => {
    const found = index.texts[text]?.[at];
    return found === undefined ? `#${at}` : `‘${spelled(found.trim() || found, 14)}’ #${at}`;
  };
  const edge = `${token(queryText, one.query)} → ${token(keyText, one.key)}`;
  return one.kind === "edge" ? edge : `${edge}, ${layer} · head ${one.head}`;
}

export const same = (one: Switch, other: Switch): boolean => written([one]) === written([other]);
