/** What a worker makes sure of before it takes a version: that it can be read, and that it fits. */

import { LayoutError } from "./errors.js";
import { Layout } from "./layout.js";
import { CHUNKS_MAX } from "./limits.js";
import type { Announce } from "./messages.js";

const LAYOUTS_KEPT = 4; // layouts remembered, so that a model that alternates sends none again

/** A code of section 13 of the protocol, and what is wrong in words. */
export type Fault = readonly [code: string, text: string];
export type Accepts = (model: string, layout: Layout) => string;

/** The layouts that a worker knows of one model, and what it takes. */
export class Acceptance {
  readonly #layouts = new Map<string, Layout>();
  readonly #accepted = new Set<string>(); // ids of layouts among them that can be applied here

  constructor(
    readonly model: string,
    /** Says why a layout cannot be applied here; nothing if it can. */
    readonly accepts: Accepts,
    /** The largest version to take, in bytes. */
    readonly bytesMax: number,
    /** How versions are sealed; null: they are in the clear. */
    readonly encryption: string | null = null,
  ) {}

  /** The layout of an announced version, if it is known. */
  layout(announce: Announce): Layout | undefined {
    return this.#layouts.get(announce.layout);
  }

  /** Remember a layout that came with an announcement; return what is wrong with it. */
  learn(announce: Announce, bytes: Uint8Array): Fault | null {
    const problem = this.#learn(announce, bytes);
    return problem ? ["layout-invalid", problem] : null;
  }

  #learn(announce: Announce, bytes: Uint8Array): string {
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
    this.#layouts.delete(layout.id);
    for (const oldest of this.#layouts.keys()) {
      if (this.#layouts.size < LAYOUTS_KEPT) break;
      this.#layouts.delete(oldest);
      this.#accepted.delete(oldest);
    }
    this.#layouts.set(layout.id, layout);
  }

  /** Why a version cannot be taken, as far as that is known yet. */
  fault(announce: Announce): Fault | null {
    const { encoding, encryption, nbytes, chunk_bytes } = announce; // W6
    if (encoding !== "raw" || encryption !== this.encryption) {
      const what = `encoding ${encoding}, encryption ${encryption ?? "none"}`; // E1
      return ["unsupported", `${what}; this worker takes raw, ${this.encryption ?? "none"}`];
    }
    if (nbytes > this.bytesMax) {
      const text = `${nbytes} bytes; this worker takes at most ${this.bytesMax}`;
      return ["too-large", `${text}: raise its bytesMax if that is meant`];
    }
    if (nbytes > CHUNKS_MAX * chunk_bytes) {
      const text = `${nbytes} bytes in chunks of ${chunk_bytes}`;
      return ["too-many-chunks", `${text} are more than ${CHUNKS_MAX} chunks`];
    }
    const layout = this.layout(announce);
    return layout === undefined ? null : this.#mismatch(announce, layout);
  }

  #mismatch(announce: Announce, layout: Layout): Fault | null {
    if (layout.nbytes !== announce.nbytes) {
      const text = `announced are ${announce.nbytes} bytes, the layout holds ${layout.nbytes}`;
      return ["layout-invalid", text];
    }
    if (this.#accepted.has(layout.id)) return null;
    const problem = this.accepts(this.model, layout);
    if (problem) return ["layout-mismatch", problem];
    this.#accepted.add(layout.id);
    return null;
  }
}
