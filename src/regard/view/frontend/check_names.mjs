/** Whether the sources still fit together once their private members are marked: a member that is
 * named other than by `this` would be lost in the bundle alone. */

import { execFileSync } from "node:child_process";
import { cp, mkdtemp, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { marked } from "./private_names.mjs";

const place = await mkdtemp(".marked-");
try {
  await cp("src", join(place, "src"), { recursive: true });
  const names = await readdir(place, { recursive: true });
  for (const name of names.filter((each) => each.endsWith(".ts"))) {
    const path = join(place, name);
    await writeFile(path, marked(await readFile(path, "utf8")));
  }
  const settings = { extends: "../tsconfig.json", include: ["src"] };
  // Members that are declared for constructors have no types there.
  settings.compilerOptions = { noEmit: true, strict: false, noUnusedParameters: false };
  await writeFile(join(place, "tsconfig.json"), JSON.stringify(settings));
  execFileSync("npx", ["tsc", "-p", place], { stdio: "inherit" });
} finally {
  await rm(place, { recursive: true });
}
