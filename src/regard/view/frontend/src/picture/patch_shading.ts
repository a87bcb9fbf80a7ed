/** A picture, its patches shaded by numbers. */

import { css, ramp } from "../drawing/colour";
import type { Picture } from "../sources/wire_format";

const images = new Map<string, Promise<HTMLImageElement>>();

/** A picture that can be drawn; each is decoded once. */
export function decoded({ image }: Picture): Promise<HTMLImageElement> {
  let found = images.get(image);
  if (!found) {
    const made = new Image();
    made.src = image;
    found = made.decode().then(() => made);
    images.set(image, found);
  }
  return found;
}

/** Both themes shade with the ramp that ends in light: pictures are dark more often than pale. */
export const RAMP = "dark";
/** How much of the picture a colour covers: more, where it says more. */
const VEIL = [0.5, 0.8] as const;

export interface Shade {
  picture: Picture;
  /** What each token counts for, and the most that any patch does; none: the picture itself. */
  weights: Float32Array | null;
  most: number;
  /** Tokens to draw a line around. */
  marked: { place: number; colour: string }[];
}

export function shade(canvas: HTMLCanvasElement, image: HTMLImageElement, how: Shade): void {
  const { picture, weights, most, marked } = how;
  const context = canvas.getContext("2d")!;
  const { width, height } = canvas;
  // Enlarged, a small picture shows its pixels.
  context.imageSmoothingEnabled = image.naturalWidth * 3 > width;
  context.drawImage(image, 0, 0, width, height);
  if (weights) {
    // Colours are for the weights: the picture below them is grey.
    context.globalCompositeOperation = "saturation";
    context.fillStyle = "#808080";
    context.fillRect(0, 0, width, height);
    context.globalCompositeOperation = "source-over";
    const table = ramp(RAMP);
    for (let at = 0; at < picture.rows * picture.columns; at++) {
      const share = most > 0 ? Math.min(1, weights[picture.first + at]! / most) : 0;
      context.globalAlpha = VEIL[0] + (VEIL[1] - VEIL[0]) * share;
      context.fillStyle = css(table[Math.round(255 * share)]!);
      context.fillRect(...patch(picture, at, width, height));
    }
    context.globalAlpha = 1;
  }
  for (const { place, colour } of marked) outline(context, picture, place, colour);
}

function outline(
  context: CanvasRenderingContext2D,
  picture: Picture,
  place: number,
  colour: string,
): void {
  const at = place - picture.first;
  if (at < 0 || at >= picture.rows * picture.columns) return;
  const { width, height } = context.canvas;
  const line = Math.max(2, width / 200);
  const [x, y, wide, high] = patch(picture, at, width, height);
  for (const [ink, thick] of [
    ["#000000", 2 * line],
    [colour, line],
  ] as const) {
    context.strokeStyle = ink;
    context.lineWidth = thick;
    context.strokeRect(x, y, wide, high);
  }
}

/** A patch in pixels, without seams between it and the next. */
function patch(
  { rows, columns }: Picture,
  at: number,
  width: number,
  height: number,
): [number, number, number, number] {
  const [row, column] = [Math.floor(at / columns), at % columns];
  const [x, y] = [Math.round((column * width) / columns), Math.round((row * height) / rows)];
  const right = Math.round(((column + 1) * width) / columns);
  const bottom = Math.round(((row + 1) * height) / rows);
  return [x, y, right - x, bottom - y];
}

/** The token of the patch at a place of the canvas, as shares of its sides. */
export function patchAt({ rows, columns, first }: Picture, across: number, down: number): number {
  const inside = (share: number, n: number) => Math.min(n - 1, Math.max(0, Math.floor(share * n)));
  return first + inside(down, rows) * columns + inside(across, columns);
}
