/** Defines tensors: typed arrays with a shape and a dtype. */

import {
  arrayType,
  type Dtype,
  isDtype,
  naturalDtype,
  type TypedArray,
  tensorBytes,
} from "./dtypes.js";

/** A dense tensor in row-major order; `shape` is empty for a scalar. */
export interface Tensor {
  readonly dtype: Dtype;
  readonly shape: readonly number[];
  /** The elements, or their bits if JavaScript has no such number type (see `toFloat32`). */
  readonly data: TypedArray;
}

/**
 * Return a tensor that shares the memory of a typed array.
 *
 * By default the tensor has one dimension and the array's own dtype. Pass a dtype for elements that
 * are stored as bits, as in `tensor(new Uint16Array(6), [2, 3], "BF16")`.
 *
 * @throws TypeError - if the array cannot hold the dtype, or its size does not match the shape.
 */
export function tensor(data: TypedArray, shape?: readonly number[], dtype?: Dtype): Tensor {
  const own = dtype ?? naturalDtype(data);
  if (own === undefined || !isDtype(own)) {
    const given = String(own ?? data?.constructor?.name);
    throw new TypeError(`${given} is neither a typed array nor a dtype of safetensors`);
  }
  if (!(data instanceof arrayType(own))) {
    throw new TypeError(`${own} is held by ${arrayType(own).name}, not ${data.constructor.name}`);
  }
  const sizes = [...(shape ?? [data.length])];
  if (!sizes.every((size) => Number.isSafeInteger(size) && size >= 0)) {
    throw new TypeError(`shape [${sizes}]: sizes must be integers, and not negative`);
  }
  const nbytes = tensorBytes(own, sizes);
  if (nbytes !== data.byteLength) {
    throw new TypeError(`${own} [${sizes}] has ${nbytes} bytes, the array ${data.byteLength}`);
  }
  return { dtype: own, shape: sizes, data };
}

/** Return the memory of a tensor as bytes. */
export function bytesOf({ data }: Tensor): Uint8Array {
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
}
