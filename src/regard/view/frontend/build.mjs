/** Everything as one file. Style goes in as text, which esbuild minifies only when asked apart. */

import { readFile } from "node:fs/promises";
import { build, transform } from "esbuild";

const style = {
  name: "style",
  setup: ({ onLoad }) =>
    onLoad({ filter: /\.css$/ }, async ({ path }) => {
      const text = await readFile(path, "utf8");
      const { code } = await transform(text, { loader: "css", minify: true });
      return { contents: code.trim(), loader: "text" };
    }),
};

await build({
  entryPoints: ["src/main.ts"],
  outfile: "../bundle/regard.js",
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "ascii",
  logLevel: "info",
  plugins: [style],
});
