/**
 * Bytes of versions and messages that were sealed once for everybody who has the group key: how they
 * are opened. (E2, E3)
 *
 * AES-256-GCM. From a group key comes a key for each version, by HKDF-SHA256 over all that names the
 * version and its encoding; under that a nonce is purpose and index, of which each stands for one
 * text for ever. What is published beside chunks has a key of its own, and counts up.
 *
 *     group key ──> id                              which group key it was
 *               ├─> key of messages ──> nonce: MESSAGE, count
 *               └─> key of a version ─> nonce: CHUNK, index | LAYOUT, 0
 */

import { createDecipheriv, type DecipherGCM, hkdfSync } from "node:crypto";
import { crc32c } from "./checksum.js";

export const AES_256_GCM = "aes-256-gcm"; // how an announcement names it
const SALT = "weightbus 1";
const KEY_BYTES = 32;
const ID_BYTES = 8;
const TAG_BYTES = 16;
// Opened at once: still in the cache for the checksum, and from memory that malloc has at hand. What
// is larger than 128 KiB it may fetch from the kernel for each piece, and give back there.
const PIECE_BYTES = 2 ** 16;

/** What a nonce is for. */
export type Purpose = 1 | 2 | 3;
export const [CHUNK, LAYOUT, MESSAGE] = [1, 2, 3] as const;

/** A version in one encoding. */
export interface Subject {
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /** Bytes of its data section, and of a chunk. */
  readonly nbytes: number;
  readonly chunk_bytes: number;
  readonly encoding: string;
  /** Epoch and number of the version that the encoding builds on. */
  readonly base?: readonly [epoch: number, version: number];
}

/** What all workers of a publisher have, and nobody else. */
export class GroupKey {
  /** Says which group key it is, and nothing of it. */
  readonly id: string;
  readonly ofMessages: Buffer;
  readonly #key: Buffer;

  constructor(hex: string) {
    this.#key = Buffer.from(hex, "hex");
    this.id = this.#derived("id", ID_BYTES).toString("hex");
    this.ofMessages = this.#derived("messages");
  }

  /** Return the key of the version of these `namesOf`. */
  ofVersion(names: Uint8Array): Buffer {
    return this.#derived(Buffer.concat([Buffer.from("version"), names]));
  }

  /** Return what was sealed as the message of this count, the tag behind it; null if it was not. */
  openMessage(count: number, sealed: Uint8Array): Uint8Array | null {
    const size = sealed.length - TAG_BYTES;
    if (size < 0) return null;
    const associated = Buffer.concat([u32(MESSAGE), u64(count), u64(size)]);
    const nonce = nonceOf(MESSAGE, count);
    const opening = new Opening(this.ofMessages, nonce, associated, sealed.subarray(size));
    const plain = new Uint8Array(size);
    return opening.opens(sealed.subarray(0, size), plain) === null ? null : plain;
  }

  #derived(info: string | Uint8Array, bytes = KEY_BYTES): Buffer {
    return Buffer.from(hkdfSync("sha256", this.#key, SALT, info, bytes));
  }
}

/** Return what a version's key is derived from: the same bytes for the same version, always. */
export function namesOf({ model, encoding, epoch, version, base = [0, 0] }: Subject): Buffer {
  const numbers = [epoch, version, ...base].map(u64);
  return Buffer.concat([text(model), text(encoding), ...numbers]);
}

/** Return what is bound to a payload of so many bytes. */
export function associatedOf(of: Subject, purpose: Purpose, index: number, size: number): Buffer {
  const sizes = [index, size, of.nbytes, of.chunk_bytes].map(u64);
  return Buffer.concat([namesOf(of), u32(purpose), ...sizes]);
}

/** Return the 12 bytes that a key is used with once. */
export function nonceOf(purpose: Purpose, index: number): Buffer {
  return Buffer.concat([u32(purpose), u64(index)]);
}

function text(string: string): Buffer {
  const bytes = Buffer.from(string);
  return Buffer.concat([Buffer.from([bytes.length]), bytes]);
}

function u32(value: number): Buffer {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32LE(value);
  return bytes;
}

function u64(value: number): Buffer {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64LE(BigInt(value));
  return bytes;
}

/**
 * Give memory back at once. For what is left to it, the garbage collector stops the event loop some
 * times for each version, and longer where other processes want the processor.
 */
function release({ buffer, byteLength }: Uint8Array): void {
  if (buffer instanceof ArrayBuffer && buffer.byteLength === byteLength) buffer.transfer(0);
}

/**
 * One sealed payload that is being opened, piece by piece, as it arrives.
 *
 * What it makes of a piece proves nothing before `proves` has said so of all.
 */
export class Opening {
  readonly #decipher: DecipherGCM;

  constructor(key: Uint8Array, nonce: Uint8Array, associated: Uint8Array, tag: Uint8Array) {
    this.#decipher = createDecipheriv(AES_256_GCM, key, nonce, { authTagLength: TAG_BYTES });
    this.#decipher.setAAD(associated);
    this.#decipher.setAuthTag(tag);
  }

  /** Open the next piece into memory of its size, which may be the same. */
  take(sealed: Uint8Array, to: Uint8Array): void {
    for (let at = 0; at < sealed.length; at += PIECE_BYTES) {
      const plain = this.#decipher.update(sealed.subarray(at, at + PIECE_BYTES));
      to.set(plain, at); // it knows no other way: the one copy
      release(plain);
    }
  }

  /** Whether all of it is what was sealed, nothing more and nothing less. */
  proves(): boolean {
    try {
      this.#decipher.final();
      return true;
    } catch {
      return false;
    }
  }

  /** Open all of it at once; return its CRC-32C, null if it is not what was sealed. */
  opens(sealed: Uint8Array, to: Uint8Array): number | null {
    let crc = 0;
    for (let begin = 0; begin < sealed.length; begin += PIECE_BYTES) {
      const place = to.subarray(begin, begin + PIECE_BYTES);
      this.take(sealed.subarray(begin, begin + PIECE_BYTES), place);
      crc = crc32c(place, crc);
    }
    return this.proves() ? crc : null;
  }
}
