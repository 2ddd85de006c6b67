/**
 * Decodes patches (encoding `delta-1`), which turn one version into another of the same layout.
 *
 * `docs/DELTA.md` at the root of the repository defines the format. A patch is checked completely
 * against its base before anything is written. This check decodes the patch's changes, and keeps them
 * for writing, up to a limit; changes beyond the limit are decoded again. Generators do long work in
 * steps of at most a few milliseconds.
 */

import { digesting } from "./checksum.js";
import { BITS, type Dtype } from "./dtypes.js";
import { PatchError } from "./errors.js";
import type { Layout } from "./layout.js";
import { CHUNK_BYTES_MAX, CHUNKS_MAX } from "./limits.js";
import { atOnce, pieces } from "./slices.js";
import {
  BLOCK_ELEMENTS,
  Changes,
  type Kind,
  readOverwritten,
  readTable,
  StepReader,
  type Table,
} from "./steps.js";

const MAGIC = "WBDELTA1";
const HEADER_BYTES = 120;
const GROUP_BLOCKS = 16;
const ENTRY_BYTES_MAX = 4;
const KEPT = 8; // decoded changes are kept up to 1/KEPT of the data section's size
const KINDS: Partial<Record<Dtype, Kind>> = {
  BF16: "BF16",
  F16: "F16",
  I16: "integer",
  U16: "integer",
};
const MODES = ["unchanged", "steps", "overwrite", "raw"] as const;
type Mode = (typeof MODES)[number];

/** A run of adjacent elements of one dtype: bytes `begin` to `end` of the data section. */
interface Block {
  readonly begin: number;
  readonly end: number;
  readonly width: number; // bytes of an element; 1 for packed dtypes
  readonly kind: Kind;
}

/** A block that changes, with its encoded changes. */
interface Part {
  readonly block: Block;
  readonly mode: Mode;
  readonly body: Uint8Array;
  readonly table: Table | undefined;
}

/** Return one block for each run of adjacent tensors of one dtype. */
function runsOf(layout: Layout): Block[] {
  const runs: Block[] = [];
  let previous: Dtype | undefined;
  for (const { dtype, begin, end } of layout.tensors) {
    if (begin === end) continue;
    const last = dtype === previous ? runs.pop() : undefined;
    const width = Math.max(BITS[dtype] >> 3, 1);
    runs.push({ begin: last?.begin ?? begin, end, width, kind: KINDS[dtype] ?? "plain" });
    previous = dtype;
  }
  return runs;
}

/** Split a block into blocks of `elements` elements. The last block may be shorter. */
function* split(whole: Block, elements: number): Generator<Block> {
  const step = elements * whole.width;
  for (let begin = whole.begin; begin < whole.end; begin += step) {
    yield { ...whole, begin, end: Math.min(begin + step, whole.end) };
  }
}

/** Return the result of `work`. If it throws a PatchError, add the block's offset to the text. */
function forBlock<T>(block: Block, work: () => T): T {
  try {
    return work();
  } catch (error) {
    throw inBlock(block, error);
  }
}

function inBlock(block: Block, error: unknown): unknown {
  if (!(error instanceof PatchError)) return error;
  return new PatchError(`the block at byte ${block.begin}: ${error.message}`);
}

export class Patch {
  readonly layoutId: string;
  readonly nbytes: number;
  /** The chunk size of both digests. */
  readonly chunkBytes: number;
  /** The digest of the base. */
  readonly base: string;
  /** The digest of the target. */
  readonly target: string;
  readonly #data: Buffer;
  #at = HEADER_BYTES;

  /**
   * Read the header of a patch.
   *
   * @throws PatchError - if the bytes are not a patch, or a patch for another layout.
   */
  constructor(
    readonly layout: Layout,
    bytes: Uint8Array,
  ) {
    const data = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.#data = data;
    if (data.length < HEADER_BYTES || data.toString("latin1", 0, 8) !== MAGIC) {
      const seen = data.subarray(0, 8).toString("hex");
      throw new PatchError(
        `${data.length} bytes that begin with ${seen} are not a patch, which has ${HEADER_BYTES} ` +
          `at least, and begins with ${MAGIC}`,
      );
    }
    const flags = data.readUInt32LE(8);
    if (flags !== 0) throw new PatchError(`a patch has flags ${flags}; none are known here`);
    this.chunkBytes = data.readUInt32LE(12);
    this.nbytes = Number(data.readBigUInt64LE(16));
    const [id, base, target] = [24, 56, 88].map((at) => data.toString("hex", at, at + 32));
    this.layoutId = id ?? "";
    this.base = base ?? "";
    this.target = target ?? "";
    this.#check(layout);
  }

  #check(layout: Layout): void {
    if (this.layoutId !== layout.id || this.nbytes !== layout.nbytes) {
      throw new PatchError(
        `a patch for the layout ${this.layoutId.slice(0, 12)} of ${this.nbytes} bytes; here is ` +
          `${layout.id.slice(0, 12)} of ${layout.nbytes}`,
      );
    }
    const tooMany = this.nbytes > CHUNKS_MAX * this.chunkBytes;
    if (this.chunkBytes < 1 || this.chunkBytes > CHUNK_BYTES_MAX || tooMany) {
      throw new PatchError(
        `digests of ${this.nbytes} bytes by chunks of ${this.chunkBytes}; 1 to ` +
          `${CHUNK_BYTES_MAX} are allowed, and ${CHUNKS_MAX} chunks`,
      );
    }
  }

  /** Read the parts of all blocks, and check all that can be checked without the base. */
  *#read(): Generator<void, Part[]> {
    this.#at = HEADER_BYTES;
    const parts: Part[] = [];
    for (const run of runsOf(this.layout)) {
      for (const group of split(run, GROUP_BLOCKS * BLOCK_ELEMENTS)) {
        parts.push(...this.#readGroup([...split(group, BLOCK_ELEMENTS)]));
        yield;
      }
    }
    const left = this.#data.length - this.#at;
    if (left > 0) throw new PatchError(`${left} bytes follow behind the last block`);
    return parts;
  }

  #readGroup(blocks: readonly Block[]): Part[] {
    const parts: Part[] = [];
    const entries = blocks.map((block) => forBlock(block, () => this.#readEntry(block)));
    const [first] = blocks;
    let table: Table | undefined;
    if (first !== undefined && entries.some(({ mode }) => mode === "steps")) {
      table = forBlock(first, () => readTable(this.#data.subarray(this.#at), first.kind));
      this.#at += table.nbytes;
    }
    for (const { block, mode, size } of entries) {
      const body = this.#data.subarray(this.#at, this.#at + size);
      if (body.length < size) {
        throw new PatchError(`the patch ends in the body of the block at byte ${block.begin}`);
      }
      if (mode !== "unchanged") parts.push({ block, mode, body, table });
      this.#at += size;
    }
    return parts;
  }

  #readEntry(block: Block): { block: Block; mode: Mode; size: number } {
    let value = 0;
    for (let index = 0; index < ENTRY_BYTES_MAX; index++) {
      const byte = this.#data[this.#at];
      if (byte === undefined) throw new PatchError("the patch ends in its entry");
      this.#at += 1;
      value |= (byte & 127) << (7 * index);
      if (byte === 0 && index > 0) throw new PatchError("its entry is longer than it need be");
      if (byte > 127) continue;
      const mode = MODES[value & 3] as Mode;
      const size = value >> 2;
      checkSize(block, mode, size);
      return { block, mode, size };
    }
    throw new PatchError(`its entry has more than ${ENTRY_BYTES_MAX} bytes`);
  }

  /**
   * Change `data` from the base to the target.
   *
   * @param digest - the digest of `data`, if it is known.
   * @throws PatchError - if `data` is not the base, or a block is malformed: `data` is unchanged.
   * Also if the result is not the target: `data` must not be used.
   */
  apply(data: Uint8Array, digest?: string): void {
    atOnce(this.steps(data, data, digest));
  }

  /** Do the same as `apply` in short steps, from `base` to `out`, which may be the same memory. */
  *steps(base: Uint8Array, out: Uint8Array, digest?: string): Generator<void> {
    const found = digest ?? (yield* digesting(this.layoutId, this.chunkBytes, base));
    if (found !== this.base) {
      throw new PatchError(
        `the patch is for the base ${this.base.slice(0, 12)}, not ${found.slice(0, 12)}`,
      );
    }
    yield* this.#change(base, out);
    const result = yield* digesting(this.layoutId, this.chunkBytes, out);
    if (result === this.target) return;
    throw new PatchError(
      `the patch leads to ${result.slice(0, 12)}, but names ${this.target.slice(0, 12)}`,
    );
  }

  /**
   * Change all blocks in place, without checking the digests.
   *
   * @throws PatchError - if a block is malformed: no byte has changed.
   */
  put(data: Uint8Array): void {
    atOnce(this.#change(data, data));
  }

  *#change(base: Uint8Array, out: Uint8Array): Generator<void> {
    if (base.length !== this.nbytes) {
      throw new PatchError(`a patch for ${this.nbytes} bytes, not for ${base.length}`);
    }
    const parts = yield* this.#read();
    const reader = new StepReader();
    const changes = new Changes();
    const kept: Changes[] = []; // of the first parts, each of exact size, since growing is slow
    let budget = base.length / KEPT;
    for (const part of parts) {
      yield* decode(part, base, reader, changes);
      budget -= changes.nbytes;
      if (budget >= 0) kept.push(changes.copy());
      yield;
    }
    yield* copy(base, out);
    for (const [index, part] of parts.entries()) {
      if (kept[index] === undefined) yield* decode(part, out, reader, changes);
      write(part, out, kept[index] ?? changes);
      yield;
    }
  }
}

/** Copy bytes, unless source and destination are the same. */
function* copy(from: Uint8Array, to: Uint8Array): Generator<void> {
  if (from === to) return;
  for (const [begin, end] of pieces(0, from.length)) {
    to.set(from.subarray(begin, end), begin);
    yield;
  }
}

function checkSize(block: Block, mode: Mode, size: number): void {
  if (mode === "steps" && block.kind === "plain") {
    throw new PatchError("it has steps, but its elements are not numbers of 16 bits");
  }
  const nbytes = block.end - block.begin;
  const least = mode === "unchanged" ? 0 : mode === "raw" ? nbytes : 1;
  const most = mode === "unchanged" || mode === "raw" ? least : nbytes - 1;
  if (size >= least && size <= most) return;
  throw new PatchError(`its body has ${size} bytes; ${least} to ${most} are allowed`);
}

/** Decode the changes of a block into `changes`. */
function* decode(
  { block, mode, body, table }: Part,
  data: Uint8Array,
  reader: StepReader,
  changes: Changes,
): Generator<void> {
  const base = data.subarray(block.begin, block.end);
  changes.count = 0;
  try {
    if (mode === "steps" && table !== undefined) {
      yield* reader.read(body, table, base, block.kind, changes);
    } else if (mode === "overwrite") {
      readOverwritten(body, block.width, base.length / block.width, changes);
    }
  } catch (error) {
    throw inBlock(block, error);
  }
}

/** Write changes into a block. */
function write({ block, mode, body }: Part, data: Uint8Array, changes: Changes): void {
  const { positions, values, count } = changes;
  const { width } = block;
  if (mode === "raw") {
    data.set(body, block.begin);
  } else if (mode === "overwrite") {
    let from = body.length - count * width;
    for (let i = 0; i < count; i++) {
      const to = block.begin + (positions[i] as number) * width;
      for (let byte = 0; byte < width; byte++) data[to + byte] = body[from++] as number;
    }
  } else {
    for (let i = 0; i < count; i++) {
      const to = block.begin + 2 * (positions[i] as number);
      data[to] = (values[i] as number) & 255;
      data[to + 1] = (values[i] as number) >> 8;
    }
  }
}
