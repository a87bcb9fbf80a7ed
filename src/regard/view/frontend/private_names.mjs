/** Private members of a class, marked so that the bundler may give them short names.
 *
 * TypeScript lets nobody outside of a class name them, so that only `this.name` and what is taken
 * apart of `this` have to be written anew. esbuild by itself keeps all names of members. */

const MODIFIERS = "(?:(?:readonly|static|async|get|set|override) )*";
const DECLARED = new RegExp(`\\bprivate (${MODIFIERS})(\\w+)`, "g");
const MARK = "_";

/** What esbuild may rename. */
export const MARKED = /^[a-zA-Z]\w*_$/;

export function marked(source) {
  const names = new Set([...source.matchAll(DECLARED)].map((found) => found[2]));
  if (!names.size) return source;
  const other = new RegExp(`(?<!this)\\.(${[...names].join("|")})_\\b`);
  if (other.test(source)) throw new Error(`a name already ends with ${MARK}`);
  const mark = (name) => (names.has(name) ? name + MARK : name);
  return constructors(source)
    .replace(DECLARED, (_, how, name) => `private ${how}${mark(name)}`)
    .replace(/\bthis\.(\w+)\b/g, (_, name) => `this.${mark(name)}`)
    .replace(/\{([^{}]*)\} = this\b(?!\.)/g, (_, parts) => {
      const taken = parts.split(",").map((part) => part.trim());
      const anew = taken.map((part) =>
        part.replace(/^(\w+)(.*)$/s, (all, name, rest) =>
          names.has(name) ? `${name}${MARK}${rest || `: ${name}`}` : all,
        ),
      );
      return `{ ${anew.join(", ")} } = this`;
    });
}

/** Private parameters of constructors, as parameters that are kept by name. */
function constructors(source) {
  const start = /\bconstructor\(/.exec(source);
  if (!start) return source;
  const open = start.index + start[0].length;
  let close = open;
  for (let deep = 1; deep; close++) deep += { "(": 1, ")": -1 }[source[close]] ?? 0;
  const given = source.slice(open, close - 1);
  const body = source.indexOf("{", close) + 1;
  const kept = [...given.matchAll(DECLARED)].map((found) => found[2]);
  const known = source.slice(close, body);
  const rest = source.slice(body);
  const above = /^\s*super\([^;]*\);/.exec(rest)?.[0] ?? "";
  const fields = kept.map((name) => `declare private ${name};`).join(" ");
  const keep = kept.map((name) => `this.${name} = ${name};`).join(" ");
  return (
    source.slice(0, start.index) +
    fields +
    " constructor(" +
    given.replace(DECLARED, (_, how, name) => name) +
    ")" +
    known +
    above +
    keep +
    constructors(rest.slice(above.length))
  );
}
