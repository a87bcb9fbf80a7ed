/** Numbers as they are written. */

const PERCENT = new Intl.NumberFormat("en", {
  style: "percent",
  maximumSignificantDigits: 3,
  useGrouping: false,
});
const LEAST = 1e-5;

/** A weight in three digits, never as a power of ten. Below a thousandth of a percent only that is
 * said, unless the number is what is asked for. */
export function percent(value: number, least = LEAST): string {
  if (value === 0) return "0";
  return value < least ? `<${PERCENT.format(least)}` : PERCENT.format(value);
}

/** The same, and below a thousandth of a percent the weight itself. */
export function exactly(value: number): string {
  const small = value > 0 && value < LEAST;
  return small ? `${percent(value)} (${value.toExponential(2)})` : percent(value);
}

export function number(value: number): string {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 0.001 && size < 100000 ? String(+value.toPrecision(3)) : value.toExponential(1);
}
