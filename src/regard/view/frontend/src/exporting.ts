/** What is seen, as files: pictures, drawings and numbers. */

import type { Atlas } from "./atlas";
import { csv } from "./csv";
import { download, spelled } from "./dom";
import { figure } from "./figure";
import type { Index } from "./format";
import { legendOf } from "./map_legend";
import type { Deed } from "./menu";
import { table, type Region } from "./region";
import { safetensors, type Tensor } from "./safetensors";
import { toCanvas, toSvg, type Drawing } from "./shapes";
import type { Line, Source } from "./sources";
import type { State } from "./state";

const FINE = 2;

export function deeds(atlas: Atlas, index: Index, source: Source, state: () => State): Deed[] {
  const file = (kind: string) => `${fileName(index, state())}.${kind}`;
  const drawn = async (signal: AbortSignal): Promise<Drawing> => {
    const { cells, region, inks, reading } = await atlas.seen(signal, false);
    const legend = legendOf(reading, state(), index.quantities);
    return figure({
      title: title(index, state()),
      cells,
      region,
      legend,
      texts: index.texts,
      inks,
    });
  };
  const counted = async (signal: AbortSignal) => (await atlas.seen(signal, true)).region;
  const made: Deed[] = [
    ...pictures(file, drawn),
    numbers(file, async (signal) =>
      table(await counted(signal), index.texts, index.maps[state().map]!),
    ),
    {
      name: "safetensors",
      about: "tensors",
      act: async (signal) =>
        download(file("safetensors"), packed(await counted(signal), index, state())),
    },
  ];
  const { page } = source;
  if (page)
    made.push({
      name: "HTML",
      about: "the page",
      act: async (signal) => download(`${safe(index.model || "regard")}.html`, await page(signal)),
    });
  return made;
}

type File = (kind: string) => string;
type Made<T> = (signal: AbortSignal) => T | Promise<T>;

/** A drawing as both kinds of picture. */
export function pictures(file: File, drawn: Made<Drawing>): Deed[] {
  return [
    {
      name: "PNG",
      about: "a picture",
      act: async (signal) => download(file("png"), await pixels(await drawn(signal))),
    },
    {
      name: "SVG",
      about: "a drawing",
      act: async (signal) => {
        const text = toSvg(await drawn(signal));
        download(file("svg"), new Blob([text], { type: "image/svg+xml" }));
      },
    },
  ];
}

export function numbers(file: File, text: Made<string>): Deed {
  return {
    name: "CSV",
    about: "a table",
    act: async (signal) =>
      download(file("csv"), new Blob([await text(signal)], { type: "text/csv" })),
  };
}

/** What each token weighs in an answer, and whether that is exact. */
export function weighed({ weights, exact }: Line, names: string[] | undefined): string {
  const rows = Array.from(weights, (weight, at) => {
    return [at, names?.[at] ?? "", weight, exact === null || exact.has(at)];
  });
  return csv(["index", "token", "weight", "exact"], rows);
}

/** A name that every file system takes. */
export const safe = (name: string) => name.replace(/[^\w.-]+/g, "-").slice(0, 60);

/** What is looked at: of one layer, or of all of them. */
function parts(index: Index, { map, head }: State, which = `head ${head}`, all = false): string[] {
  return all ? [which] : [index.maps[map]!.name, which];
}

export function fileName(index: Index, state: State, which?: string, all?: boolean): string {
  return parts(index, state, which, all).map(safe).join("-");
}

export function title(index: Index, state: State, which?: string, all?: boolean): string {
  return [index.model, ...parts(index, state, which, all)]
    .filter(Boolean)
    .map((part) => spelled(part, 60))
    .join(" · ");
}

function pixels(drawing: Drawing): Promise<Blob> {
  return new Promise((done, fail) => {
    toCanvas(drawing, FINE).toBlob(
      (blob) => (blob ? done(blob) : fail(new Error("the browser made no picture"))),
      "image/png",
    );
  });
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
