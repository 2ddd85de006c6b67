/**
 * Decodes the bodies of a patch's blocks: which elements change, and their new values.
 *
 * A *step* is how far a 16-bit element moves in the order of all values of its dtype. Floats may be
 * divided into classes by their exponents; each class has its own coding parameters (`docs/DELTA.md`).
 */

import { BitReader } from "./bits.js";
import { PatchError } from "./errors.js";

export const BLOCK_ELEMENTS = 2 ** 18;
export const CLASSES = 16;
const COUNT_BITS_MAX = 19;
const RICE_MAX = 18;
const ALL_LARGE = 31; // in place of the width of the count of large steps: every step has a size
const NO_RANK = 2 ** 30; // above the rank of any element
const HEAD_BYTES = 3; // of a body in mode `overwrite`
const PIECE_ELEMENTS = 2 ** 16; // elements to search per step of the generator

/** The kind of elements: without steps, integers of 16 bits, or floats of 16 bits. */
export type Kind = "plain" | "integer" | "BF16" | "F16";

/** The coding parameters of one class's steps. */
interface Row {
  readonly class: number;
  readonly count: number; // width of the number of steps
  readonly gap: number; // Rice parameter of the ranks of changed elements
  readonly large: number; // width of the number of large steps, or ALL_LARGE
  readonly largeGap: number; // Rice parameter of the indices of large steps
  readonly size: number; // Exp-Golomb order of the sizes of large steps
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
    throw new PatchError(`a table of ${classes} classes; 1, or 16 for 16-bit floats, is allowed`);
  }
  const reader = new BitReader(bytes.subarray(1, 64)); // more bytes than any table has
  const rows = Array.from({ length: classes }, (_, index) => readRow(reader, index));
  return {
    classes,
    rows: rows.filter(({ count }) => count > 0),
    nbytes: 1 + reader.checkPadding(),
  };
}

function readRow(reader: BitReader, index: number): Row {
  const field = (width: number, most: number): number => {
    const value = reader.readNumber(width);
    if (value <= most) return value;
    throw new PatchError(`a parameter of ${value} in its table; at most ${most} is allowed`);
  };
  const count = field(5, COUNT_BITS_MAX);
  const gap = count > 0 ? field(5, RICE_MAX) : 0;
  const large = count > 0 ? field(5, ALL_LARGE) : 0;
  const someLarge = large > 0 && large < ALL_LARGE;
  if (someLarge && large > COUNT_BITS_MAX)
    throw new PatchError(`a count of ${large} bits in its table; the most is ${COUNT_BITS_MAX}`);
  const largeGap = someLarge ? field(5, RICE_MAX) : 0;
  return { class: index, count, gap, large, largeGap, size: large > 0 ? field(4, 15) : 0 };
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

  /** Increase the capacity so that `more` changes can be added. */
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
   * Add the change of the element with index `at`: its new value is `step` values above the base's
   * value, or below it if negative. The caller has reserved the capacity.
   */
  put(block: Uint8Array, at: number, step: number): void {
    const element = (block[2 * at] as number) | ((block[2 * at + 1] as number) << 8);
    const order = orderOf(element) + step;
    if (order < 0 || order > 0xffff) {
      throw new PatchError("a step leads beyond 16 bits: is the patch applied to the wrong base?");
    }
    this.positions[this.count] = at;
    this.values[this.count] = order & 0x8000 ? order & 0x7fff : 0xffff - order;
    this.count += 1;
  }
}

/** Return the index of an element's bits in the numerical order of floats. */
function orderOf(element: number): number {
  return element & 0x8000 ? 0xffff - element : element | 0x8000;
}

/** The number of steps of a class, and the number of large ones among them. */
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
    const count = reader.readNumber(row.count);
    const large = row.large > 0 && row.large < ALL_LARGE ? reader.readNumber(row.large) : 0;
    if (large > count) throw new PatchError(`${large} of ${count} steps are marked as large`);
    total += count;
    return { count, large };
  });
  if (total > elements || 2 * total > reader.left) {
    throw new PatchError(`${total} steps exceed ${elements} elements or ${reader.left} bits`);
  }
  return counts;
}

/** Decodes blocks of steps. It reuses its memory from block to block. */
export class StepReader {
  // A rank is the index of a changed element within its class. The ranks and steps of each class
  // are contiguous, followed by NO_RANK.
  readonly #ranks = new Uint32Array(BLOCK_ELEMENTS + CLASSES);
  readonly #steps = new Int32Array(BLOCK_ELEMENTS + CLASSES);
  readonly #largeSteps = new Uint32Array(BLOCK_ELEMENTS); // indices of the large steps of a class
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
      reader.readPositions(this.#ranks, begin, count, row.gap, elements);
      yield;
      reader.readSigns(this.#steps, begin, count);
      this.#readSizes(reader, row, begin, count, large);
      begin += count;
      this.#ranks[begin] = NO_RANK;
      begin += 1;
      yield;
    }
    reader.checkEnd();
    changes.reserve(begin);
    if (table.classes === 1) this.#addByIndex(block, begin - 1, changes);
    else yield* this.#addByRank(block, kind, table, counts, changes);
  }

  #readSizes(reader: BitReader, row: Row, begin: number, count: number, large: number): void {
    const steps = this.#steps.subarray(begin, begin + count);
    const sizes = this.#sizes;
    if (row.large === ALL_LARGE) {
      reader.readGolomb(sizes, count, row.size);
      for (let i = 0; i < count; i++) steps[i] = (steps[i] as number) * ((sizes[i] as number) + 1);
    } else if (row.large > 0) {
      reader.readPositions(this.#largeSteps, 0, large, row.largeGap, count);
      reader.readGolomb(sizes, large, row.size);
      for (let i = 0; i < large; i++) {
        const step = this.#largeSteps[i] as number;
        steps[step] = (steps[step] as number) * ((sizes[i] as number) + 2);
      }
    }
  }

  /** Add the changes of a block with one class, whose ranks are the elements' indices. */
  #addByIndex(block: Uint8Array, count: number, changes: Changes): void {
    for (let i = 0; i < count; i++) {
      changes.put(block, this.#ranks[i] as number, this.#steps[i] as number);
    }
  }

  /** Find the changed elements by their ranks within their classes, and add their changes. */
  *#addByRank(
    block: Uint8Array,
    kind: Kind,
    { rows }: Table,
    counts: readonly Counts[],
    changes: Changes,
  ): Generator<void> {
    this.#left.fill(NO_RANK);
    let begin = 0;
    for (const [index, row] of rows.entries()) {
      this.#next[row.class] = begin;
      this.#left[row.class] = this.#ranks[begin] as number;
      begin += (counts[index] as Counts).count + 1;
    }
    const wanted = changes.count + begin - rows.length;
    const classes = kind === "F16" ? F16 : BF16;
    const elements = block.length >> 1;
    for (let at = 0; at < elements; at += PIECE_ELEMENTS) {
      this.#scan(block, at, Math.min(at + PIECE_ELEMENTS, elements), classes, changes);
      yield;
    }
    if (changes.count < wanted) {
      throw new PatchError(
        "the patch refers past the last element of a class: is it applied to the wrong base?",
      );
    }
  }

  /** Search the elements `from` to `to` of a block for changed ones, and add their changes. */
  #scan(block: Uint8Array, from: number, to: number, classes: Uint8Array, changes: Changes): void {
    const [ranks, steps, left, next] = [this.#ranks, this.#steps, this.#left, this.#next];
    for (let at = from; at < to; at++) {
      const upper = ((block[2 * at] as number) >> 7) | ((block[2 * at + 1] as number) << 1);
      const index = classes[upper] as number;
      const before = left[index] as number;
      left[index] = before - 1;
      if (before > 0) continue;
      const step = next[index] as number;
      changes.put(block, at, steps[step] as number);
      next[index] = step + 1;
      left[index] = (ranks[step + 1] as number) - (ranks[step] as number) - 1;
    }
  }
}

/** The class of an element, by the element's upper 9 bits. */
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
    throw new PatchError(`${count} elements of ${width} bytes do not fit a body of ${body.length}`);
  }
  const reader = new BitReader(body.subarray(HEAD_BYTES, HEAD_BYTES + codes));
  changes.reserve(count);
  reader.readPositions(changes.positions, changes.count, count, k, elements);
  reader.checkEnd();
  changes.count += count;
}
