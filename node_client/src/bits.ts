/** Reads bits, the lowest bit of each byte first, and the codes that patches use. */

import { PatchError } from "./errors.js";

const PEEKED = 25; // bits that `#peek` returns at least
const PADDING = 4; // zero bytes after the last byte, so that peeks never pass the end
const GOLOMB_BITS_MAX = 16; // bits of the size of a step

/** A cursor over a string of bits. */
export class BitReader {
  readonly #bytes: Uint8Array;
  readonly #end: number; // number of bits
  #at = 0;

  constructor(bytes: Uint8Array) {
    this.#bytes = new Uint8Array(bytes.length + PADDING);
    this.#bytes.set(bytes);
    this.#end = 8 * bytes.length;
  }

  get left(): number {
    return this.#end - this.#at;
  }

  /** Return the next bits, at least 25, without consuming them. Bits after the end are zero. */
  #peek(): number {
    const bytes = this.#bytes;
    const at = this.#at >> 3;
    const [a, b] = [bytes[at] as number, bytes[at + 1] as number];
    const [c, d] = [bytes[at + 2] as number, bytes[at + 3] as number];
    return (a | (b << 8) | (c << 16) | (d << 24)) >>> (this.#at & 7);
  }

  /** Read `width` bits, at most 25; the caller has checked that enough bits are left. */
  #take(width: number): number {
    const value = this.#peek() & ((1 << width) - 1);
    this.#at += width;
    return value;
  }

  #need(bits: number): void {
    if (bits > this.left) throw new PatchError(`it ends ${bits - this.left} bits early`);
  }

  /** Read a number of a fixed width. */
  number(width: number): number {
    this.#need(width);
    return this.#take(width);
  }

  /** Read a unary code, and return the number of zeros, at most `most`, before a 1. */
  #unary(most: number): number {
    let value = 0;
    for (;;) {
      const bits = this.#peek() | (1 << PEEKED);
      const zeros = 31 - Math.clz32(bits & -bits);
      value += zeros;
      if (value > most) throw new PatchError(`a code of ${value} or more; it may be ${most}`);
      if (zeros < PEEKED) {
        this.#at += zeros + 1; // the 1 is before the end, after which all bits are zero
        return value;
      }
      if (this.left <= zeros) throw new PatchError("a unary code has no end");
      this.#at += zeros;
    }
  }

  /**
   * Read `count` rising positions below `most`, into `to` from index `begin` on. Each position is
   * encoded as the gap from the one before, in a Rice code with the parameter `k`.
   */
  positions(to: Uint32Array, begin: number, count: number, k: number, most: number): void {
    for (let i = begin; i < begin + count; i++) to[i] = this.#unary(most >> k) << k;
    this.#need(count * k);
    let next = 0;
    for (let i = begin; i < begin + count; i++) {
      next += (to[i] as number) + this.#take(k);
      to[i] = next;
      next += 1;
      if (next > most) throw new PatchError(`a gap leads to ${next - 1} of ${most}`);
    }
  }

  /** Read `count` signs into `to` from index `begin` on: 1 for a clear bit, -1 for a set bit. */
  signs(to: Int32Array, begin: number, count: number): void {
    this.#need(count);
    for (let i = begin; i < begin + count; i++) to[i] = 1 - 2 * this.#take(1);
  }

  /** Read `count` numbers in Exp-Golomb codes of order `k` into `to`. */
  golomb(to: Uint32Array, count: number, k: number): void {
    let bits = 0;
    for (let i = 0; i < count; i++) {
      to[i] = k + this.#unary(GOLOMB_BITS_MAX - k);
      bits += to[i] as number;
    }
    this.#need(bits);
    for (let i = 0; i < count; i++) {
      const width = to[i] as number;
      to[i] = this.#take(width) + (1 << width) - (1 << k);
    }
  }

  /** Check that the unread bits of the current byte are zero. Return the number of bytes read. */
  filled(): number {
    const rest = -this.#at & 7;
    if ((this.#peek() & ((1 << rest) - 1)) !== 0) {
      throw new PatchError("the bits behind its codes are not zero");
    }
    return (this.#at + rest) >> 3;
  }

  /** Check that all bytes were read. */
  end(): void {
    if (8 * this.filled() < this.#end) {
      throw new PatchError(`${this.left} bits follow behind its codes`);
    }
  }
}
