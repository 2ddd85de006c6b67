/**
 * Where a version waits until it is whole: the buffers of one model, and what they then hold.
 *
 * There are at most two. One holds a version that is complete and waits to be applied, the other
 * the version that is arriving. They are kept and used again: fresh memory costs more than the
 * network, since the kernel has to find and clear each page of it. Where patches may come, a third
 * holds what runs. (D3)
 */

import type { Layout } from "./layout.js";
import { BUFFERS_MAX } from "./limits.js";
import type { PatchId, Running } from "./messages.js";

/** The order of versions: by epoch, then by number. */
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

/** A version, whole and verified. */
export interface StagedVersion extends Key {
  readonly model: string;
  readonly layout: Layout;
  /** The data section; valid until the version is applied or dropped. */
  readonly data: Uint8Array;
  readonly digest: string;
  /** The publisher wants to know that it is staged, before it is applied. */
  readonly sayStaged: boolean;
  /** By which patch it came; null: as it is. */
  readonly patch: PatchId | null;
  /** Microseconds that decoding it took; 0 where there was none. */
  readonly decodeUs: number;
  /** What its publisher says of it. */
  readonly metadata: ReadonlyMap<string, string>;
}

/** The bytes of what runs here, which patches build on. */
export interface Base {
  readonly running: Running;
  readonly layout: Layout;
  /** They; a user who has them as a snapshot may change them, so they are held against the digest. */
  readonly data: Uint8Array;
  /** Whether they lie in a staging buffer, which is kept for this. */
  readonly own: boolean;
}

/** The staging buffers of one model. */
export class Buffers {
  readonly #free: Uint8Array[] = [];
  #nbytes = 0; // of each of these: as much as the version that was begun last
  #taken = 0;

  /** Make a buffer of this size, if there is none; return it. */
  reserve(nbytes: number): Uint8Array | null {
    if (nbytes === 0 || this.#taken > 0 || this.#free.length > 0) return null;
    try {
      const buffer = new Uint8Array(nbytes);
      this.#nbytes = nbytes;
      this.#free.push(buffer);
      return buffer;
    } catch (error) {
      if (!(error instanceof RangeError)) throw error; // whoever asks for it then is told
      return null;
    }
  }

  /** Whether a buffer serves no version yet. */
  unused(buffer: Uint8Array): boolean {
    return this.#free.includes(buffer);
  }

  /**
   * Return a buffer of this size, one used before if possible; null if all are in use.
   *
   * @throws RangeError - if there is no memory for it.
   */
  take(nbytes: number): Uint8Array | null {
    if (this.#taken >= BUFFERS_MAX) return null;
    if (this.#nbytes !== nbytes) {
      this.#free.length = 0; // the model has changed its size: the old memory will not fit again
      this.#nbytes = nbytes;
    }
    const buffer = this.#free.pop() ?? new Uint8Array(nbytes);
    this.#taken += 1;
    return buffer;
  }

  /** Take a buffer back. */
  giveBack(buffer: Uint8Array): void {
    this.#taken -= 1;
    this.add(buffer);
  }

  /** Nobody needs a buffer any more: it serves versions that come, if it fits them. */
  add(buffer: Uint8Array): void {
    if (buffer.length === this.#nbytes) this.#free.push(buffer);
  }

  /** A buffer stays with whoever has it: a user, a read that is under way, or what patches build on. */
  forget(): void {
    this.#taken -= 1;
  }
}
