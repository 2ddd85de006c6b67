/**
 * Manages the staging buffers of one model, and defines the versions in them.
 *
 * At most two buffers are in use: one for a complete version that waits to be applied, one for the
 * version that is arriving. Buffers are reused, since new memory costs more time than receiving:
 * the kernel must find and clear each page. If patches are accepted, a third buffer may hold the
 * bytes of the running version. (D3)
 */

import type { Layout } from "./layout.js";
import { BUFFERS_MAX } from "./limits.js";
import type { PatchId, Running } from "./messages.js";

/** The key of a version. Keys are ordered by epoch, then by version. */
export interface Key {
  readonly epoch: number;
  readonly version: number;
}

export function newer(one: Key, other: Key): boolean {
  return one.epoch > other.epoch || (one.epoch === other.epoch && one.version > other.version);
}

export function sameKey(one: Key | null, other: Key): boolean {
  return one !== null && one.epoch === other.epoch && one.version === other.version;
}

/** A complete, verified version. */
export interface StagedVersion extends Key {
  readonly model: string;
  readonly layout: Layout;
  /** The data section; valid until the version is applied or dropped. */
  readonly data: Uint8Array;
  readonly digest: string;
  /** Whether to report `staged` before the version is applied. */
  readonly reportStaged: boolean;
  /** The patch by which the version was received; null if it was received whole. */
  readonly patch: PatchId | null;
  /** Duration of the patch's decoding in microseconds; 0 without a patch. */
  readonly decodeUs: number;
  /** The metadata that was published with the version. */
  readonly metadata: ReadonlyMap<string, string>;
}

/** The bytes of the running version, which patches build on. */
export interface Base {
  readonly running: Running;
  readonly layout: Layout;
  /** The data section. A user may have changed a snapshot: check the bytes against the digest. */
  readonly data: Uint8Array;
  /** Whether `data` is a staging buffer, which may be reused once no patch needs it. */
  readonly own: boolean;
}

/** The staging buffers of one model. */
export class Buffers {
  readonly #free: Uint8Array[] = [];
  #nbytes = 0; // the size of each free buffer: that of the version started last
  #taken = 0;

  /** Allocate the first buffer. Return null if `nbytes` is 0, a buffer exists, or memory is short. */
  preallocate(nbytes: number): Uint8Array | null {
    if (nbytes === 0 || this.#taken > 0 || this.#free.length > 0) return null;
    try {
      const buffer = new Uint8Array(nbytes);
      this.#nbytes = nbytes;
      this.#free.push(buffer);
      return buffer;
    } catch (error) {
      if (!(error instanceof RangeError)) throw error; // `take` reports the error later
      return null;
    }
  }

  /** Whether a buffer is still free: no version uses it. */
  unused(buffer: Uint8Array): boolean {
    return this.#free.includes(buffer);
  }

  /**
   * Return a buffer of this size, reused if possible; null if `BUFFERS_MAX` buffers are in use.
   *
   * @throws RangeError - if there is no memory for it.
   */
  take(nbytes: number): Uint8Array | null {
    if (this.#taken >= BUFFERS_MAX) return null;
    if (this.#nbytes !== nbytes) {
      this.#free.length = 0; // the model's size changed: old buffers no longer fit
      this.#nbytes = nbytes;
    }
    const buffer = this.#free.pop() ?? new Uint8Array(nbytes);
    this.#taken += 1;
    return buffer;
  }

  /** Take back a buffer that a version no longer uses. */
  giveBack(buffer: Uint8Array): void {
    this.#taken -= 1;
    this.add(buffer);
  }

  /** Keep a buffer for later versions if it has the current size. */
  add(buffer: Uint8Array): void {
    if (buffer.length === this.#nbytes) this.#free.push(buffer);
  }

  /** No longer count a buffer as taken: the user, a pending read, or the patch base keeps it. */
  forget(): void {
    this.#taken -= 1;
  }
}
