/** Which tokens of two texts stand for each other. */

/** A place of the first text and its place in the second. */
export type Pair = [number, number];

/** Products of lengths up to which the longest common part is looked for. */
const MOST = 1 << 20;

/** Tokens that both texts have, in order; and between them, where one text has as many as the
 * other, those that stand in for each other: "river" for "city". Tokens without names go by number. */
export function aligned(
  one: string[] | undefined,
  other: string[] | undefined,
  [rows, columns]: [number, number],
): Pair[] {
  if (!one || !other || one === other)
    return Array.from({ length: Math.min(rows, columns) }, (_, at): Pair => [at, at]);
  let start = 0;
  while (start < Math.min(rows, columns) && one[start] === other[start]) start++;
  let end = 0;
  const room = Math.min(rows, columns) - start;
  while (end < room && one[rows - 1 - end] === other[columns - 1 - end]) end++;
  const [tall, wide] = [rows - start - end, columns - start - end];
  const middle =
    tall * wide <= MOST
      ? common(one.slice(start, rows - end), other.slice(start, columns - end))
      : [];
  const anchors: Pair[] = [
    ...Array.from({ length: start }, (_, at): Pair => [at, at]),
    ...middle.map(([a, b]): Pair => [start + a, start + b]),
    ...Array.from({ length: end }, (_, at): Pair => [rows - end + at, columns - end + at]),
  ];
  const found: Pair[] = [];
  let [a, b] = [0, 0];
  for (const [nextA, nextB] of [...anchors, [rows, columns] as Pair]) {
    if (nextA - a === nextB - b) while (a < nextA) found.push([a++, b++]);
    if (nextA < rows) found.push([nextA, nextB]);
    [a, b] = [nextA + 1, nextB + 1];
  }
  return found;
}

/** The longest part, in order, that two lists have in common. */
function common(one: string[], other: string[]): Pair[] {
  const wide = other.length + 1;
  const best = new Uint16Array((one.length + 1) * wide);
  for (let a = one.length - 1; a >= 0; a--)
    for (let b = other.length - 1; b >= 0; b--)
      best[a * wide + b] =
        one[a] === other[b]
          ? best[(a + 1) * wide + b + 1]! + 1
          : Math.max(best[(a + 1) * wide + b]!, best[a * wide + b + 1]!);
  const found: Pair[] = [];
  for (let [a, b] = [0, 0]; a < one.length && b < other.length;)
    if (one[a] === other[b]) found.push([a++, b++]);
    else if (best[(a + 1) * wide + b]! >= best[a * wide + b + 1]!) a++;
    else b++;
  return found;
}
