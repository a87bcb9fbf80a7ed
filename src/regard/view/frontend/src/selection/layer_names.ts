/** What layers and heads are called wherever they are named: "Layer 4 · head 5". */

import type { MapInfo } from "../sources/wire_format";
import { partOf, partsOf } from "./model_parts";

const TEXT = / · (\d+)$/;

/** The path of a layer, without the number of its text. */
const pathOf = ({ name }: MapInfo) => name.replace(TEXT, "");

/** A layer by its place among those of its part of the model, from 0; nothing, if it is the only
 * one. Where a layer read several texts, which of them. */
export function layerName(maps: MapInfo[], at: number): string {
  if (maps.length < 2) return "";
  const map = maps[at]!;
  const parts = partsOf(maps);
  const part = parts.length > 1 ? partOf(map) : "";
  const [, places] = parts.find(([name]) => name === part)!;
  const paths = [...new Set(places.map((place) => pathOf(maps[place]!)))];
  const text = TEXT.exec(map.name);
  const number = `layer ${paths.indexOf(pathOf(map))}`;
  const name = part ? `${part} ${number}` : `L${number.slice(1)}`;
  return text ? `${name} · text ${text[1]}` : name;
}

export function headName(maps: MapInfo[], map: number, head: number): string {
  const layer = layerName(maps, map);
  return layer ? `${layer} · head ${head}` : `Head ${head}`;
}

/** Inside of a sentence. */
export const lowered = (name: string) => name[0]!.toLowerCase() + name.slice(1);
