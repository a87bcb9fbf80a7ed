/** The style sheets with one sign for each piece of text that they repeat most.
 *
 * Style is a sixth of the bundle, and says the same again and again. Signs that no sheet uses stand
 * for pieces of it; `style.ts` puts the pieces back, the last made first. */

const SIGNS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ^|~?&_$+=";
const SHORTEST = 4;
const LONGEST = 28;

/** Where a piece may begin: at a selector, a property or a value. */
const STARTS = /(?<![a-z0-9-])[a-z.:-]|[A-Z^|~?&_$+=;{}]/g;

/** The sheets, and the signs with what they stand for. */
export function packed(sheets) {
  // Sheets stay apart: no piece goes from one into the next.
  const gap = "\n";
  let text = sheets.join(gap);
  const codes = [];
  for (const sign of [...SIGNS].filter((each) => !text.includes(each))) {
    const piece = best(text, gap);
    if (!piece) break;
    text = text.replaceAll(piece, sign);
    codes.push(sign + piece);
  }
  return { sheets: text.split(gap), codes };
}

/** The piece whose sign saves most. */
function best(text, gap) {
  const many = new Map();
  for (const { index } of text.matchAll(STARTS))
    for (let long = SHORTEST; long <= LONGEST; long++) {
      const piece = text.slice(index, index + long);
      if (piece.includes(gap)) break;
      many.set(piece, (many.get(piece) ?? 0) + 1);
    }
  let [found, most] = ["", 0];
  for (const [piece, often] of many) {
    if ((often - 1) * (piece.length - 1) - 6 <= most) continue;
    // Pieces may overlap themselves.
    const saved = (text.split(piece).length - 2) * (piece.length - 1) - 6;
    if (saved > most) [found, most] = [piece, saved];
  }
  return found;
}
