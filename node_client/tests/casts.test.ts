/** Casts among floats, against a slow reading of the formats' definitions. */

import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { castable, convert, elements } from "../src/casts.js";
import { arrayType, BITS, type Dtype, type TypedArray } from "../src/dtypes.js";

/** Of each format: bits of the mantissa, the exponents of the smallest and of the largest number. */
const FORMATS = {
  F64: [52, -1022, 1023],
  F32: [23, -126, 127],
  F16: [10, -14, 15],
  BF16: [7, -126, 127],
} as const;
type Float = keyof typeof FORMATS;
const NAMES = Object.keys(FORMATS) as Float[];

/** Return the number of a format that is nearest, by the definition. */
function nearest(value: number, to: Float): number {
  const [mantissa, least, most] = FORMATS[to];
  if (to === "F64" || value === 0 || !Number.isFinite(value)) return value;
  const exponent = Math.max(least, Math.floor(Math.log2(Math.abs(value))));
  const step = 2 ** (exponent - mantissa); // exact, and so is the quotient
  const quotient = Math.abs(value) / step;
  const low = Math.floor(quotient);
  const up = quotient - low > 0.5 || (quotient - low === 0.5 && low % 2 === 1);
  const size = (up ? low + 1 : low) * step;
  return Math.sign(value) * (size > (2 - 2 ** -mantissa) * 2 ** most ? Infinity : size);
}

/** Return the numbers that some elements stand for, by the definition. */
function read(data: ArrayLike<number | bigint>, of: Float): number[] {
  if (of === "F64" || of === "F32") return Array.from(data, Number);
  const [mantissa, least, most] = FORMATS[of];
  return Array.from(data, (word) => {
    const sign = Number(word) >> 15 ? -1 : 1;
    const exponent = (Number(word) & 0x7fff) >> mantissa;
    const rest = (Number(word) & (2 ** mantissa - 1)) / 2 ** mantissa;
    if (exponent === most + 1 - least + 1) return rest ? Number.NaN : sign * Infinity;
    return sign * (exponent ? (1 + rest) * 2 ** (exponent - 1 + least) : rest * 2 ** least);
  });
}

function cast(data: TypedArray, from: Float, to: Float): number[] {
  const target = new (arrayType(to))(data.length);
  convert(data, from, target, to);
  return read(target, to);
}

const words = fc.array(fc.integer({ min: 0, max: 255 }), { minLength: 400, maxLength: 400 });
/** Doubles that lie at or beside the middle between two numbers of a small format. */
const ties = fc
  .array(
    fc.tuple(
      fc.integer({ min: -160, max: 140 }),
      fc.integer({ min: 0, max: 2 ** 12 }),
      fc.constantFrom(0, 2 ** -40, -(2 ** -40)),
    ),
    { minLength: 50 },
  )
  .map((rows) => Float64Array.from(rows, ([e, m, off]) => 2 ** e * (1 + m / 2 ** 12 + off)));

for (const from of NAMES) {
  for (const to of NAMES) {
    test(`${from} becomes the nearest ${to}`, () => {
      const check = (data: TypedArray) => {
        const expected = read(data, from).map((value) => nearest(value, to));
        assert.deepEqual(cast(data, from, to), expected);
      };
      fc.assert(
        fc.property(words, (bytes) => check(elements(Uint8Array.from(bytes), from))),
        { numRuns: 60 },
      );
      if (from === "F64" || from === "F32") {
        fc.assert(
          fc.property(ties, (values) => check(from === "F64" ? values : Float32Array.from(values))),
          { numRuns: 60 },
        );
      }
      if (BITS[from] === 16) check(Uint16Array.from({ length: 2 ** 16 }, (_, word) => word));
    });
  }
}

test("only floats of 16 bits and more are cast", () => {
  for (const [from, to] of [
    ["F32", "I32"],
    ["BOOL", "F16"],
    ["F8_E4M3", "F32"],
  ] as [Dtype, Dtype][]) {
    assert.ok(!castable(from, to) && castable(from, from));
  }
});
