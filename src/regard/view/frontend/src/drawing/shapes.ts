/** A drawing as a list of shapes, which becomes an SVG or the pixels of a canvas. */

export type Shape =
  | {
      kind: "box";
      x: number;
      y: number;
      width: number;
      height: number;
      fill: string;
      tooltip?: string;
    }
  | { kind: "frame"; x: number; y: number; width: number; height: number; stroke: string }
  | { kind: "line"; x: number; y: number; toX: number; toY: number; stroke: string; dash?: string }
  | {
      kind: "pixels";
      x: number;
      y: number;
      width: number;
      height: number;
      canvas: HTMLCanvasElement;
    }
  | {
      kind: "text";
      x: number;
      y: number;
      text: string;
      font: string;
      size: number;
      fill: string;
      bold?: boolean;
      /** Right-aligned. */
      end?: boolean;
      /** Centred. */
      middle?: boolean;
      /** Reading from below. */
      turned?: boolean;
    };

export interface Drawing {
  width: number;
  height: number;
  shapes: Shape[];
}

/** Of a pixel of the screen, which is a 96th of an inch. */
const MILLIMETRE = 25.4 / 96;
const round = (value: number) => String(+value.toFixed(2));

// Control characters and lone surrogates may stand in no XML, not even as references.
const FORBIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]|\p{Surrogate}/gu;
const ESCAPES: Record<string, string> = { "<": "&lt;", ">": "&gt;", "&": "&amp;", '"': "&quot;" };
const escaped = (text: string) =>
  text.replace(FORBIDDEN, "\ufffd").replace(/[<>&"]/g, (sign) => ESCAPES[sign]!);

export function toSvg({ width, height, shapes }: Drawing): string {
  const size = `width="${round(width * MILLIMETRE)}mm" height="${round(height * MILLIMETRE)}mm"`;
  const view = `viewBox="0 0 ${round(width)} ${round(height)}"`;
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" ${size} ${view}>`,
    ...shapes.map(element),
    "</svg>\n",
  ].join("\n");
}

function element(shape: Shape): string {
  const at = `x="${round(shape.x)}" y="${round(shape.y)}"`;
  if (shape.kind === "text") {
    const { x, y, font, size, fill, bold, end, middle, turned, text } = shape;
    const look = `font-family="${escaped(font)}" font-size="${size}" fill="${fill}"`;
    const weight = bold ? ' font-weight="600"' : "";
    const anchor = end || middle ? ` text-anchor="${end ? "end" : "middle"}"` : "";
    const turn = turned ? ` transform="rotate(-90 ${round(x)} ${round(y)})"` : "";
    // Not every reader knows dominant-baseline: a third of the size below the middle is the same.
    const down = `dy="${round(size * 0.35)}" xml:space="preserve"`;
    return `<text ${at} ${down} ${look}${weight}${anchor}${turn}>${escaped(text)}</text>`;
  }
  if (shape.kind === "line") {
    const to = `x2="${round(shape.toX)}" y2="${round(shape.toY)}"`;
    const dash = shape.dash ? ` stroke-dasharray="${shape.dash}"` : "";
    const from = at.replace("x=", "x1=").replace("y=", "y1=");
    return `<line ${from} ${to} stroke="${shape.stroke}"${dash}/>`;
  }
  const box = `${at} width="${round(shape.width)}" height="${round(shape.height)}"`;
  if (shape.kind === "frame") return `<rect ${box} fill="none" stroke="${shape.stroke}"/>`;
  if (shape.kind === "pixels") {
    const how = 'preserveAspectRatio="none" style="image-rendering:pixelated"';
    const href = shape.canvas.toDataURL("image/png");
    return `<image ${box} ${how} href="${href}"/>`;
  }
  const tooltip = shape.tooltip ? `<title>${escaped(shape.tooltip)}</title>` : "";
  return `<rect ${box} fill="${shape.fill}">${tooltip}</rect>`;
}

export function toCanvas({ width, height, shapes }: Drawing, ratio: number): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d")!;
  context.scale(ratio, ratio);
  for (const shape of shapes) paint(context, shape);
  return canvas;
}

function paint(context: CanvasRenderingContext2D, shape: Shape): void {
  const { x, y } = shape;
  if (shape.kind === "text") {
    context.save();
    context.font = `${shape.bold ? "600 " : ""}${shape.size}px ${shape.font}`;
    context.fillStyle = shape.fill;
    context.textBaseline = "middle";
    context.textAlign = shape.end ? "right" : shape.middle ? "center" : "left";
    context.translate(x, y);
    if (shape.turned) context.rotate(-Math.PI / 2);
    context.fillText(shape.text, 0, 0);
    context.restore();
  } else if (shape.kind === "line") {
    context.strokeStyle = shape.stroke;
    context.setLineDash(shape.dash?.split(" ").map(Number) ?? []);
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(shape.toX, shape.toY);
    context.stroke();
    context.setLineDash([]);
  } else if (shape.kind === "frame") {
    context.strokeStyle = shape.stroke;
    context.strokeRect(x, y, shape.width, shape.height);
  } else if (shape.kind === "pixels") {
    context.imageSmoothingEnabled = false;
    context.drawImage(shape.canvas, x, y, shape.width, shape.height);
  } else {
    context.fillStyle = shape.fill;
    context.fillRect(x, y, shape.width, shape.height);
  }
}
