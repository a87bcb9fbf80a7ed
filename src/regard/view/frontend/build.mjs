/** The program in three files: what the page and the notebook need first, what the app does, and the
 * views that are loaded when one of them is opened. */

import { stat } from "node:fs/promises";
import { build } from "esbuild";

const OUT = "../bundle";

const options = {
  outdir: OUT,
  bundle: true,
  minify: true,
  target: "es2022",
  charset: "utf8",
  logLevel: "warning",
};
const minified = {
  name: "minified",
  setup: ({ onLoad, esbuild }) =>
    onLoad({ filter: /\.css$/ }, async ({ path }) => {
      const sheet = await esbuild.build({ entryPoints: [path], minify: true, write: false });
      return { contents: sheet.outputFiles[0].text.trim(), loader: "text" };
    }),
};

await build({
  ...options,
  entryPoints: { regard: "src/main.ts", app: "src/app.ts" },
  format: "esm",
  plugins: [minified],
});
// Inside of a page it is no module: it leaves nothing behind but what it hands over.
await build({ ...options, entryPoints: ["src/later.ts"], format: "iife" });

for (const name of ["regard", "app", "later"]) {
  const { size } = await stat(`${OUT}/${name}.js`);
  console.log(`${OUT}/${name}.js: ${(size / 1024).toFixed(1)} kB`);
}
