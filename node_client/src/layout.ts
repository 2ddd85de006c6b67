/**
 * Parses layouts: the tensors of a version and their positions, as a safetensors header.
 *
 *     0        8                      8+n
 *     ├────────┼───────────────────────┼──────────────────────────────┤
 *     │ n, u64 │ JSON of n bytes       │ data section: the tensors,   │
 *     │ little │                       │ row-major, without gaps      │
 *     └────────┴───────────────────────┴──────────────────────────────┘
 *
 * `Layout.parse` checks all rules (L1 to L8 of the protocol), since the bytes may be hostile.
 */

import { sha256 } from "./checksum.js";
import { BITS, type Dtype, isDtype, tensorBytes } from "./dtypes.js";
import { LayoutError } from "./errors.js";
import { type Entry, readHeader, shown as show } from "./layout_json.js";
import { LAYOUT_BYTES_MAX, NAME_BYTES_MAX, RANK_MAX } from "./limits.js";

export const PREFIX_BYTES = 8;

/**
 * The metadata key whose text gives the order of the names in the publisher's model: an index for
 * each name into a list, which has all tensors by position, then the aliases, sorted.
 */
const ORDER = "weightbus.order";

/** One tensor and its byte range in the data section. */
export interface TensorSpec {
  readonly name: string;
  readonly dtype: Dtype;
  readonly shape: readonly number[];
  readonly begin: number;
  readonly end: number;
}

/** A valid layout. */
export class Layout {
  private constructor(
    /** SHA-256 of all bytes of the layout. */
    readonly id: string,
    /** By position in the data section. */
    readonly tensors: readonly TensorSpec[],
    /** By alias: the name under which the tensor was published. */
    readonly aliases: ReadonlyMap<string, string>,
    readonly metadata: ReadonlyMap<string, string>,
    /** Bytes of the data section. */
    readonly nbytes: number,
    /** Every tensor by its name and aliases, in the order of the publisher's model. */
    readonly byName: ReadonlyMap<string, TensorSpec>,
  ) {}

  /**
   * Parse a layout. `bytes` includes the 8 bytes that give its length.
   *
   * @param namesMax - the maximum number of names, of tensors and metadata together.
   * @throws LayoutError - and no other error - if the bytes break a rule.
   */
  static parse(bytes: Uint8Array, namesMax?: number): Layout {
    const { entries, metadata } = readHeader(jsonOf(bytes), namesMax);
    const tensors = inOrder(entries);
    const byName = new Map(tensors.map((tensor) => [tensor.name, tensor]));
    const aliases = new Map<string, string>();
    for (const [name, value] of metadata) {
      const tensor = byName.has(name) ? undefined : byName.get(value);
      if (tensor?.name !== value) continue; // ordinary metadata, or an alias of an alias
      checkName(name);
      aliases.set(name, value);
    }
    for (const [alias, name] of aliases) byName.set(alias, byName.get(name) as TensorSpec);
    const nbytes = tensors.at(-1)?.end ?? 0;
    const order = aliases.has(ORDER) ? undefined : metadata.get(ORDER);
    const names = order === undefined ? byName : ordered(tensors, aliases, byName, order);
    return new Layout(sha256(bytes), tensors, aliases, metadata, nbytes, names);
  }
}

/** Return `byName` in the order that `text` gives, or unchanged if `text` is invalid. */
function ordered(
  tensors: readonly TensorSpec[],
  aliases: ReadonlyMap<string, string>,
  byName: ReadonlyMap<string, TensorSpec>,
  text: string,
): ReadonlyMap<string, TensorSpec> {
  const sorted = [...aliases.keys()].sort((a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b)));
  const inFile = [...tensors.map(({ name }) => name), ...sorted];
  const byIndex = new Map(inFile.map((name, index) => [String(index), name] as const));
  const names = new Map<string, TensorSpec>();
  for (const word of text.split(",")) {
    const name = byIndex.get(word);
    if (name === undefined || names.has(name)) return byName;
    names.set(name, byName.get(name) as TensorSpec);
  }
  return names.size === inFile.length ? names : byName;
}

/** Return the JSON of a layout. Throw a LayoutError if the prefix is not the length of that JSON. */
function jsonOf(bytes: Uint8Array): Uint8Array {
  const buffer = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const size = buffer.length < PREFIX_BYTES ? -1n : buffer.readBigUInt64LE();
  const length = PREFIX_BYTES + Number(size); // L1
  if (size < 0n || size > LAYOUT_BYTES_MAX || buffer.length !== length) {
    throw new LayoutError(
      `a malformed layout of ${buffer.length} bytes: it needs 8 bytes with the length of its JSON, ` +
        `then exactly that JSON, of at most ${LAYOUT_BYTES_MAX} bytes`,
    );
  }
  return buffer.subarray(PREFIX_BYTES);
}

/** Return the tensors by position. Throws LayoutError unless they are contiguous. */
function inOrder(entries: ReadonlyMap<string, Entry>): TensorSpec[] {
  const specs = [...entries].map(([name, entry]) => specOf(name, entry));
  specs.sort((a, b) => a.begin - b.begin || a.end - b.end); // L8
  let offset = 0;
  for (const { name, begin, end } of specs) {
    if (begin !== offset) {
      throw new LayoutError(`tensor ${show(name)} begins at ${begin}; it must begin at ${offset}`);
    }
    offset = end;
  }
  return specs;
}

/** Check an entry of the header, and return it with its name. */
function specOf(name: string, { dtype, shape, begin, end }: Entry): TensorSpec {
  checkName(name); // L4
  if (!isDtype(dtype)) {
    const known = Object.keys(BITS).join(", ");
    throw new LayoutError(
      `tensor ${show(name)} has dtype ${show(dtype)}; the known ones are ${known}`,
    );
  }
  if (shape.length > RANK_MAX) {
    throw new LayoutError(
      `tensor ${show(name)} has ${shape.length} dimensions; at most ${RANK_MAX} are allowed`,
    );
  }
  const nbytes = tensorBytes(dtype, shape); // L6, L7
  if (nbytes !== end - begin) {
    throw new LayoutError(
      `tensor ${show(name)}: bytes ${begin} to ${end} are not what ${dtype} [${shape}] fills` +
        (Number.isNaN(nbytes) ? ", which is not a number of bytes below 2^53 bits" : ""),
    );
  }
  return { name, dtype, shape, begin, end };
}

function checkName(name: string): void {
  const size = Buffer.byteLength(name);
  if (size >= 1 && size <= NAME_BYTES_MAX) return;
  throw new LayoutError(
    `the name ${show(name)} has ${size} bytes; allowed: 1 to ${NAME_BYTES_MAX}`,
  );
}
