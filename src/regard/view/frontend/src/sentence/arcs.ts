/** Curves from a word to those it looks at, thicker where it looks more. */

const SHARE = 14;
const FREE = 4;
const LANE = 1.5;
const BEND = 10;
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

function spot(word: HTMLElement, { left, top }: DOMRect): Spot {
  const box = word.getBoundingClientRect();
  // Below a word stands its share.
  const below = word.dataset["share"] ? SHARE : 0;
  return {
    x: box.left + box.width / 2 - left,
    top: box.top - top,
    bottom: box.bottom - top + below,
  };
}

/** Within a line over it; else along the space beside the line, where it strikes no word out, and
 * straight to the other word. */
function path(from: Spot, to: Spot, lane: number): string {
  if (Math.abs(from.top - to.top) < 4) {
    const high = Math.min(26, 8 + 0.16 * Math.abs(from.x - to.x));
    const y = from.top;
    return `M${from.x} ${y}C${from.x} ${y - 1.3 * high} ${to.x} ${y - 1.3 * high} ${to.x} ${y}`;
  }
  const up = to.top < from.top ? -1 : 1;
  const [start, end] = up < 0 ? [from.top, to.bottom] : [from.bottom, to.top];
  const y = start + up * (FREE + LANE * lane);
  const side = Math.sign(to.x - from.x);
  const bend = Math.min(BEND, Math.abs(to.x - from.x) / 2, Math.max(0, up * (end - y)));
  const [left, right] = [from.x + side * bend, to.x - side * bend];
  return `M${from.x} ${start}Q${from.x} ${y} ${left} ${y}H${right}Q${to.x} ${y} ${to.x} ${y + up * bend}V${end}`;
}

export function drawArcs(layer: SVGSVGElement, from: HTMLElement | null, arcs: Arc[]): void {
  const made: SVGElement[] = [];
  const room = layer.getBoundingClientRect();
  const start = from && spot(from, room);
  for (const [lane, { to, weight, strong }] of (start ? arcs : []).entries()) {
    const curve = document.createElementNS(SPACE, "path");
    curve.setAttribute("d", path(start!, spot(to, room), Math.min(lane, 3)));
    curve.setAttribute("stroke-width", (1.25 + 3 * weight).toFixed(2));
    curve.setAttribute("opacity", (0.35 + 0.5 * Math.min(1, 1.5 * weight)).toFixed(2));
    if (strong) curve.setAttribute("class", "strong");
    made.push(curve);
  }
  layer.replaceChildren(...made.reverse());
}
