/** Tokens as they are shown: what cannot be seen in them is spelled out. */

const HIDDEN =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/gu;

/** A token with everything that is no visible character spelled out, cut to a length. */
export function spelled(token: string, longest = 40): string {
  const cut = token.slice(0, 4 * longest);
  const shown = cut
    .replace(HIDDEN, (sign) => {
      const code = sign.codePointAt(0)!;
      if (sign === "\n") return "↵";
      if (sign === "\t") return "⇥";
      if (code < 32) return String.fromCodePoint(0x2400 + code);
      return `\\u${code.toString(16).padStart(4, "0")}`;
    })
    .replace(/^ /, "␣")
    .replace(/ $/, "␣");
  const signs = [...shown];
  const whole = signs.length <= longest && cut.length === token.length;
  return whole ? shown || "∅" : signs.slice(0, longest - 1).join("") + "…";
}
