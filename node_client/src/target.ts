/** Checks and writes versions into their targets: registered memory, or new tensors (snapshots). */

import { castable, convert, elements, GREATEST } from "./casts.js";
import { arrayType, naturalDtype, type TypedArray } from "./dtypes.js";
import type { Layout, TensorSpec } from "./layout.js";
import { LAYOUT_BYTES_MAX } from "./limits.js";
import type { StagedVersion } from "./staging.js";
import { bytesOf, type Tensor, tensor } from "./tensor.js";
import { printable } from "./words.js";

// What the spaces, aliases and metadata that a publisher adds to a layout may take.
const LAYOUT_SLACK_BYTES = 2 ** 20;
const DIFFERENCE_LINES_MAX = 20; // in an error text
const AT_ONCE_BYTES = 2 ** 23; // copied in 1 to 2 ms; a larger version is written in slices
const PIECE_BYTES = 2 ** 20;
const CAST_COST = 8; // converting a byte takes at most this many times as long as copying it

/** Tensors by name; a typed array is a tensor of one dimension. */
export type Registered = Readonly<Record<string, Tensor | TypedArray>>;

/** Which differences between registered and published tensors are allowed. */
export interface Tolerance {
  /** Whether each published tensor must be registered. If not, unregistered tensors are ignored. */
  readonly strict: boolean;
  /** Whether floats of 16, 32 and 64 bits are converted if the registered dtype is another float. */
  readonly cast: boolean;
}

/** A version that passed all checks and is ready to be written. */
export interface Writing {
  /** The tensors for the user, once all pieces are written. */
  readonly tensors: ReadonlyMap<string, Tensor>;
  /** Whether to write in slices, so that the event loop is not blocked for long. */
  readonly large: boolean;
  /** Writes one piece per step. Throws if a tensor's memory was transferred. */
  readonly pieces: Iterable<void>;
  /** Return, after writing, a text on tensors whose finite values became infinite; empty if none. */
  note(): string;
}

/** What the versions of one model are written into. */
export interface Target {
  /** The expected size of a version in bytes; 0 if unknown. */
  readonly nbytes: number;
  /** The largest layout to accept, in bytes. */
  readonly layoutBytesMax: number;
  /** Whether the user's tensors use the version's memory, which must then not be reused. */
  readonly keeps: boolean;
  /** Return the reason that a layout cannot be applied; empty if it can. */
  fault(layout: Layout): string;
  /** Prepare to write a version. Throws, with nothing changed, if the version cannot be written. */
  begin(staged: StagedVersion): Writing;
}

/** A target that makes new tensors of each version. */
export class SnapshotTarget implements Target {
  readonly nbytes = 0;
  readonly layoutBytesMax = LAYOUT_BYTES_MAX;
  readonly keeps = true;

  fault(): string {
    return "";
  }

  begin(staged: StagedVersion): Writing {
    return { tensors: views(staged), large: false, pieces: [], note: () => "" };
  }
}

/** Return the tensors of a version. Aligned tensors share the version's memory; others are copies. */
export function views({ layout, data }: StagedVersion): ReadonlyMap<string, Tensor> {
  const tensors = new Map<string, Tensor>();
  const own = new Map<TensorSpec, Tensor>(); // shared by aliases
  for (const [name, spec] of layout.byName) {
    const { dtype, shape, begin, end } = spec;
    const tensor = own.get(spec) ?? {
      dtype,
      shape,
      data: elements(data.subarray(begin, end), dtype),
    };
    own.set(spec, tensor);
    tensors.set(name, tensor);
  }
  return tensors;
}

/** A target that copies every version into memory that the user registered. */
export class RegisteredTarget implements Target {
  readonly keeps = false;
  readonly nbytes: number;
  readonly layoutBytesMax: number;
  readonly #tensors = new Map<string, Tensor>();
  readonly #firstNames: ReadonlyMap<string, string>; // by name, the first name of the same memory
  #order: readonly (readonly [spec: TensorSpec, name: string])[] = []; // what to copy for `#ordered`
  // Names that share memory here, but are published as different tensors.
  #twins: readonly (readonly [name: string, other: string])[] = [];
  #ordered: Layout | null = null; // the layout that `#order` and `#twins` were made for

  constructor(
    registered: Registered,
    readonly tolerance: Tolerance = { strict: true, cast: false },
  ) {
    let nbytes = 0;
    for (const [name, value] of Object.entries(registered)) {
      const own = asTensor(name, value);
      this.#tensors.set(name, own);
    }
    this.#firstNames = sameMemory(this.#tensors);
    for (const [name, { data }] of this.#tensors) {
      if (this.#firstNames.get(name) === name) nbytes += data.byteLength;
    }
    this.nbytes = tolerance.strict && !tolerance.cast ? nbytes : 0;
    this.layoutBytesMax = tolerance.strict ? this.#layoutBytesMax(nbytes) : LAYOUT_BYTES_MAX;
  }

  /** Return the most bytes of JSON in a layout of these tensors; their data has `nbytes` bytes. */
  #layoutBytesMax(nbytes: number): number {
    let bound = LAYOUT_SLACK_BYTES;
    for (const [name, { dtype, shape }] of this.#tensors) {
      const entry = { [name]: { dtype, shape, data_offsets: [nbytes, nbytes] } };
      bound += 2 * Buffer.byteLength(JSON.stringify(entry));
    }
    return bound;
  }

  fault(layout: Layout): string {
    const names = new Set([...layout.byName.keys(), ...this.#tensors.keys()]);
    const common = [...this.#tensors.keys()].filter((name) => layout.byName.has(name));
    const filled = new Set(common.map((name) => this.#firstNames.get(name)));
    const used = new Set(common.map((name) => layout.byName.get(name)));
    const compared = [...names].filter((name) => {
      const spec = layout.byName.get(name);
      if (this.#tensors.has(name))
        return spec !== undefined || !filled.has(this.#firstNames.get(name));
      return !used.has(spec); // else it is registered under another name
    });
    const lines = compared.sort().flatMap((name) => this.#difference(name, layout));
    if (lines.length <= DIFFERENCE_LINES_MAX) return lines.join("\n");
    const shown = DIFFERENCE_LINES_MAX - 1;
    return [...lines.slice(0, shown), `... and ${lines.length - shown} more`].join("\n");
  }

  #difference(tensorName: string, layout: Layout): string[] {
    const spec = layout.byName.get(tensorName);
    const own = this.#tensors.get(tensorName);
    const name = printable(tensorName);
    if (spec === undefined) return [`${name}: ${own ? show(own) : ""} here, not published`];
    if (own === undefined) {
      return this.tolerance.strict ? [`${name}: published as ${show(spec)}, not here`] : [];
    }
    const lines: string[] = [];
    if (String(spec.shape) !== String(own.shape)) {
      lines.push(`${name}: shape ${list(spec.shape)} published, ${list(own.shape)} here`);
    }
    const { cast } = this.tolerance;
    if (!(cast ? castable(spec.dtype, own.dtype) : spec.dtype === own.dtype)) {
      lines.push(`${name}: dtype ${spec.dtype} published, ${own.dtype} here`);
    }
    return lines;
  }

  begin({ layout, data }: StagedVersion): Writing {
    this.#arrange(layout); // W15: check all before the first byte is written
    for (const twins of this.#twins) {
      const [one, other] = twins.map((name) => {
        const { begin, end } = layout.byName.get(name) as TensorSpec;
        return data.subarray(begin, end);
      }) as [Uint8Array, Uint8Array];
      if (Buffer.compare(one, other) !== 0) {
        throw new Error(
          `${twins.join(" and ")} are one tensor here, but were published with different values: ` +
            "give each tensor memory of its own, or tie them at the publisher",
        );
      }
    }
    const copies = this.#order.map(([spec, name]) => {
      return new Copy(name, spec, data, this.#tensors.get(name) as Tensor);
    });
    for (const copy of copies) copy.check();
    const cost = copies.reduce((sum, copy) => sum + copy.cost, 0);
    const note = () => overflow(copies);
    return {
      tensors: this.#tensors,
      large: cost > AT_ONCE_BYTES,
      pieces: writePieces(copies),
      note,
    };
  }

  /** Determine `#order` and `#twins` for a layout. */
  #arrange(layout: Layout): void {
    if (this.#ordered === layout) return;
    const written = new Map<string | undefined, string>();
    const order: (readonly [TensorSpec, string])[] = [];
    const twins: (readonly [string, string])[] = [];
    for (const name of this.#tensors.keys()) {
      const spec = layout.byName.get(name);
      if (spec === undefined) continue; // its memory is published under another name
      const other = written.get(this.#firstNames.get(name));
      if (other === undefined) {
        written.set(this.#firstNames.get(name), name);
        order.push([spec, name]);
      } else if (layout.byName.get(other) !== spec) twins.push([other, name]);
    }
    this.#order = order;
    this.#twins = twins;
    this.#ordered = layout;
  }
}

const SHOWN = 4; // tensors named in a note: the first ones show where the overflow starts
const NAME_SHOWN = 256; // characters of each name

/** Return a text on the tensors whose finite values became infinite; empty if there are none. */
function overflow(copies: readonly Copy[]): string {
  const overflown = copies.filter((copy) => copy.lost > 0);
  const words = overflown.slice(0, SHOWN).map(({ name, lost, to: { dtype } }) => {
    const values = lost === 1 ? "value is" : "values are";
    const most = `${Number(GREATEST.get(dtype)?.toPrecision(6))}`;
    const shown = printable(name, NAME_SHOWN);
    return `${shown}: ${lost} finite ${values} beyond ${dtype} (at most ${most})`;
  });
  const more = overflown.length - words.length;
  if (more > 0) words.push(`and likewise in ${more} more tensor${more > 1 ? "s" : ""}`);
  return words.join("; ");
}

/** The copy of one tensor from a version into registered memory. */
class Copy {
  lost = 0; // finite values that became infinite
  readonly from: Uint8Array;
  readonly elements: number;

  constructor(
    readonly name: string,
    readonly spec: TensorSpec,
    data: Uint8Array,
    readonly to: Tensor,
  ) {
    this.from = data.subarray(spec.begin, spec.end);
    this.elements = this.from.length / this.width;
  }

  /** Bytes of an element in the published dtype. */
  get width(): number {
    return arrayType(this.spec.dtype).BYTES_PER_ELEMENT;
  }

  /** How long the copy takes, as the number of bytes that are copied in this time. */
  get cost(): number {
    return this.from.length * (this.casts ? CAST_COST : 1);
  }

  get casts(): boolean {
    return this.spec.dtype !== this.to.dtype;
  }

  /** Throw if the registered memory was detached, for example by a transfer to another thread. */
  check(): void {
    const { data } = this.to;
    if (data.length === this.elements) return;
    const bytes = data.byteLength;
    throw new Error(`the memory of ${this.name} has ${bytes} bytes now: was it transferred?`);
  }

  /** Copy or convert the elements `begin` to `end`. */
  write(begin: number, end: number): void {
    this.check();
    const bytes = this.from.subarray(begin * this.width, end * this.width);
    if (this.casts) {
      const to = this.to.data.subarray(begin, end);
      const from = elements(bytes, this.spec.dtype);
      this.lost += convert(from, this.spec.dtype, to, this.to.dtype);
    } else bytesOf(this.to).set(bytes, begin * this.width);
  }
}

/** Write one tensor after another, one piece per step. */
function* writePieces(copies: readonly Copy[]): Generator<void> {
  for (const copy of copies) {
    const step = PIECE_BYTES / copy.width / (copy.casts ? CAST_COST : 1);
    for (let at = 0; at < copy.elements; at += step) {
      copy.write(at, Math.min(at + step, copy.elements));
      yield;
    }
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

/**
 * Map each name to the first name of the same memory.
 *
 * @throws TypeError - if two different tensors overlap in memory.
 */
function sameMemory(tensors: ReadonlyMap<string, Tensor>): ReadonlyMap<string, string> {
  const same = new Map([...tensors.keys()].map((name) => [name, name] as const));
  const byBuffer = new Map<ArrayBufferLike, [name: string, own: Tensor][]>();
  for (const [name, own] of tensors) {
    if (own.data.byteLength === 0) continue;
    const others = byBuffer.get(own.data.buffer);
    if (others === undefined) byBuffer.set(own.data.buffer, [[name, own]]);
    else others.push([name, own]);
  }
  for (const entries of byBuffer.values()) {
    entries.sort(([, a], [, b]) => a.data.byteOffset - b.data.byteOffset);
    let [first, last] = entries[0] as [string, Tensor];
    for (const [name, own] of entries.slice(1)) {
      if (isSameMemory(first, last, name, own)) same.set(name, first);
      else [first, last] = [name, own];
    }
  }
  return same;
}

/**
 * Whether a tensor has the same memory as `last`, which begins no later. Throws TypeError if the two
 * only overlap.
 */
function isSameMemory(first: string, last: Tensor, name: string, own: Tensor): boolean {
  const begin = own.data.byteOffset;
  if (begin >= last.data.byteOffset + last.data.byteLength) return false;
  if (begin === last.data.byteOffset && show(own) === show(last)) return true;
  throw new TypeError(
    `${first} and ${name} share a part of their memory, which cannot hold both: ` +
      "give each tensor memory of its own",
  );
}

function list(shape: readonly number[]): string {
  return `[${shape.join(", ")}]`;
}

function show({ dtype, shape }: Pick<Tensor, "dtype" | "shape">): string {
  return `${dtype} ${list(shape)}`;
}
