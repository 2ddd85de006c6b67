/** Checks whether a worker can accept an announced version, and caches layouts. */

import type { FailedCode } from "./codes.js";
import { LayoutError, TooManyNamesError } from "./errors.js";
import { Layout, PREFIX_BYTES } from "./layout.js";
import {
  CHUNKS_MAX,
  LAYOUT_BYTES_GUARANTEED,
  LAYOUT_BYTES_MAX,
  LAYOUTS_BYTES_KEPT,
  LAYOUTS_KEPT,
  NAME_COST,
  NAMES_GUARANTEED,
} from "./limits.js";
import type { Announce } from "./messages.js";

const RAISE = "raise its bytesMax if that is meant";

/** Why a version fails: a code of the protocol, and a text. */
export type Fault = readonly [code: FailedCode, text: string];
export type Mismatch = (model: string, layout: Layout) => string;

/** The size limits of a worker. */
export interface Most {
  /** The largest version in bytes. A layout has the same limit, but at least 1 MiB. */
  readonly bytesMax: number;
  /** The largest layout of the registered tensors in bytes, if known. */
  readonly layoutBytesMax?: number | undefined;
}

/** Stores the known layouts of one model, and checks its announcements. */
export class Acceptance {
  readonly #layouts = new Map<string, { readonly layout: Layout; readonly bytes: number }>();
  readonly #accepted = new Set<string>(); // ids of known layouts that can be applied

  constructor(
    readonly model: string,
    /** Returns the reason that a layout cannot be applied; empty if it can. */
    readonly mismatch: Mismatch,
    readonly most: Most,
    /** The encryption that versions must have; null if they must not be encrypted. */
    readonly encryption: string | null = null,
  ) {}

  /** Return the layout of an announced version, if it is known. */
  layout(announce: Announce): Layout | undefined {
    return this.#layouts.get(announce.layout)?.layout;
  }

  /** Parse and store an announced layout. Return a fault if the layout is invalid, else null. */
  learn(announce: Announce, bytes: Uint8Array): Fault | null {
    if (bytes.length !== announce.layout_bytes) {
      const text = `the layout has ${bytes.length} bytes, but ${announce.layout_bytes} were announced`;
      return ["layout-invalid", text];
    }
    try {
      const layout = Layout.parse(bytes, this.#namesMax);
      if (layout.id !== announce.layout) {
        const text = `the layout hashes to ${layout.id}, but ${announce.layout} was announced`;
        return ["layout-invalid", text];
      }
      this.#store(layout, bytes.length);
      return null;
    } catch (error) {
      if (error instanceof TooManyNamesError) return ["too-large", `${error.message}; ${RAISE}`];
      if (error instanceof LayoutError) return ["layout-invalid", error.message];
      throw error;
    }
  }

  /** The most names of a layout, in proportion to `bytesMax`, since names need memory. */
  get #namesMax(): number {
    return Math.max(NAMES_GUARANTEED, Math.floor(this.most.bytesMax / NAME_COST));
  }

  /** Store a layout, and evict the oldest ones if there are too many. */
  #store(layout: Layout, bytes: number): void {
    this.#layouts.delete(layout.id);
    this.#layouts.set(layout.id, { layout, bytes });
    let sum = [...this.#layouts.values()].reduce((all, stored) => all + stored.bytes, 0);
    for (const [oldest, stored] of this.#layouts) {
      const tooMany = this.#layouts.size > LAYOUTS_KEPT || sum > LAYOUTS_BYTES_KEPT;
      if (!tooMany || oldest === layout.id) break;
      sum -= stored.bytes;
      this.#layouts.delete(oldest);
      this.#accepted.delete(oldest);
    }
  }

  /** Return a fault if a version or its layout is too large, else null. */
  excess({ nbytes, layout_bytes }: Announce): Fault | null {
    const { bytesMax, layoutBytesMax = LAYOUT_BYTES_MAX } = this.most;
    if (nbytes > bytesMax) {
      const text = `${nbytes} bytes; this worker accepts at most ${bytesMax}`;
      return ["too-large", `${text}: ${RAISE}`];
    }
    const text = `a layout of ${layout_bytes} bytes`;
    const limit = Math.max(bytesMax, LAYOUT_BYTES_GUARANTEED);
    if (layout_bytes > PREFIX_BYTES + limit) {
      return ["too-large", `${text}; this worker accepts at most ${limit}: ${RAISE}`];
    }
    if (layout_bytes <= PREFIX_BYTES + layoutBytesMax) return null;
    const here = `layouts of this worker's model have at most ${layoutBytesMax}`;
    return ["too-large", `${text}; ${here}: do the names of its tensors differ?`];
  }

  /** Return a fault if the version cannot be accepted; null if it can, or its layout is unknown. */
  fault(announce: Announce): Fault | null {
    const { encoding, encryption, nbytes, chunk_bytes } = announce; // W6
    if (encoding !== "raw" || encryption !== this.encryption) {
      const what = `encoding ${encoding}, encryption ${encryption ?? "none"}`; // E1
      return ["unsupported", `${what}; this worker accepts raw, ${this.encryption ?? "none"}`];
    }
    const excess = this.excess(announce);
    if (excess !== null) return excess;
    if (nbytes > CHUNKS_MAX * chunk_bytes) {
      const text = `${nbytes} bytes in chunks of ${chunk_bytes}`;
      return ["too-many-chunks", `${text} are more than ${CHUNKS_MAX} chunks`];
    }
    const layout = this.layout(announce);
    return layout === undefined ? null : this.#mismatch(announce, layout);
  }

  #mismatch(announce: Announce, layout: Layout): Fault | null {
    if (layout.nbytes !== announce.nbytes) {
      const text = `${announce.nbytes} bytes were announced, but the layout holds ${layout.nbytes}`;
      return ["layout-invalid", text];
    }
    if (this.#accepted.has(layout.id)) return null;
    const problem = this.mismatch(this.model, layout);
    if (problem) return ["layout-mismatch", problem];
    this.#accepted.add(layout.id);
    return null;
  }
}
