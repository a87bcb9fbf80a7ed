/** Mouse and fingers on the map. */

import type { Lens, Point } from "../plot/lens";

/** What can be done to a map by hand. */
export interface MapActions {
  readonly lens: Lens;
  readonly cursor: Point | null;
  /** Pairs along one side of a cell. */
  readonly cell: number;
  look(lens: Lens): void;
  zoom(factor: number, x?: number, y?: number): void;
  all(): void;
  point(point: Point | null): void;
  /** Point at a pair, and keep it. */
  pick(point: Point | null): void;
  /** Take the words away while the map moves under them. */
  hideTooltip(): void;
  open(query: number): void;
}

interface Spot {
  x: number;
  y: number;
}

const STILL = 4;

export function listenToPointer(canvas: HTMLCanvasElement, actions: MapActions): void {
  const pointers = new Map<number, Spot>();
  let moved = 0;
  const wheel = (event: WheelEvent) => {
    event.preventDefault();
    const step = event.deltaMode ? 30 : 1;
    const factor = Math.exp((-event.deltaY * step) / (event.ctrlKey ? 120 : 400));
    const { offsetX, offsetY } = event;
    actions.zoom(factor, offsetX, offsetY);
    // Another cell lies under the pointer, as soon as it is drawn.
    requestAnimationFrame(() => actions.point(actions.lens.at(offsetX, offsetY)));
  };
  const drag = (before: Spot, now: Spot) => {
    moved += Math.hypot(now.x - before.x, now.y - before.y);
    if (moved < STILL) return;
    const { lens } = actions;
    actions.hideTooltip();
    actions.look(lens.moved((before.y - now.y) / lens.zoom, (before.x - now.x) / lens.zoom));
  };
  const pinch = (before: Spot, now: Spot, other: Spot) => {
    const apart = (spot: Spot) => Math.hypot(spot.x - other.x, spot.y - other.y);
    const factor = apart(now) / Math.max(1, apart(before));
    actions.zoom(factor, (now.x + other.x) / 2, (now.y + other.y) / 2);
  };
  const up = (event: PointerEvent) => {
    pointers.delete(event.pointerId);
    if (event.type === "pointerup" && moved < STILL)
      actions.pick(actions.lens.at(event.offsetX, event.offsetY));
  };
  canvas.addEventListener("wheel", wheel, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    const now = { x: event.offsetX, y: event.offsetY };
    if (!before) return actions.point(actions.lens.at(now.x, now.y));
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    pointers.set(event.pointerId, now);
    if (other) pinch(before, now, other);
    else drag(before, now);
  });
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  // A finger that is lifted leaves as well; what it pointed at is still to be read.
  canvas.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") actions.point(null);
  });
  canvas.addEventListener("dblclick", (event) => actions.zoom(4, event.offsetX, event.offsetY));
}
