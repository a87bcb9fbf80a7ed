/** Curves from a word to those it looks at, thicker where it looks more. */

const SHARE = 14;
const SPACE = "http://www.w3.org/2000/svg";

export interface Arc {
  to: HTMLElement;
  weight: number;
  strong: boolean;
}

export function arcsLayer(): SVGSVGElement {
  const made = document.createElementNS(SPACE, "svg");
  made.setAttribute("class", "arcs");
  made.setAttribute("aria-hidden", "true");
  return made;
}

interface Spot {
  x: number;
  top: number;
  bottom: number;
}

const spot = (word: HTMLElement): Spot => {
  const { offsetLeft, offsetTop, offsetWidth, offsetHeight } = word;
  // Below a word stands its share.
  const below = word.dataset["share"] ? SHARE : 0;
  const bottom = offsetTop + offsetHeight + below;
  return { x: offsetLeft + offsetWidth / 2, top: offsetTop, bottom };
};

/** Within a line over it; from line to line straight through the space between. */
function path(from: Spot, to: Spot): string {
  const line = Math.abs(from.top - to.top) < 4;
  if (line) {
    const high = Math.min(26, 8 + 0.16 * Math.abs(from.x - to.x));
    const y = from.top;
    return `M${from.x} ${y}C${from.x} ${y - 1.3 * high} ${to.x} ${y - 1.3 * high} ${to.x} ${y}`;
  }
  const up = to.top < from.top;
  const [start, end] = up ? [from.top, to.bottom] : [from.bottom, to.top];
  const bend = Math.max(12, Math.abs(end - start) * 0.55) * (up ? -1 : 1);
  return `M${from.x} ${start}C${from.x} ${start + bend} ${to.x} ${end - bend} ${to.x} ${end}`;
}

export function drawArcs(layer: SVGSVGElement, from: HTMLElement | null, arcs: Arc[]): void {
  const made: SVGElement[] = [];
  const start = from && spot(from);
  for (const { to, weight, strong } of start ? arcs : []) {
    const curve = document.createElementNS(SPACE, "path");
    curve.setAttribute("d", path(start!, spot(to)));
    curve.setAttribute("stroke-width", (1.25 + 5 * weight).toFixed(2));
    curve.setAttribute("opacity", (0.35 + 0.5 * Math.min(1, 1.5 * weight)).toFixed(2));
    if (strong) curve.setAttribute("class", "strong");
    made.push(curve);
  }
  layer.replaceChildren(...made.reverse());
}
