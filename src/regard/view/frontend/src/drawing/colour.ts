/** A colour for every value. Both ramps go one way in lightness, so that any eye reads the order. */

export type Rgb = [number, number, number];
export type Scale = "linear" | "log" | "row" | "ratio";
export type Pool = "mean" | "max" | "sum";

export const SCALES: Scale[] = ["log", "linear", "row", "ratio"];
export const POOLS: Pool[] = ["max", "mean", "sum"];

const RAMPS: Record<"light" | "dark", Rgb[]> = {
  light: [
    [247, 245, 238],
    [213, 228, 213],
    [138, 193, 187],
    [66, 142, 168],
    [44, 87, 141],
    [31, 34, 82],
  ],
  dark: [
    [27, 25, 48],
    [46, 62, 130],
    [40, 108, 156],
    [52, 152, 146],
    [134, 194, 104],
    [248, 226, 84],
  ],
};

const toLinear = (c: number) => {
  const share = c / 255;
  return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
};
const toByte = (c: number) => {
  const share = c <= 0.0031308 ? 12.92 * c : 1.055 * c ** (1 / 2.4) - 0.055;
  return Math.round(255 * Math.min(1, Math.max(0, share)));
};

function toLab([red, green, blue]: Rgb): Rgb {
  const [r, g, b] = [toLinear(red), toLinear(green), toLinear(blue)];
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

function fromLab([lightness, a, b]: Rgb): Rgb {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    toByte(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s),
    toByte(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s),
    toByte(-0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s),
  ];
}

const ramps = new Map<string, Rgb[]>();

/** 256 colours, even steps of lightness, mixed in OKLab. */
export function ramp(theme: "light" | "dark"): Rgb[] {
  let found = ramps.get(theme);
  if (found) return found;
  const stops = RAMPS[theme].map(toLab);
  const first = stops[0]![0];
  const last = stops[stops.length - 1]![0];
  found = Array.from({ length: 256 }, (_, i) => {
    const lightness = first + ((last - first) * i) / 255;
    let at = 0;
    while (
      at < stops.length - 2 &&
      Math.abs(stops[at + 1]![0] - first) < Math.abs(lightness - first)
    )
      at++;
    const [low, high] = [stops[at]!, stops[at + 1]!];
    const along = (lightness - low[0]) / (high[0] - low[0]);
    return fromLab([
      lightness,
      low[1] + (high[1] - low[1]) * along,
      low[2] + (high[2] - low[2]) * along,
    ]);
  });
  ramps.set(theme, found);
  return found;
}

/** With commas, as drawing programs want it. */
export const css = ([r, g, b]: Rgb) => `rgb(${r},${g},${b})`;

/** Theme that reads on a colour: black and white differ alike from the light between them. */
export function ink([red, green, blue]: Rgb): string {
  const light = 0.2126 * toLinear(red) + 0.7152 * toLinear(green) + 0.0722 * toLinear(blue);
  return light > 0.179 ? "#000000" : "#ffffff";
}

export interface Range {
  low: number;
  high: number;
}

/** Whether equal steps of colour are equal factors. */
export const logarithmic = (scale: Scale) => scale === "log" || scale === "ratio";

/** Where a value lies between the ends of a scale, from 0 to 1. */
export function place(value: number, scale: Scale, { low, high }: Range): number {
  if (!logarithmic(scale)) return Math.min(1, Math.max(0, value / high));
  const share = Math.log(value / low) / Math.log(high / low);
  return Math.min(1, Math.max(0, share));
}
