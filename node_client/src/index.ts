/** Receives model weights from a weightbus publisher, verifies them, and applies them in place. */

export type { Hook, Update } from "./applying.js";
export type { ArrayOf, Dtype, TypedArray } from "./dtypes.js";
export {
  AddressError,
  ApplyError,
  ClosedError,
  KeysError,
  RefusedError,
  TimeoutError,
  TornError,
  WeightbusError,
} from "./errors.js";
export { toFloat32 } from "./floats.js";
export { readWorkerKeys, type WorkerKeys } from "./keys.js";
export type { Registered } from "./target.js";
export { type Tensor, tensor } from "./tensor.js";
export type { Deadline } from "./waiters.js";
export {
  type Running,
  type State,
  Worker,
  type WorkerEvents,
  type WorkerOptions,
} from "./worker.js";
