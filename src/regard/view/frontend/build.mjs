/** Everything as one file. Style goes in as text, which esbuild minifies only when asked apart. */

import { readFile, writeFile } from "node:fs/promises";
import { build, transform } from "esbuild";
import { MARKED, marked } from "./private_names.mjs";

const style = {
  name: "style",
  setup: ({ onLoad }) =>
    onLoad({ filter: /\.css$/ }, async ({ path }) => {
      const text = await readFile(path, "utf8");
      const { code } = await transform(text, { loader: "css", minify: true });
      // What nearly all rules begin with takes one sign; style.ts puts it back.
      return { contents: code.trim().replaceAll(".regard ", "?"), loader: "text" };
    }),
};

const privates = {
  name: "privates",
  setup: ({ onLoad }) =>
    onLoad({ filter: /\.ts$/ }, async ({ path }) => ({
      contents: marked(await readFile(path, "utf8")),
      loader: "ts",
    })),
};

const OUT = "../bundle/regard.js";
const { outputFiles } = await build({
  entryPoints: ["src/main.ts"],
  outfile: OUT,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "ascii",
  logLevel: "warning",
  mangleProps: MARKED,
  plugins: [style, privates],
  write: false,
});

// Custom properties of the style have short names as well, in rules and where they are asked for.
let program = outputFiles[0].text;
const properties = [...new Set(program.match(/--[a-z][a-z-]{2,}(?=:)/g))];
for (const [at, name] of properties.entries())
  program = program.replaceAll(new RegExp(`${name}(?![\\w-])`, "g"), `--${at.toString(36)}`);
await writeFile(OUT, program);
console.log(`${OUT}: ${(program.length / 1024).toFixed(1)} kB`);
