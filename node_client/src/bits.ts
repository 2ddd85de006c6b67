/** Reads the codes of patches (unary, Rice, Exp-Golomb) from the bits of bytes, lowest bit first. */

import { PatchError } from "./errors.js";

const PEEKED = 25; // the least number of bits that `#peek` returns
const PADDING = 4; // zero bytes after the last byte, so that `#peek` never reads past the end
const GOLOMB_BITS_MAX = 16; // the most bits of an Exp-Golomb code after its unary part

/** A cursor over a sequence of bits. */
export class BitReader {
  readonly #bytes: Uint8Array;
  readonly #end: number; // the number of bits
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
  #readBits(width: number): number {
    const value = this.#peek() & ((1 << width) - 1);
    this.#at += width;
    return value;
  }

  #checkLeft(bits: number): void {
    if (bits > this.left) throw new PatchError(`it ends ${bits - this.left} bits early`);
  }

  /** Read an unsigned number of `width` bits, at most 25. */
  readNumber(width: number): number {
    this.#checkLeft(width);
    return this.#readBits(width);
  }

  /** Read a unary code: return the number of zeros, at most `most`, before the next 1. */
  #readUnary(most: number): number {
    let value = 0;
    for (;;) {
      const bits = this.#peek() | (1 << PEEKED);
      const zeros = 31 - Math.clz32(bits & -bits);
      value += zeros;
      if (value > most) throw new PatchError(`a code of ${value} or more; ${most} is allowed`);
      if (zeros < PEEKED) {
        this.#at += zeros + 1; // the 1 is not padding, whose bits are all zero
        return value;
      }
      if (this.left <= zeros) throw new PatchError("a unary code has no end");
      this.#at += zeros;
    }
  }

  /**
   * Read `count` rising positions below `most`, into `to` from index `begin` on. Each position is
   * encoded as the gap from the previous position, in a Rice code with the parameter `k`.
   */
  readPositions(to: Uint32Array, begin: number, count: number, k: number, most: number): void {
    for (let i = begin; i < begin + count; i++) to[i] = this.#readUnary(most >> k) << k;
    this.#checkLeft(count * k);
    let next = 0;
    for (let i = begin; i < begin + count; i++) {
      next += (to[i] as number) + this.#readBits(k);
      to[i] = next;
      next += 1;
      if (next > most) throw new PatchError(`a gap leads to index ${next - 1} of ${most}`);
    }
  }

  /** Read `count` signs into `to` from index `begin` on: 1 for a clear bit, -1 for a set bit. */
  readSigns(to: Int32Array, begin: number, count: number): void {
    this.#checkLeft(count);
    for (let i = begin; i < begin + count; i++) to[i] = 1 - 2 * this.#readBits(1);
  }

  /** Read `count` numbers in Exp-Golomb codes of order `k` into `to`. */
  readGolomb(to: Uint32Array, count: number, k: number): void {
    let bits = 0;
    for (let i = 0; i < count; i++) {
      to[i] = k + this.#readUnary(GOLOMB_BITS_MAX - k);
      bits += to[i] as number;
    }
    this.#checkLeft(bits);
    for (let i = 0; i < count; i++) {
      const width = to[i] as number;
      to[i] = this.#readBits(width) + (1 << width) - (1 << k);
    }
  }

  /** Check that the unread bits of the current byte are zero. Return the number of bytes read. */
  checkPadding(): number {
    const rest = -this.#at & 7;
    if ((this.#peek() & ((1 << rest) - 1)) !== 0) {
      throw new PatchError("the bits behind its codes are not zero");
    }
    return (this.#at + rest) >> 3;
  }

  /** Check that all bytes were read. */
  checkEnd(): void {
    if (8 * this.checkPadding() < this.#end) {
      throw new PatchError(`${this.left} bits follow after its codes`);
    }
  }
}
