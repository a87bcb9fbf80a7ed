/** Everything as one file, in which long names and what is repeated take little room. */

import { readdir, readFile } from "node:fs/promises";
import { resolve } from "node:path";
import { build, transform } from "esbuild";
import { packed } from "./packed_style.mjs";
import { MARKED, marked } from "./private_names.mjs";

const OUT = "../bundle/regard.js";

const files = await readdir("src", { recursive: true });
const paths = files
  .filter((name) => name.endsWith(".css"))
  .sort()
  .map((name) => resolve("src", name));
const sheets = [];
for (const path of paths) {
  const { code } = await transform(await readFile(path, "utf8"), { loader: "css", minify: true });
  sheets.push(code.trim());
}

// Custom properties have short names, in rules and where programs ask for them.
const properties = [...new Set(sheets.join().match(/--[a-z][a-z-]{2,}(?=:)/g))];
const shortened = (text) =>
  properties.reduce(
    (now, name, at) => now.replaceAll(new RegExp(`${name}(?![\\w-])`, "g"), `--${at.toString(36)}`),
    text,
  );
const style = packed(sheets.map(shortened));

const sources = {
  name: "sources",
  setup: ({ onLoad }) => {
    onLoad({ filter: /\.css$/ }, ({ path }) => ({
      contents: style.sheets[paths.indexOf(path)],
      loader: "text",
    }));
    onLoad({ filter: /\.ts$/ }, async ({ path }) => ({
      contents: shortened(marked(await readFile(path, "utf8"))),
      loader: "ts",
    }));
  },
};

await build({
  entryPoints: ["src/main.ts"],
  outfile: OUT,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  logLevel: "warning",
  mangleProps: MARKED,
  define: { STYLE_CODES: JSON.stringify(style.codes) },
  plugins: [sources],
});
const program = await readFile(OUT, "utf8");
console.log(`${OUT}: ${(program.length / 1024).toFixed(1)} kB`);
