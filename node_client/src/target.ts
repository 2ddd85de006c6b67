/** Where the versions of a model go: memory that the user registered, or snapshots. */

import { arrayType, naturalDtype, type TypedArray } from "./dtypes.js";
import type { Layout, TensorSpec } from "./layout.js";
import type { StagedVersion } from "./staging.js";
import { bytesOf, type Tensor, tensor } from "./tensor.js";

const DIFFERENCE_LINES_MAX = 20; // what a person reads before giving up

/** By name: a tensor, or a typed array that is one of one dimension. */
export type Registered = Readonly<Record<string, Tensor | TypedArray>>;

export interface Target {
  /** The bytes of the versions that are expected; 0 if nobody knows. */
  readonly nbytes: number;
  /** Whether what `apply` returns lies in the memory of the version, which must not be reused. */
  readonly keeps: boolean;
  /** Say why a layout cannot be applied; nothing if it can. */
  fault(layout: Layout): string;
  /** Make the version the one that users see: all of it, or nothing if it throws. */
  apply(staged: StagedVersion): ReadonlyMap<string, Tensor>;
}

/** Each version as new tensors, which nobody changes afterwards. */
export class SnapshotTarget implements Target {
  readonly nbytes = 0;
  readonly keeps = true;

  fault(): string {
    return "";
  }

  apply({ layout, data }: StagedVersion): ReadonlyMap<string, Tensor> {
    const tensors = new Map<string, Tensor>();
    for (const spec of layout.tensors) tensors.set(spec.name, viewOf(spec, data));
    for (const [alias, kept] of layout.aliases) tensors.set(alias, tensors.get(kept) as Tensor);
    return tensors;
  }
}

function viewOf({ dtype, shape, begin, end }: TensorSpec, data: Uint8Array): Tensor {
  const type = arrayType(dtype);
  const width = type.BYTES_PER_ELEMENT;
  // Planned layouts are aligned; others are valid, too, and then need a copy.
  const aligned = (data.byteOffset + begin) % width === 0;
  const { buffer, byteOffset } = aligned ? data.subarray(begin, end) : data.slice(begin, end);
  return { dtype, shape, data: new type(buffer as ArrayBuffer, byteOffset, (end - begin) / width) };
}

/** Memory of the user's, into which every version is copied. */
export class RegisteredTarget implements Target {
  readonly keeps = false;
  readonly nbytes: number;
  readonly #tensors = new Map<string, Tensor>();
  #order: readonly (readonly [spec: TensorSpec, name: string])[] = [];
  #ordered: Layout | null = null; // the layout that `#order` was made for

  constructor(registered: Registered) {
    let nbytes = 0;
    for (const [name, value] of Object.entries(registered)) {
      const own = asTensor(name, value);
      this.#tensors.set(name, own);
      nbytes += own.data.byteLength;
    }
    this.nbytes = nbytes;
  }

  fault(layout: Layout): string {
    const names = new Set([...layout.byName.keys(), ...this.#tensors.keys()]);
    const lines = [...names].sort().flatMap((name) => this.#difference(name, layout));
    lines.push(...this.#shared(layout));
    if (lines.length <= DIFFERENCE_LINES_MAX) return lines.join("\n");
    const kept = DIFFERENCE_LINES_MAX - 1;
    return [...lines.slice(0, kept), `... and ${lines.length - kept} more`].join("\n");
  }

  #difference(name: string, layout: Layout): string[] {
    const spec = layout.byName.get(name);
    const own = this.#tensors.get(name);
    if (spec === undefined) return [`${name}: ${own ? show(own) : ""} here, not published`];
    if (own === undefined) {
      return layout.aliases.has(name) ? [] : [`${name}: published as ${show(spec)}, not here`];
    }
    const lines: string[] = [];
    if (String(spec.shape) !== String(own.shape)) {
      lines.push(`${name}: shape ${list(spec.shape)} published, ${list(own.shape)} here`);
    }
    if (spec.dtype !== own.dtype) {
      lines.push(`${name}: dtype ${spec.dtype} published, ${own.dtype} here`);
    }
    return lines;
  }

  /** Memory under two names can hold two tensors only if they are one at the publisher, too. */
  #shared(layout: Layout): string[] {
    const lines: string[] = [];
    const places = new Map<ArrayBufferLike, string[]>();
    for (const [name, { data }] of this.#tensors) {
      if (data.byteLength === 0) continue;
      const others = places.get(data.buffer) ?? [];
      for (const other of others) {
        if (layout.byName.get(other) === layout.byName.get(name)) continue;
        if (overlap(data, (this.#tensors.get(other) as Tensor).data)) {
          lines.push(`${other} and ${name} share memory here, but are two tensors as published`);
        }
      }
      places.set(data.buffer, [...others, name]);
    }
    return lines;
  }

  apply({ layout, data }: StagedVersion): ReadonlyMap<string, Tensor> {
    this.#arrange(layout); // W15: all is checked before the first byte is written
    const copies = this.#order.map(([spec, name]) => {
      const own = this.#tensors.get(name) as Tensor;
      const { byteLength } = own.data;
      if (byteLength === spec.end - spec.begin) return [bytesOf(own), spec] as const;
      throw new Error(`the memory of ${name} has ${byteLength} bytes now: was it transferred?`);
    });
    for (const [to, { begin, end }] of copies) to.set(data.subarray(begin, end));
    return this.#tensors;
  }

  #arrange(layout: Layout): void {
    if (this.#ordered === layout) return;
    const specs = [...this.#tensors.keys()].map((name) => [layout.byName.get(name), name] as const);
    this.#order = specs.filter((pair): pair is [TensorSpec, string] => pair[0] !== undefined);
    this.#ordered = layout;
  }
}

function asTensor(name: string, value: Tensor | TypedArray): Tensor {
  try {
    if (ArrayBuffer.isView(value)) return tensor(value, [value.length], naturalDtype(value));
    return tensor(value.data, value.shape, value.dtype);
  } catch (error) {
    throw new TypeError(`tensor ${JSON.stringify(name)}: ${(error as Error).message}`);
  }
}

function overlap(one: TypedArray, other: TypedArray): boolean {
  return (
    one.byteOffset < other.byteOffset + other.byteLength &&
    other.byteOffset < one.byteOffset + one.byteLength
  );
}

function list(shape: readonly number[]): string {
  return `[${shape.join(", ")}]`;
}

function show({ dtype, shape }: Pick<Tensor, "dtype" | "shape">): string {
  return `${dtype} ${list(shape)}`;
}
