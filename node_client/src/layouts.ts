/** The layouts that a slot has seen lately, so that they need not be sent again. */

import { LayoutError } from "./errors.js";
import { Layout } from "./layout.js";
import type { Announce } from "./messages.js";

const LAYOUTS_KEPT = 4; // a model that alternates between a few sends none again

/** A code of section 13 of the protocol, and what is wrong in words. */
export type Problem = readonly [code: string, text: string];

export class Layouts {
  readonly #known = new Map<string, Layout>();
  readonly #fitting = new Set<string>(); // ids of those that can be applied here

  constructor(
    /** Says why a layout cannot be applied here; nothing if it can. */
    readonly fault: (model: string, layout: Layout) => string,
  ) {}

  knows(id: string): boolean {
    return this.#known.has(id);
  }

  get(id: string): Layout | undefined {
    return this.#known.get(id);
  }

  /** Remember a layout; return what is wrong with it, if anything. */
  learn(announce: Announce, bytes: Uint8Array): string {
    if (bytes.length !== announce.layout_bytes) {
      return `the layout has ${bytes.length} bytes, announced were ${announce.layout_bytes}`;
    }
    try {
      const layout = Layout.parse(bytes);
      if (layout.id !== announce.layout) {
        return `the layout hashes to ${layout.id}, announced was ${announce.layout}`;
      }
      this.#keep(layout);
      return "";
    } catch (error) {
      if (error instanceof LayoutError) return error.message;
      throw error;
    }
  }

  #keep(layout: Layout): void {
    this.#known.delete(layout.id);
    for (const oldest of this.#known.keys()) {
      if (this.#known.size < LAYOUTS_KEPT) break;
      this.#known.delete(oldest);
      this.#fitting.delete(oldest);
    }
    this.#known.set(layout.id, layout);
  }

  /** Say why a version cannot be taken, as far as its layout is known. */
  problem(announce: Announce, model: string): Problem | null {
    const layout = this.get(announce.layout);
    if (layout === undefined) return null;
    if (layout.nbytes !== announce.nbytes) {
      const text = `announced are ${announce.nbytes} bytes, the layout holds ${layout.nbytes}`;
      return ["layout-invalid", text];
    }
    if (this.#fitting.has(layout.id)) return null;
    const fault = this.fault(model, layout);
    if (fault) return ["layout-mismatch", fault];
    this.#fitting.add(layout.id);
    return null;
  }
}
