/**
 * Converts floats of one dtype to another, rounded to the nearest value, ties to even.
 *
 * Every conversion goes through float32, which represents each bfloat16 and half exactly. So a
 * float64 that becomes a 16-bit float is rounded twice. The first rounding is *to odd*: the last bit
 * of its result is set if lower bits were lost, so that the second rounding is correct.
 */

import { arrayType, type Dtype, type TypedArray } from "./dtypes.js";

const FLOATS = new Set<Dtype>(["F64", "F32", "F16", "BF16"]);
const PIECE = 2 ** 14; // elements converted at once, so that their bits stay in the cache

/** Whether tensors of one dtype can be converted to another. */
export function castable(from: Dtype, to: Dtype): boolean {
  return from === to || (FLOATS.has(from) && FLOATS.has(to));
}

/**
 * Convert the elements of `from` into `to`.
 *
 * @returns The number of finite values that became infinite.
 */
export function convert(from: TypedArray, source: Dtype, to: TypedArray, target: Dtype): number {
  if (native(source) && native(target)) (to as Float64Array).set(from as Float64Array);
  else {
    for (let at = 0; at < from.length; at += PIECE) {
      const piece = from.subarray(at, at + PIECE);
      put(bitsOf(piece, source), to.subarray(at, at + piece.length), target);
    }
  }
  return WIDEST_FIRST.indexOf(source) < WIDEST_FIRST.indexOf(target)
    ? countOverflows(from, source, to, target)
    : 0;
}

const WIDEST_FIRST: readonly Dtype[] = ["F64", "F32", "BF16", "F16"]; // by range of values, widest first

/** The greatest finite value of each dtype. */
export const GREATEST: ReadonlyMap<Dtype, number> = new Map([
  ["F64", Number.MAX_VALUE],
  ["F32", 3.4028234663852886e38],
  ["BF16", 3.3895313892515355e38],
  ["F16", 65504],
]);

function countOverflows(from: TypedArray, source: Dtype, to: TypedArray, target: Dtype): number {
  let count = 0;
  for (let i = 0; i < to.length; i++) {
    if (!isInfinite(to[i] as number, target)) continue;
    if (!isInfinite(from[i] as number, source)) count += 1;
  }
  return count;
}

/** Whether a value is infinite; floats of 16 bits are given as bits. */
function isInfinite(value: number, dtype: Dtype): boolean {
  if (dtype === "F16") return (value & 0x7fff) === 0x7c00;
  if (dtype === "BF16") return (value & 0x7fff) === 0x7f80;
  return Math.abs(value) === Number.POSITIVE_INFINITY;
}

function native(dtype: Dtype): boolean {
  return dtype === "F64" || dtype === "F32";
}

const bits = new Uint32Array(PIECE);
const floats = new Float32Array(bits.buffer);

/** Return elements as bits of float32, in memory that the next call overwrites. */
function bitsOf(from: TypedArray, dtype: Dtype): Uint32Array {
  const found = bits.subarray(0, from.length);
  if (dtype === "F64") toOdd(from as Float64Array, found);
  else if (dtype === "F32") floats.set(from as Float32Array);
  else if (dtype === "F16") fromHalves(from as Uint16Array, found);
  else for (let i = 0; i < from.length; i++) found[i] = (from[i] as number) << 16;
  return found;
}

/** Store the float32 bits that `bitsOf` returned as elements of a dtype. */
function put(from: Uint32Array, to: TypedArray, dtype: Dtype): void {
  if (dtype === "F16") for (let i = 0; i < from.length; i++) to[i] = toHalf(from[i] as number);
  else if (dtype === "BF16")
    for (let i = 0; i < from.length; i++) to[i] = toBrain(from[i] as number);
  else (to as Float64Array).set(floats.subarray(0, from.length));
}

/** Round to float32 toward zero, and set the last bit if lower bits were lost. */
function toOdd(from: Float64Array, to: Uint32Array): void {
  floats.set(from); // rounds to the nearest
  for (let i = 0; i < from.length; i++) {
    const [exact, near] = [from[i] as number, floats[i] as number];
    if (near === exact || Number.isNaN(exact)) continue;
    const away = Math.abs(near) > Math.abs(exact) ? 1 : 0;
    to[i] = ((to[i] as number) - away) | 1;
  }
}

let halves: Uint32Array | null = null; // the float32 bits of each half: 256 KiB, made on first use

function fromHalves(from: Uint16Array, to: Uint32Array): void {
  halves ??= Uint32Array.from({ length: 2 ** 16 }, (_, half) => fromHalf(half));
  for (let i = 0; i < from.length; i++) to[i] = halves[from[i] as number] as number;
}

function fromHalf(half: number): number {
  const sign = (half & 0x8000) << 16;
  const exponent = (half >> 10) & 0x1f;
  const mantissa = half & 0x3ff;
  if (exponent === 31) return sign | 0x7f800000 | (mantissa << 13);
  if (exponent > 0) return sign | ((exponent + 112) << 23) | (mantissa << 13);
  const shift = Math.clz32(mantissa) - 21; // subnormal halves are normal float32
  return mantissa === 0
    ? sign
    : sign | ((113 - shift) << 23) | ((mantissa << (13 + shift)) & 0x7fffff);
}

/** Round the bits of a float32 to bfloat16. */
function toBrain(word: number): number {
  if ((word & 0x7fffffff) > 0x7f800000) return (word >>> 16) | 0x40; // NaN stays NaN
  return (word + 0x7fff + ((word >>> 16) & 1)) >>> 16;
}

function toHalf(word: number): number {
  const sign = (word >>> 16) & 0x8000;
  const size = word & 0x7fffffff;
  if (size > 0x7f800000) return sign | 0x7e00;
  if (size >= 0x47800000) return sign | 0x7c00; // 65536 and beyond
  if (size >= 0x38800000) return sign | rounded(size - 0x38000000, 13); // may carry to infinity
  if (size < 0x33000000) return sign; // less than half of the smallest subnormal
  const mantissa = (size & 0x7fffff) | 0x800000;
  return sign | rounded(mantissa, 126 - (size >>> 23));
}

/** Shift out the last `bitsOff` bits, and round to the nearest, ties to even. */
function rounded(word: number, bitsOff: number): number {
  const odd = (word >>> bitsOff) & 1;
  return (word + 2 ** (bitsOff - 1) - 1 + odd) >>> bitsOff;
}

/** Return bytes as an array of elements of a dtype; a copy if they are not aligned. */
export function elements(bytes: Uint8Array, dtype: Dtype): TypedArray {
  const type = arrayType(dtype);
  const width = type.BYTES_PER_ELEMENT;
  const { buffer, byteOffset } = bytes.byteOffset % width === 0 ? bytes : bytes.slice();
  return new type(buffer as ArrayBuffer, byteOffset, bytes.length / width);
}
