/** Strings of bits, the lowest bit of each byte first, and the codes of a patch in them. */

import { PatchError } from "./errors.js";

const PEEKED = 25; // bits that are there wherever in a byte they begin
const PADDING = 4; // bytes behind the last, so that the last bits can be peeked at
const GOLOMB_BITS_MAX = 16; // no step has a size of more

/** Reads bits from the first to the last. */
export class BitReader {
  readonly #bytes: Uint8Array;
  readonly #end: number; // in bits
  #at = 0;

  constructor(bytes: Uint8Array) {
    this.#bytes = new Uint8Array(bytes.length + PADDING);
    this.#bytes.set(bytes);
    this.#end = 8 * bytes.length;
  }

  get left(): number {
    return this.#end - this.#at;
  }

  /** The next bits, zeros behind the end. */
  #peek(): number {
    const bytes = this.#bytes;
    const at = this.#at >> 3;
    const [a, b] = [bytes[at] as number, bytes[at + 1] as number];
    const [c, d] = [bytes[at + 2] as number, bytes[at + 3] as number];
    return (a | (b << 8) | (c << 16) | (d << 24)) >>> (this.#at & 7);
  }

  /** Take so many bits, at most 25, of which the caller knows that they are there. */
  #take(width: number): number {
    const value = this.#peek() & ((1 << width) - 1);
    this.#at += width;
    return value;
  }

  #need(bits: number): void {
    if (bits > this.left) throw new PatchError(`it ends ${bits - this.left} bits early`);
  }

  /** Return the next number of a fixed width. */
  number(width: number): number {
    this.#need(width);
    return this.#take(width);
  }

  #unary(most: number): number {
    let value = 0;
    for (;;) {
      const bits = this.#peek() | (1 << PEEKED);
      const zeros = 31 - Math.clz32(bits & -bits);
      value += zeros;
      if (value > most) throw new PatchError(`a code of ${value} or more; it may be ${most}`);
      if (zeros < PEEKED) {
        this.#at += zeros + 1; // it lies before the end, behind which are zeros
        return value;
      }
      if (this.left <= zeros) throw new PatchError("a unary code has no end");
      this.#at += zeros;
    }
  }

  /** Put positions, told by Rice codes of the gaps between them; all are below `most`. */
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

  /** Put a 1 for each bit that is not set, and a -1 for each that is. */
  signs(to: Int32Array, begin: number, count: number): void {
    this.#need(count);
    for (let i = begin; i < begin + count; i++) to[i] = 1 - 2 * this.#take(1);
  }

  /** Put numbers that were coded by Exp-Golomb. */
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

  /** Check that the bits that fill the last byte are zero; return the bytes that were begun. */
  filled(): number {
    const rest = -this.#at & 7;
    if ((this.#peek() & ((1 << rest) - 1)) !== 0) {
      throw new PatchError("the bits behind its codes are not zero");
    }
    return (this.#at + rest) >> 3;
  }

  /** Check that this is all there is. */
  end(): void {
    if (8 * this.filled() < this.#end) {
      throw new PatchError(`${this.left} bits follow behind its codes`);
    }
  }
}
