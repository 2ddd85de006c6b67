/** Defines the dtypes, named as in safetensors, with their widths and JavaScript array classes. */

/** Widths in bits. */
export const BITS = {
  BOOL: 8,
  F4: 4,
  F6_E2M3: 6,
  F6_E3M2: 6,
  U8: 8,
  I8: 8,
  F8_E5M2: 8,
  F8_E4M3: 8,
  F8_E8M0: 8,
  F8_E4M3FNUZ: 8,
  F8_E5M2FNUZ: 8,
  I16: 16,
  U16: 16,
  F16: 16,
  BF16: 16,
  I32: 32,
  U32: 32,
  F32: 32,
  C64: 64,
  F64: 64,
  I64: 64,
  U64: 64,
} as const;

export type Dtype = keyof typeof BITS;

/**
 * The array class for the elements of a dtype. Elements for which JavaScript has no array class are
 * stored as bits: 16-bit floats in a Uint16Array, 8-bit floats and packed dtypes in a Uint8Array
 * (`floats.ts` converts floats). Complex numbers are pairs of floats.
 */
const ARRAYS = {
  BOOL: Uint8Array,
  F4: Uint8Array,
  F6_E2M3: Uint8Array,
  F6_E3M2: Uint8Array,
  U8: Uint8Array,
  I8: Int8Array,
  F8_E5M2: Uint8Array,
  F8_E4M3: Uint8Array,
  F8_E8M0: Uint8Array,
  F8_E4M3FNUZ: Uint8Array,
  F8_E5M2FNUZ: Uint8Array,
  I16: Int16Array,
  U16: Uint16Array,
  F16: Uint16Array,
  BF16: Uint16Array,
  I32: Int32Array,
  U32: Uint32Array,
  F32: Float32Array,
  C64: Float32Array,
  F64: Float64Array,
  I64: BigInt64Array,
  U64: BigUint64Array,
} as const;

/** An array of elements of dtype `D`. Its memory may be shared between threads. */
export type ArrayOf<D extends Dtype> = (typeof ARRAYS)[D]["prototype"];
export type TypedArray = ArrayOf<Dtype>;

const NATURAL = new Map<unknown, Dtype>([
  [Uint8Array, "U8"],
  [Int8Array, "I8"],
  [Uint16Array, "U16"],
  [Int16Array, "I16"],
  [Uint32Array, "U32"],
  [Int32Array, "I32"],
  [Float32Array, "F32"],
  [Float64Array, "F64"],
  [BigUint64Array, "U64"],
  [BigInt64Array, "I64"],
]);

export function isDtype(name: string): name is Dtype {
  return Object.hasOwn(BITS, name);
}

/** Return the array class of a dtype. */
export function arrayType(dtype: Dtype): (typeof ARRAYS)[Dtype] {
  return ARRAYS[dtype];
}

/** Return the default dtype of a typed array; undefined for any other value. */
export function naturalDtype(array: unknown): Dtype | undefined {
  if (!ArrayBuffer.isView(array)) return undefined;
  for (const [type, dtype] of NATURAL) {
    if (array instanceof (type as typeof Uint8Array)) return dtype;
  }
  return undefined;
}

/** Return the size of a tensor in bytes; NaN if the size is fractional, or 2^53 bits or more. */
export function tensorBytes(dtype: Dtype, shape: readonly number[]): number {
  const bits = BITS[dtype];
  let elements = 1;
  let extent = bits; // without sizes of 0: some readers multiply the sizes of empty tensors, too
  for (const size of shape) {
    elements *= size;
    extent *= Math.max(size, 1);
    // Products of doubles are exact below 2^53, and a larger product is never rounded to below it.
    if (extent > Number.MAX_SAFE_INTEGER) return Number.NaN;
  }
  const bytes = (elements * bits) / 8;
  return Number.isInteger(bytes) ? bytes : Number.NaN;
}
