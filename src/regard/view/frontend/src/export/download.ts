/** A file that the browser saves. */

import { el } from "../elements/element";

export function download(name: string, content: Blob): void {
  const url = URL.createObjectURL(content);
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
