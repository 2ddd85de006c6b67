/** Converts floats to float32, also those without a JavaScript array class: 16- and 8-bit floats. */

import type { Dtype } from "./dtypes.js";
import type { Tensor } from "./tensor.js";

/** The bit layout of a float format. */
interface Format {
  readonly exponent: number; // bits
  readonly mantissa: number; // bits
  readonly bias: number;
  /** The encoding of NaN: as in IEEE 754, all ones, or the bits of minus zero. */
  readonly special: "ieee" | "all ones" | "minus zero";
}

const FORMATS: Partial<Record<Dtype, Format>> = {
  F16: { exponent: 5, mantissa: 10, bias: 15, special: "ieee" },
  F8_E5M2: { exponent: 5, mantissa: 2, bias: 15, special: "ieee" },
  F8_E4M3: { exponent: 4, mantissa: 3, bias: 7, special: "all ones" },
  F8_E5M2FNUZ: { exponent: 5, mantissa: 2, bias: 16, special: "minus zero" },
  F8_E4M3FNUZ: { exponent: 4, mantissa: 3, bias: 8, special: "minus zero" },
};
const tables = new Map<Dtype, Float32Array>();

/**
 * Return the values of a float tensor (F64, F32, F16, BF16, or an 8-bit format) as a new array, in
 * the tensor's order.
 *
 * @throws TypeError - for other dtypes.
 */
export function toFloat32(tensor: Tensor): Float32Array {
  const { dtype, data } = tensor;
  if (dtype === "F32" || dtype === "F64") return Float32Array.from(data as Float64Array);
  if (dtype === "BF16") return fromBfloat16(data as Uint16Array);
  const table = tableOf(dtype);
  if (table === undefined) {
    throw new TypeError(`a tensor of ${dtype} has no floats: read its \`data\` instead`);
  }
  return Float32Array.from(data as Uint16Array, (bits) => table[bits] as number);
}

function fromBfloat16(bits: Uint16Array): Float32Array {
  const words = new Uint32Array(bits.length);
  for (let i = 0; i < bits.length; i++) words[i] = (bits[i] as number) << 16;
  return new Float32Array(words.buffer);
}

/** Return the value of every bit pattern of a dtype; undefined if the dtype has no float format. */
function tableOf(dtype: Dtype): Float32Array | undefined {
  const known = tables.get(dtype);
  if (known !== undefined) return known;
  const format = FORMATS[dtype];
  const value = dtype === "F8_E8M0" ? e8m0 : format && ((bits: number) => decode(format, bits));
  if (value === undefined) return undefined;
  const table = Float32Array.from({ length: dtype === "F16" ? 2 ** 16 : 2 ** 8 }, (_, i) =>
    value(i),
  );
  tables.set(dtype, table);
  return table;
}

function e8m0(bits: number): number {
  return bits === 0xff ? Number.NaN : 2 ** (bits - 127);
}

function decode(format: Format, bits: number): number {
  const { exponent: e, mantissa: m, bias, special } = format;
  const sign = bits >> (e + m) ? -1 : 1;
  const exponent = (bits >> m) & (2 ** e - 1);
  const mantissa = bits & (2 ** m - 1);
  if (special === "minus zero" && bits === 1 << (e + m)) return Number.NaN;
  if (special !== "minus zero" && exponent === 2 ** e - 1) {
    if (special === "ieee") return mantissa ? Number.NaN : sign * Number.POSITIVE_INFINITY;
    if (mantissa === 2 ** m - 1) return Number.NaN;
  }
  if (exponent === 0) return sign * mantissa * 2 ** (1 - bias - m);
  return sign * (1 + mantissa / 2 ** m) * 2 ** (exponent - bias);
}
