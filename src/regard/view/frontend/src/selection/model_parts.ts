/** The parts of a model that reads one text and writes another. */

import type { MapInfo } from "../sources/wire_format";

export const PARTS = ["Encoder", "Decoder", "Cross-attention"] as const;
export type Part = (typeof PARTS)[number] | "";

const ACROSS = /cross|memory|encoder_attn|multihead_attn|encdec/i;

/** Which part a layer belongs to, by its texts and its path. */
export function partOf({ name, queries, keys, queryText, keyText }: MapInfo): Part {
  const within = name.split(".");
  const decodes = within.some((step) => /decoder/i.test(step));
  const two = queries !== keys || queryText !== keyText;
  if (decodes && (two || within.some((step) => ACROSS.test(step)))) return "Cross-attention";
  if (decodes) return "Decoder";
  return within.some((step) => /encoder/i.test(step)) ? "Encoder" : "";
}

/** The places of the maps of each part, if there is more than one part. */
export function partsOf(maps: MapInfo[]): [Part, number[]][] {
  const found = PARTS.map((part): [Part, number[]] => [
    part,
    [...maps.keys()].filter((at) => partOf(maps[at]!) === part),
  ]).filter(([, places]) => places.length);
  const all = found.reduce((sum, [, places]) => sum + places.length, 0);
  return found.length > 1 && all === maps.length ? found : [["", [...maps.keys()]]];
}
