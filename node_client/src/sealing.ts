/**
 * Decrypts data that the publisher encrypted once for all workers that have the group key. (E2, E3)
 *
 * The encryption is AES-256-GCM. HKDF-SHA256 derives a key for each version from the group key and
 * the fields that identify the version and its encoding. A nonce consists of a purpose and an index,
 * and is used only once per key. Published messages other than chunks have a separate key, and a
 * rising count as the index of the nonce.
 *
 *     group key ──> id                              names the group key in messages
 *               ├─> key of messages ──> nonce: MESSAGE, count
 *               └─> key of a version ─> nonce: CHUNK, index | LAYOUT, 0
 */

import { createDecipheriv, type DecipherGCM, hkdfSync } from "node:crypto";
import { crc32c } from "./checksum.js";

export const AES_256_GCM = "aes-256-gcm"; // the name of the encryption in announcements
const SALT = "weightbus 1";
const KEY_BYTES = 32;
const ID_BYTES = 8;
const TAG_BYTES = 16;
// Bytes decrypted at once: few enough to stay in the cache until the checksum is computed, and below
// the 128 KiB above which malloc may map and unmap memory for each piece.
const PIECE_BYTES = 2 ** 16;

/** The purpose part of a nonce. */
export type Purpose = 1 | 2 | 3;
export const [CHUNK, LAYOUT, MESSAGE] = [1, 2, 3] as const;

/** The fields that identify a version in one encoding, and its sizes. */
export interface Subject {
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /** Bytes of the data section, or of the patch. */
  readonly nbytes: number;
  readonly chunk_bytes: number;
  readonly encoding: string;
  /** Epoch and version of a patch's base; omitted for a whole version. */
  readonly base?: readonly [epoch: number, version: number];
}

/** A key that all workers of a publisher share. */
export class GroupKey {
  /** Identifies the key without revealing it. */
  readonly id: string;
  readonly messageKey: Buffer;
  readonly #key: Buffer;

  constructor(hex: string) {
    this.#key = Buffer.from(hex, "hex");
    this.id = this.#derived("id", ID_BYTES).toString("hex");
    this.messageKey = this.#derived("messages");
  }

  /** Return the key that encrypts the chunks of a version, given what `namesOf` returns for it. */
  versionKey(names: Uint8Array): Buffer {
    return this.#derived(Buffer.concat([Buffer.from("version"), names]));
  }

  /** Decrypt the message with the sequence number `count`. Return null if it is not authentic. */
  openMessage(count: number, sealed: Uint8Array): Uint8Array | null {
    const size = sealed.length - TAG_BYTES;
    if (size < 0) return null;
    const associated = Buffer.concat([u32(MESSAGE), u64(count), u64(size)]);
    const nonce = nonceOf(MESSAGE, count);
    const opening = new Opening(this.messageKey, nonce, associated, sealed.subarray(size));
    const plain = new Uint8Array(size);
    return opening.decrypt(sealed.subarray(0, size), plain) === null ? null : plain;
  }

  #derived(info: string | Uint8Array, bytes = KEY_BYTES): Buffer {
    return Buffer.from(hkdfSync("sha256", this.#key, SALT, info, bytes));
  }
}

/** Return the bytes from which a version's key is derived, unique for the version and encoding. */
export function namesOf({ model, encoding, epoch, version, base = [0, 0] }: Subject): Buffer {
  const numbers = [epoch, version, ...base].map(u64);
  return Buffer.concat([text(model), text(encoding), ...numbers]);
}

/** Return the associated data of a payload of `size` bytes: fields that its tag covers, too. */
export function associatedOf(of: Subject, purpose: Purpose, index: number, size: number): Buffer {
  const sizes = [index, size, of.nbytes, of.chunk_bytes].map(u64);
  return Buffer.concat([namesOf(of), u32(purpose), ...sizes]);
}

/** Return a nonce of 12 bytes. Each nonce is used once per key. */
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
 * Free memory at once. Otherwise the garbage collector stops the event loop several times per
 * version, for longer on a busy host.
 */
function release({ buffer, byteLength }: Uint8Array): void {
  if (buffer instanceof ArrayBuffer && buffer.byteLength === byteLength) buffer.transfer(0);
}

/**
 * Decrypts one sealed payload, piece by piece, as the payload arrives.
 *
 * The decrypted bytes must not be trusted before `isAuthentic` has returned true.
 */
export class Opening {
  readonly #decipher: DecipherGCM;

  constructor(key: Uint8Array, nonce: Uint8Array, associated: Uint8Array, tag: Uint8Array) {
    this.#decipher = createDecipheriv(AES_256_GCM, key, nonce, { authTagLength: TAG_BYTES });
    this.#decipher.setAAD(associated);
    this.#decipher.setAuthTag(tag);
  }

  /** Decrypt the next bytes into `to`, which is as long as `sealed` and may be the same memory. */
  decryptNext(sealed: Uint8Array, to: Uint8Array): void {
    for (let at = 0; at < sealed.length; at += PIECE_BYTES) {
      const plain = this.#decipher.update(sealed.subarray(at, at + PIECE_BYTES));
      to.set(plain, at); // the API cannot decrypt in place: one copy
      release(plain);
    }
  }

  /** Whether the payload, once it is decrypted completely, is authentic. Call this once. */
  isAuthentic(): boolean {
    try {
      this.#decipher.final();
      return true;
    } catch {
      return false;
    }
  }

  /** Decrypt the whole payload. Return the CRC-32C of the plain bytes; null if they are forged. */
  decrypt(sealed: Uint8Array, to: Uint8Array): number | null {
    let crc = 0;
    for (let begin = 0; begin < sealed.length; begin += PIECE_BYTES) {
      const plain = to.subarray(begin, begin + PIECE_BYTES);
      this.decryptNext(sealed.subarray(begin, begin + PIECE_BYTES), plain);
      crc = crc32c(plain, crc);
    }
    return this.isAuthentic() ? crc : null;
  }
}
