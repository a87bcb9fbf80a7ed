/** The map as files: pictures, drawings and numbers. */

import type { Drawing } from "../drawing/shapes";
import type { MenuItem } from "../elements/menu";
import { download } from "../export/download";
import { pictureItems, tableItem } from "../export/file_menu";
import { figureTitle, fileName, safeName } from "../export/file_name";
import { safetensors, type Tensor } from "../export/safetensors";
import type { State } from "../selection/view_state";
import type { Source } from "../sources/source";
import type { Index } from "../sources/wire_format";
import { mapFigure } from "./map_figure";
import { legendOf } from "./map_legend";
import type { MapView } from "./map_view";
import { regionTable, type Region } from "./region";

export function mapFiles(
  view: MapView,
  index: Index,
  source: Source,
  state: () => State,
): MenuItem[] {
  const file = (kind: string) => `${fileName(index, state())}.${kind}`;
  const drawn = async (signal: AbortSignal): Promise<Drawing> => {
    const { cells, region, inks, status } = await view.snapshot(signal, false);
    const legend = legendOf(status, state(), index.quantities);
    return mapFigure({
      title: figureTitle(index, state()),
      cells,
      region,
      legend,
      texts: index.texts,
      inks,
    });
  };
  const region = async (signal: AbortSignal) => (await view.snapshot(signal, true)).region;
  const made: MenuItem[] = [
    ...pictureItems(file, drawn),
    tableItem(file, async (signal) =>
      regionTable(await region(signal), index.texts, index.maps[state().map]!),
    ),
    {
      name: "safetensors",
      about: "tensors",
      act: async (signal) =>
        download(file("safetensors"), packed(await region(signal), index, state())),
    },
  ];
  const { figure, page } = source;
  if (figure)
    made.push({
      name: "PDF",
      about: "the head, for papers",
      act: async (signal) => {
        const { map, head } = state();
        download(file("pdf"), await figure(map, head, signal));
      },
    });
  if (page)
    made.push({
      name: "HTML",
      about: "the page",
      act: async (signal) =>
        download(`${safeName(index.model || "regard")}.html`, await page(signal)),
    });
  return made;
}

/** Single pairs as "weight", larger cells as "mean" and "max"; their places in the metadata. */
function packed(region: Region, index: Index, { map, head, quantity }: State): Blob {
  const { cell, rows, columns, mean, most, pairs } = region;
  const info = index.maps[map]!;
  const shape = [rows, columns];
  const tensors: Record<string, Tensor> =
    cell === 1
      ? { weight: { shape, data: mean } }
      : { mean: { shape, data: mean }, max: { shape, data: most } };
  if (pairs.length) {
    const places = Int32Array.from(pairs.flatMap(({ query, key }) => [query, key]));
    tensors["pairs"] = { shape: [pairs.length, 2], data: places };
    const weights = Float32Array.from(pairs, ({ weight }) => weight);
    tensors["pair_weights"] = { shape: [pairs.length], data: weights };
  }
  const words = (text: number, first: number, count: number) =>
    JSON.stringify(index.texts[text]?.slice(first, first + count) ?? null);
  return safetensors(tensors, {
    model: index.model,
    layer: info.name,
    head: String(head),
    quantity,
    cell: String(cell),
    queries: `${region.query}:${region.query + region.queries}`,
    keys: `${region.key}:${region.key + region.keys}`,
    mask: info.mask,
    query_tokens: words(info.queryText, region.query, region.queries),
    key_tokens: words(info.keyText, region.key, region.keys),
  });
}
