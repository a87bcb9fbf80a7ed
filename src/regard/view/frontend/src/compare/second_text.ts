/** The other text or model of a comparison, which the app reads beside the one that is shown. */

import type { AppSource } from "../sources/app_source";
import type { Source } from "../sources/source";
import type { Index } from "../sources/wire_format";

const OFTEN = 150;

export interface Opened {
  source: Source;
  index: Index;
}

/** Read a text; while that lasts, how far it is. */
export async function readBeside(
  source: AppSource,
  text: string,
  model: string,
  tell: (doing: string) => void,
  signal: AbortSignal,
): Promise<Opened> {
  let status = await source.beside(text, model);
  const number = status.beside;
  if (status.refused || number === undefined) throw new Error(status.refused);
  while (status.work.beside === number && status.work.state === "running") {
    tell(status.work.doing);
    await new Promise((go) => setTimeout(go, OFTEN));
    signal.throwIfAborted();
    status = await source.status();
  }
  const { state, beside, error } = status.work;
  if (beside === number && state !== "done") throw new Error(error ?? "it was stopped");
  const opened = source.other(number);
  return { source: opened, index: await opened.index() };
}
