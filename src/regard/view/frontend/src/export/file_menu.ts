/** Entries of a menu that save what is seen as files: pictures, drawings and tables. */

import { toCanvas, toSvg, type Drawing } from "../drawing/shapes";
import type { MenuItem } from "../elements/menu";
import { download } from "./download";

/** Pixels of a picture for each of the screen: 300 in an inch. */
const FINE = 300 / 96;
/** What tells so in a PNG, and where it stands: behind the header. */
const DENSITY = [0, 0, 0, 9, 112, 72, 89, 115, 0, 0, 46, 35, 0, 0, 46, 35, 1, 120, 165, 63, 118];
const HEADER = 33;

type File = (kind: string) => string;
type Made<T> = (signal: AbortSignal) => T | Promise<T>;

/** A drawing as both kinds of picture. */
export function pictureItems(file: File, drawn: Made<Drawing>): MenuItem[] {
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

export function tableItem(file: File, text: Made<string>): MenuItem {
  return {
    name: "CSV",
    about: "a table",
    act: async (signal) =>
      download(file("csv"), new Blob([await text(signal)], { type: "text/csv" })),
  };
}

async function pixels(drawing: Drawing): Promise<Blob> {
  const made = await new Promise<Blob>((done, fail) => {
    toCanvas(drawing, FINE).toBlob(
      (blob) => (blob ? done(blob) : fail(new Error("the browser made no picture"))),
      "image/png",
    );
  });
  const parts = [made.slice(0, HEADER), new Uint8Array(DENSITY), made.slice(HEADER)];
  return new Blob(parts, { type: "image/png" });
}
