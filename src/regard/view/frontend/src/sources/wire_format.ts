/** What the Python side sends: the index as JSON, everything else as bytes (see `tile` in Python). */

export const SIDE = 256;

export interface MapInfo {
  name: string;
  heads: number;
  keyHeads: number;
  queries: number;
  keys: number;
  band: [number | null, number | null] | null;
  mask: string;
  width: number;
  backend: string;
  starts: number[];
  /** What the model tells of each head over many texts; empty where it does not. */
  known: string[];
  queryText: number;
  keyText: number;
}

/** A layer of the map: a number for each pair. */
export interface Quantity {
  name: string;
  title: string;
  about: string;
}

/** A picture whose patches are tokens, row by row: the first of them, and how many there are. */
export interface Picture {
  image: string;
  rows: number;
  columns: number;
  first: number;
}

/** A layer whose traces were not kept: numbers of its heads, and no map. */
export interface Summary {
  name: string;
  heads: number;
  calls: number;
  statistics: Statistics;
}

/** How one weight comes about: see `tour` in Python. */
export interface Tour {
  query: number;
  key: number;
  share: number;
  steps: TourStep[];
}

export interface TourStep {
  title: string;
  text: string;
  sum?: string;
  words?: { at: number; text: string; kind: string | null }[];
  vectors?: { name: string; numbers: number[] }[];
  table?: { header: string[]; rows: { cells: string[]; own?: boolean }[] };
}

export interface Index {
  version: number;
  model: string;
  maps: MapInfo[];
  summaries: Summary[];
  texts: string[][];
  /** Of each text the picture that it is cut from, if it is. */
  pictures: (Picture | null)[];
  quantities: Quantity[];
  /** What a page shows first. */
  view?: string;
  /** The one pair of which a page can tell how its weight comes about. */
  tour?: (Tour & { map: number; head: number }) | null;
}

/** A number of each head by name; null, where it is none. */
export type Statistics = Record<string, (number | null)[]>;

/** A tile as numbers. Where cells are single pairs, mean and most are the same array. */
export interface Tile {
  rows: number;
  columns: number;
  /** Rows read of each cell; 0 for all of them. */
  read: number;
  empty: boolean;
  mean: Float32Array;
  most: Float32Array;
}

const HEADER = 16;
let halves: Float32Array | undefined;

/** The value of each of the 65,536 half-precision numbers. */
export function halfTable(): Float32Array {
  if (halves) return halves;
  halves = new Float32Array(65536);
  for (let code = 0; code < 65536; code++) {
    const sign = code & 0x8000 ? -1 : 1;
    const exponent = (code >> 10) & 31;
    const fraction = code & 1023;
    if (exponent === 31) halves[code] = fraction ? NaN : sign * Infinity;
    else if (exponent) halves[code] = sign * 2 ** (exponent - 15) * (1 + fraction / 1024);
    else halves[code] = sign * 2 ** -14 * (fraction / 1024);
  }
  return halves;
}

export function readHalves(data: DataView, offset: number, count: number): Float32Array {
  const table = halfTable();
  const found = new Float32Array(count);
  for (let i = 0; i < count; i++) found[i] = table[data.getUint16(offset + 2 * i, true)]!;
  return found;
}

export function tileBytes(data: DataView, offset = 0): number {
  const cells = data.getUint16(offset + 2, true) * data.getUint16(offset + 4, true);
  return HEADER + (data.getUint8(offset) ? 2 * cells : 0);
}

export function readTile(data: DataView, offset = 0): Tile {
  const kind = data.getUint8(offset);
  const rows = data.getUint16(offset + 2, true);
  const columns = data.getUint16(offset + 4, true);
  const read = data.getUint16(offset + 6, true);
  const cells = rows * columns;
  if (kind === 0) {
    const zeros = new Float32Array(cells);
    return { rows, columns, read, empty: true, mean: zeros, most: zeros };
  }
  if (kind === 1) {
    const values = readHalves(data, offset + HEADER, cells);
    return { rows, columns, read, empty: false, mean: values, most: values };
  }
  const low = data.getFloat32(offset + 8, true);
  const high = data.getFloat32(offset + 12, true);
  const table = new Float32Array(256);
  for (let code = 1; code < 256; code++)
    table[code] = Math.exp(low + ((code - 1) / 254) * (high - low));
  const mean = new Float32Array(cells);
  const most = new Float32Array(cells);
  for (let i = 0; i < cells; i++) {
    const code = data.getUint8(offset + HEADER + i);
    mean[i] = table[code]!;
    most[i] = table[code + data.getUint8(offset + HEADER + cells + i)]!;
  }
  return { rows, columns, read, empty: false, mean, most };
}

/** The level at which a whole map is one tile. */
export function topLevel(map: MapInfo): number {
  return Math.max(0, Math.ceil(Math.log2(Math.max(map.queries, map.keys, 1) / SIDE)));
}

/** The pairs along one axis of a cell, fewer at the edge. */
export function extent(place: number, cell: number, n: number): number {
  return Math.max(0, Math.min(cell, n - place * cell));
}
