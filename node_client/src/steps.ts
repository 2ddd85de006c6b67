/** Decodes the bodies of a patch's blocks: the elements that change, and their new values. */

import { BitReader } from "./bits.js";
import { PatchError } from "./errors.js";

export const BLOCK_ELEMENTS = 2 ** 18;
export const CLASSES = 16;
const COUNT_BITS_MAX = 19;
const RICE_MAX = 18;
const EVERY = 31; // instead of the width of the count of large steps: all have sizes
const NEVER = 2 ** 30; // above the rank of any element
const HEAD_BYTES = 3; // of a body in mode `overwrite`
const LOOKED_AT = 2 ** 16; // elements per step of the generator

/** The kind of elements: any, integers of 16 bits, or floats of 16 bits. */
export type Kind = "plain" | "integer" | "BF16" | "F16";

/** The coding parameters of one class's steps. */
interface Row {
  readonly class: number;
  readonly count: number;
  readonly gap: number;
  readonly large: number;
  readonly largeGap: number;
  readonly size: number;
}

/** The coding parameters of a group, with a row for each class that has steps. */
export interface Table {
  readonly classes: number;
  readonly rows: readonly Row[];
  /** Bytes of the table. */
  readonly nbytes: number;
}

/** Read the table of a group from the start of `bytes`. */
export function readTable(bytes: Uint8Array, kind: Kind): Table {
  const classes = bytes[0];
  if (classes !== 1 && (classes !== CLASSES || (kind !== "BF16" && kind !== "F16"))) {
    throw new PatchError(`a table of ${classes} classes; 1, or 16 of floats of 16 bits, may be`);
  }
  const reader = new BitReader(bytes.subarray(1, 64)); // more than any table has
  const rows = Array.from({ length: classes }, (_, number) => readRow(reader, number));
  return { classes, rows: rows.filter(({ count }) => count > 0), nbytes: 1 + reader.filled() };
}

function readRow(reader: BitReader, number: number): Row {
  const field = (width: number, most: number): number => {
    const value = reader.number(width);
    if (value <= most) return value;
    throw new PatchError(`a parameter of ${value} in its table; at most ${most} is allowed`);
  };
  const count = field(5, COUNT_BITS_MAX);
  const gap = count > 0 ? field(5, RICE_MAX) : 0;
  const large = count > 0 ? field(5, EVERY) : 0;
  const some = large > 0 && large < EVERY;
  if (some && large > COUNT_BITS_MAX) throw new PatchError(`a count of ${large} bits in its table`);
  const largeGap = some ? field(5, RICE_MAX) : 0;
  return { class: number, count, gap, large, largeGap, size: large > 0 ? field(4, 15) : 0 };
}

/** Changed elements: their positions in a block and, in mode `steps`, their new values. */
export class Changes {
  count = 0;
  positions: Uint32Array;
  values: Uint16Array;

  constructor(room = 1024) {
    this.positions = new Uint32Array(room);
    this.values = new Uint16Array(room);
  }

  /** Make room for `more` changes. */
  reserve(more: number): void {
    const needed = this.count + more;
    if (needed <= this.positions.length) return;
    const size = Math.max(needed, 2 * this.positions.length);
    const [positions, values] = [new Uint32Array(size), new Uint16Array(size)];
    positions.set(this.positions.subarray(0, this.count));
    values.set(this.values.subarray(0, this.count));
    this.positions = positions;
    this.values = values;
  }

  get nbytes(): number {
    return 6 * this.count;
  }

  /** Return a copy without spare capacity. */
  copy(): Changes {
    const copied = new Changes(this.count);
    copied.positions.set(this.positions.subarray(0, this.count));
    copied.values.set(this.values.subarray(0, this.count));
    copied.count = this.count;
    return copied;
  }

  /**
   * Add the change of the element with index `at`. The new value is `step` values above or below
   * the base's value. The caller has reserved room.
   */
  put(block: Uint8Array, at: number, step: number): void {
    const place = placeOf((block[2 * at] as number) | ((block[2 * at + 1] as number) << 8)) + step;
    if (place < 0 || place > 0xffff) {
      throw new PatchError("a step leads beyond 16 bits: is the patch applied to the wrong base?");
    }
    this.positions[this.count] = at;
    this.values[this.count] = place & 0x8000 ? place & 0x7fff : 0xffff - place;
    this.count += 1;
  }
}

/** Return the place of an element's bits in the numerical order of floats. */
function placeOf(element: number): number {
  return element & 0x8000 ? 0xffff - element : element | 0x8000;
}

/** The number of steps of a class, and how many of them are large. */
interface Counts {
  readonly count: number;
  readonly large: number;
}

/**
 * Read the number of steps of each class. Throws if there are more steps than elements, or than the
 * remaining bits can encode.
 */
function readCounts(reader: BitReader, { rows }: Table, elements: number): Counts[] {
  let total = 0;
  const counts = rows.map((row) => {
    const count = reader.number(row.count);
    const large = row.large > 0 && row.large < EVERY ? reader.number(row.large) : 0;
    if (large > count) throw new PatchError(`${large} of ${count} steps are marked as large`);
    total += count;
    return { count, large };
  });
  if (total > elements || 2 * total > reader.left) {
    throw new PatchError(`${total} steps of ${elements} elements in ${reader.left} bits`);
  }
  return counts;
}

/** Decodes blocks of steps. It reuses its memory from block to block. */
export class StepReader {
  // The ranks and steps of each class are contiguous, followed by the rank NEVER.
  readonly #ranks = new Uint32Array(BLOCK_ELEMENTS + CLASSES);
  readonly #steps = new Int32Array(BLOCK_ELEMENTS + CLASSES);
  readonly #which = new Uint32Array(BLOCK_ELEMENTS); // indices of the large steps of a class
  readonly #sizes = new Uint32Array(BLOCK_ELEMENTS);
  // For each class, the number of elements before its next step, and the index of that step.
  readonly #left = new Int32Array(CLASSES);
  readonly #next = new Int32Array(CLASSES);

  /** Decode a body in short steps, and append the changes. `block` has the base's bytes. */
  *read(
    body: Uint8Array,
    table: Table,
    block: Uint8Array,
    kind: Kind,
    changes: Changes,
  ): Generator<void> {
    const reader = new BitReader(body);
    const elements = block.length >> 1;
    const counts = readCounts(reader, table, elements);
    let begin = 0;
    for (const [index, row] of table.rows.entries()) {
      const { count, large } = counts[index] as Counts;
      reader.positions(this.#ranks, begin, count, row.gap, elements);
      yield;
      reader.signs(this.#steps, begin, count);
      this.#readSizes(reader, row, begin, count, large);
      begin += count;
      this.#ranks[begin] = NEVER;
      begin += 1;
      yield;
    }
    reader.end();
    changes.reserve(begin);
    if (table.classes === 1) this.#place(block, begin - 1, changes);
    else yield* this.#find(block, kind, table, counts, changes);
  }

  #readSizes(reader: BitReader, row: Row, begin: number, count: number, large: number): void {
    const steps = this.#steps.subarray(begin, begin + count);
    const sizes = this.#sizes;
    if (row.large === EVERY) {
      reader.golomb(sizes, count, row.size);
      for (let i = 0; i < count; i++) steps[i] = (steps[i] as number) * ((sizes[i] as number) + 1);
    } else if (row.large > 0) {
      reader.positions(this.#which, 0, large, row.largeGap, count);
      reader.golomb(sizes, large, row.size);
      for (let i = 0; i < large; i++) {
        const which = this.#which[i] as number;
        steps[which] = (steps[which] as number) * ((sizes[i] as number) + 2);
      }
    }
  }

  /** Add the changes of a block without classes. */
  #place(block: Uint8Array, count: number, changes: Changes): void {
    for (let i = 0; i < count; i++) {
      changes.put(block, this.#ranks[i] as number, this.#steps[i] as number);
    }
  }

  /** Find the changed elements by their ranks within their classes, and add their changes. */
  *#find(
    block: Uint8Array,
    kind: Kind,
    { rows }: Table,
    counts: readonly Counts[],
    changes: Changes,
  ): Generator<void> {
    this.#left.fill(NEVER);
    let begin = 0;
    for (const [index, row] of rows.entries()) {
      this.#next[row.class] = begin;
      this.#left[row.class] = this.#ranks[begin] as number;
      begin += (counts[index] as Counts).count + 1;
    }
    const wanted = changes.count + begin - rows.length;
    const classes = kind === "F16" ? F16 : BF16;
    const elements = block.length >> 1;
    for (let at = 0; at < elements; at += LOOKED_AT) {
      this.#look(block, at, Math.min(at + LOOKED_AT, elements), classes, changes);
      yield;
    }
    if (changes.count < wanted) {
      throw new PatchError(
        "the patch refers past the last element of a class: is it applied to the wrong base?",
      );
    }
  }

  /** Search the elements `from` to `to` of a block for changes. */
  #look(block: Uint8Array, from: number, to: number, classes: Uint8Array, changes: Changes): void {
    const [ranks, steps, left, next] = [this.#ranks, this.#steps, this.#left, this.#next];
    for (let at = from; at < to; at++) {
      const upper = ((block[2 * at] as number) >> 7) | ((block[2 * at + 1] as number) << 1);
      const number = classes[upper] as number;
      const before = left[number] as number;
      left[number] = before - 1;
      if (before > 0) continue;
      const step = next[number] as number;
      changes.put(block, at, steps[step] as number);
      next[number] = step + 1;
      left[number] = (ranks[step + 1] as number) - (ranks[step] as number) - 1;
    }
  }
}

/** The class of an element by its upper 9 bits. */
const BF16 = Uint8Array.from({ length: 512 }, (_, upper) => {
  return Math.min(Math.max((upper & 255) - 96, 0) >> 1, CLASSES - 1);
});
const F16 = Uint8Array.from({ length: 512 }, (_, upper) => (upper >> 4) & 15);

/**
 * Read the positions from a body in mode `overwrite`. The new values are at the end of the body.
 */
export function readOverwritten(
  body: Uint8Array,
  width: number,
  elements: number,
  changes: Changes,
): void {
  const [low = 0, middle = 0, high = 0] = body;
  const head = low | (middle << 8) | (high << 16);
  const [count, k] = [head & (2 ** 19 - 1), head >> 19];
  const codes = body.length - HEAD_BYTES - count * width;
  if (count === 0 || count > elements || codes < 0 || count > 8 * codes || k > RICE_MAX) {
    throw new PatchError(`${count} elements of ${width} bytes in a body of ${body.length}`);
  }
  const reader = new BitReader(body.subarray(HEAD_BYTES, HEAD_BYTES + codes));
  changes.reserve(count);
  reader.positions(changes.positions, changes.count, count, k, elements);
  reader.end();
  changes.count += count;
}
