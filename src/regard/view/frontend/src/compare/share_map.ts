/** A whole map as one picture: shares in the colours of a ramp, or changes in two. */

import { ramp, type Rgb } from "../drawing/colour";
import { el } from "../elements/element";

export interface ShareMap {
  title: string;
  rows: number;
  columns: number;
  /** The share or change of the darkest colour. */
  high: number;
  value: (row: number, column: number) => number;
}

/** What a value looks like: its colour, and how much of it. */
function coloured(
  value: number,
  high: number,
  theme: "light" | "dark",
  two: boolean,
): [Rgb, number] {
  const share = Math.min(1, Math.abs(value) / high);
  if (!two) return [ramp(theme)[Math.round(255 * share)]!, 255];
  const [less, more]: Rgb[] =
    theme === "dark"
      ? [
          [79, 179, 169],
          [255, 157, 92],
        ]
      : [
          [20, 94, 124],
          [194, 65, 12],
        ];
  return [value < 0 ? less! : more!, Math.round(255 * share)];
}

export function shareMap(
  { title, rows, columns, high, value }: ShareMap,
  theme: "light" | "dark",
  two: boolean,
  point: (row: number, column: number) => void,
): HTMLElement {
  const canvas = el("canvas", { width: columns, height: rows, role: "img", "aria-label": title });
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(columns, rows);
  for (let row = 0; row < rows; row++)
    for (let column = 0; column < columns; column++) {
      const found = value(row, column);
      if (!found) continue;
      const [colour, strength] = coloured(found, high, theme, two);
      image.data.set([...colour, strength], 4 * (row * columns + column));
    }
  context.putImageData(image, 0, 0);
  canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
    const at = (offset: number, size: number, n: number) =>
      Math.max(0, Math.min(n - 1, Math.floor((offset / size) * n)));
    point(at(offsetY, canvas.clientHeight, rows), at(offsetX, canvas.clientWidth, columns));
  });
  return el("figure", {}, canvas, el("figcaption", {}, title));
}
