/** The kernel of a notebook, which answers messages. */

import { RemoteSource, type Asked } from "./remote_source";

/** What a notebook gives a widget: see anywidget. */
export interface Model {
  get(name: string): unknown;
  set(name: string, value: unknown): void;
  save_changes(): void;
  send(content: unknown): void;
  on(event: string, call: (...given: never[]) => void): void;
  off(event: string, call: (...given: never[]) => void): void;
}

/** Questions go to the kernel as messages, answers come back as buffers. */
export class WidgetSource extends RemoteSource {
  /** A widget may be shown in several places, all of which hear every answer. */
  private me = Math.random().toString(36).slice(2);
  private asked = 0;
  private open = new Map<
    string,
    { done: (bytes: ArrayBuffer) => void; fail: (e: Error) => void }
  >();

  constructor(private model: Model) {
    super();
    model.on("msg:custom", this.onMessage as never);
  }

  close(): void {
    this.model.off("msg:custom", this.onMessage as never);
  }

  /** A part of the program. */
  async program(name: string): Promise<Blob> {
    return new Blob([await this.ask("program", { name })], { type: "text/javascript" });
  }

  private onMessage = (content: { number: string; error?: string }, buffers: DataView[]): void => {
    const waiting = this.open.get(content.number);
    this.open.delete(content.number);
    const view = buffers?.[0];
    if (!waiting) return;
    if (content.error !== undefined || !view)
      waiting.fail(new Error(content.error ?? "the kernel gave no answer"));
    else {
      const bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
      waiting.done(bytes.slice().buffer);
    }
  };

  protected ask(name: string, asked: Asked, signal?: AbortSignal): Promise<ArrayBuffer> {
    const number = `${this.me}-${++this.asked}`;
    return new Promise((done, fail) => {
      this.open.set(number, { done, fail });
      this.model.send({ number, name, asked });
      signal?.addEventListener("abort", () => {
        if (!this.open.delete(number)) return;
        this.model.send({ number, stop: true });
        fail(new DOMException("stopped", "AbortError"));
      });
    });
  }
}
