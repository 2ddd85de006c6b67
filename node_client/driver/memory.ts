/** Allocates memory to register, as a description of tensors requires. */

import { arrayType, type Dtype, tensorBytes } from "../src/dtypes.js";
import type { Registered, Tensor } from "../src/index.js";

/** The dtype and shape of each tensor, by model and tensor name. */
export type Spec = Record<string, Record<string, { dtype: Dtype; shape: number[] }>>;

/** Allocate memory for each tensor of each model. */
export function memory(spec: Spec): Record<string, Registered> {
  const models = Object.entries(spec).map(([model, tensors]) => {
    const own = Object.entries(tensors).map(([name, { dtype, shape }]) => {
      const buffer = new ArrayBuffer(tensorBytes(dtype, shape));
      return [name, { dtype, shape, data: new (arrayType(dtype))(buffer) } as Tensor] as const;
    });
    return [model, Object.fromEntries(own)] as const;
  });
  return Object.fromEntries(models);
}
