/**
 * One version arriving chunk by chunk, pushed and fetched in any order.
 *
 * Theory of operation: each chunk is in one of four states, one byte each.
 *
 *     MISSING ──fetch──> ASKED ──┐
 *        │                 │     ├──> HERE
 *        ├─────push────────┼─────┤
 *        └─────lend────────┴─> LENT ──damaged, cut off──> MISSING
 *
 * A chunk is lent while its bytes arrive piece by piece in their place: whatever else comes of it
 * meanwhile is ignored, since nobody may write there twice.
 *
 * Pushed chunks come in order, so whatever lies below the highest pushed one was dropped and is
 * fetched at once. What lies above may still be pushed: it is fetched after `end`, or when nothing
 * has arrived for a while. At most a window of chunks is ASKED; an answer that does not come in
 * time turns all ASKED back to MISSING, and the patience doubles until something arrives. But answers
 * come in the order of what was asked: as long as no later ping was answered, they are on their way.
 *
 * What arrives may be a patch instead, into memory of its own: then the version is decoded from that.
 */

import { isDeepStrictEqual } from "node:util";
import { crc32c, digest } from "./checksum.js";
import { ChunkPlan } from "./chunks.js";
import type { Keyring } from "./keyring.js";
import { PROGRESS_CHUNKS, type Timing, TRIES_MAX, WINDOW_CHUNKS } from "./limits.js";
import type { Announce, Chunk, Patch, PatchId, SealedChunk } from "./messages.js";
import { Patching } from "./patching.js";
import { COMING, type Coming, type Way } from "./phases.js";
import type { Opening, Subject } from "./sealing.js";
import type { Base } from "./staging.js";

const [MISSING, ASKED, HERE, LENT] = [0, 1, 2, 3];
const DAMAGED_MAX = 16; // damaged chunks asked for again at once, before patience decides
const NOTHING = new Uint8Array(0);

/** Memory into which a payload is being received, piece by piece. */
export class Lease {
  #live = true;
  #count = 0;
  #crc = 0;

  constructor(
    readonly bytes: Uint8Array,
    /** Called when the payload will never be complete. */
    readonly cancel: () => void = () => {},
    /** What opens the payload, which is sealed, in its place. */
    readonly opening: Opening | null = null,
  ) {}

  /** Whether somebody still wants it; if not, the memory must be left alone. */
  get live(): boolean {
    return this.#live;
  }

  /** Bytes that are here, */
  get count(): number {
    return this.#count;
  }

  /** and their checksum, of what is in the clear. */
  get crc(): number {
    return this.#crc;
  }

  /** Nobody wants it any more. */
  end(): void {
    this.#live = false;
  }

  /** Return where the next bytes go. */
  room(most: number): Uint8Array {
    return this.bytes.subarray(this.#count, this.#count + most);
  }

  /** Take note of so many bytes in `room()`, while they are in the processor's cache. */
  received(count: number): void {
    const piece = this.room(count);
    this.opening?.take(piece, piece);
    this.#crc = crc32c(piece, this.#crc);
    this.#count += count;
  }

  /** Whether all of it is here, with this CRC-32C, or as it was sealed. */
  isSound(proof: number | SealedChunk): boolean {
    if (this.#count !== this.bytes.length) return false;
    return this.opening === null ? this.#crc === proof : this.opening.proves();
  }
}

/** Chunks to fetch; a count of 0 asks for the announcement and the `end`. */
export interface Range {
  readonly first: number;
  readonly count: number;
}

/** A version on its way into a staging buffer, or a patch to it into memory of its own. */
export class Transfer {
  /** Which patch it is; null: the version itself. */
  readonly patch: PatchId | null;
  #buffer: Uint8Array;
  #base: Base | null;
  #comes: Coming = "received";
  #here = 0;
  #restarts = 0;
  #decodeUs = 0;
  #digest: string | null = null;
  #reportedAt: number; // when the publisher was told last how far this is
  readonly #plan: ChunkPlan;
  readonly #subject: Subject;
  readonly #states: Uint8Array;
  readonly #crcs: Uint32Array;
  #asked = 0;
  #cursor = 0; // nothing below it is MISSING
  #pushed = 0; // everything below it was pushed, or dropped on the way
  #damaged = 0;
  #heardAt: number;
  #askedAt: number;
  #answered = Number.NEGATIVE_INFINITY; // when the last ping was sent that was answered
  #patience: number;
  #gap = 0; // between two chunks, the longest lately
  #endAsked = false;
  #lease: Lease | null = null; // of the chunk that is LENT
  #lent = 0; // which chunk that is,
  #lentHere = 0; // and how much of it was here when we looked last
  #tries = 0; // times that nothing came for too long, though the connection is the same
  #patching: Patching | null = null; // while it is being decoded

  constructor(
    readonly announce: Announce,
    /** As large as what arrives. */
    buffer: Uint8Array,
    now: number,
    readonly timing: Timing,
    /** What opens its chunks; null: they come in the clear. */
    readonly keyring: Keyring | null = null,
    /** What arrives in place of the version, and what that builds on. */
    by: { readonly patch: Patch; readonly base: Base } | null = null,
    /** Why no patch arrives, though there are some. */
    readonly unpatched = "",
  ) {
    this.patch = by && idOf(by.patch);
    this.#buffer = buffer;
    this.#base = by?.base ?? null;
    this.#subject = by === null ? announce : subjectOf(announce, by.patch);
    this.#plan = new ChunkPlan(this.#subject.nbytes, announce.chunk_bytes);
    this.#states = new Uint8Array(this.#plan.count);
    this.#crcs = new Uint32Array(this.#plan.count);
    this.#reportedAt = this.#heardAt = this.#askedAt = now;
    this.#patience = timing.patience;
  }

  /** What the patch builds on, for as long as that is needed. */
  get base(): Base | null {
    return this.#base;
  }

  get comes(): Coming {
    return this.#comes;
  }

  /** Chunks that have arrived. */
  get here(): number {
    return this.#here;
  }

  /** Times the whole did not match its digest. */
  get restarts(): number {
    return this.#restarts;
  }

  /** Microseconds that decoding the patch took, once it is decoded. */
  get decodeUs(): number {
    return this.#decodeUs;
  }

  /** From `end`. */
  get digest(): string | null {
    return this.#digest;
  }

  /** Whether every chunk is here and the digest is known. */
  get complete(): boolean {
    return this.#here === this.#plan.count && this.#digest !== null;
  }

  /** Whether nothing that fits comes, though it was asked for again and again. (D5, W12) */
  get hopeless(): boolean {
    return this.#comes !== "decoded" && this.#tries >= TRIES_MAX;
  }

  /** Whether a message speaks of what arrives: of the version, or of this patch to it. (D9) */
  isNamed(patch: PatchId | null): boolean {
    return isDeepStrictEqual(patch, this.patch);
  }

  /** Take a chunk as it came; return whether the publisher is to be told how far this is. */
  take(chunk: Chunk | SealedChunk, payload: Uint8Array, now: number, pushed: boolean): boolean {
    const proof = chunk.type === "chunk" ? chunk.crc : chunk;
    const fresh = this.add(chunk.index, proof, payload, now, pushed);
    const slow = now - this.#reportedAt >= this.timing.report; // W23
    if (!fresh || !pushed || !(slow || this.#here % PROGRESS_CHUNKS === 0)) return false;
    this.#reportedAt = now;
    return true;
  }

  /**
   * Take a chunk; return whether it is new and sound. A chunk that is neither is ignored.
   *
   * @param proof - its CRC-32C, or what it was sealed with.
   */
  add(
    index: number,
    proof: number | SealedChunk,
    payload: Uint8Array,
    now: number,
    pushed: boolean,
  ): boolean {
    if (index >= this.#plan.count) return false;
    if (pushed) this.#pushed = Math.max(this.#pushed, index + 1); // W10
    const crc = this.#put(index, proof, payload); // W9
    if (crc === null) return false;
    this.#states[index] = HERE;
    this.#crcs[index] = crc;
    this.#here += 1;
    this.#hear(now);
    return true;
  }

  /** Have a chunk in its place, if it is wanted and sound; return its CRC-32C. */
  #put(index: number, proof: number | SealedChunk, payload: Uint8Array): number | null {
    const lease = this.#lease;
    if (lease !== null && payload === lease.bytes && index === this.#lent) {
      this.revoke();
      return lease.isSound(proof) ? lease.crc : this.#reject(index);
    }
    const state = this.#states[index];
    if (state === HERE || state === LENT) return null;
    const place = this.#buffer.subarray(...this.#plan.span(index));
    const crc = payload.length === place.length ? this.#copy(proof, payload, place) : null;
    if (crc === null) return this.#reject(index);
    if (state === ASKED) this.#asked -= 1;
    return crc;
  }

  /** Put a chunk that is sound into its place; return its CRC-32C. */
  #copy(proof: number | SealedChunk, payload: Uint8Array, place: Uint8Array): number | null {
    if (typeof proof !== "number") {
      const opening = this.keyring?.opening(this.#subject, proof, payload.length);
      return opening?.opens(payload, place) ?? null; // E4
    }
    if (crc32c(payload) !== proof) return null;
    place.set(payload);
    return proof;
  }

  /** A chunk came damaged: fetch it (again), at once for the first few, else in due time. */
  #reject(index: number): null {
    this.#damaged += 1;
    if (this.#states[index] === ASKED && this.#damaged <= DAMAGED_MAX) {
      this.#asked -= 1;
      this.#states[index] = MISSING;
    }
    if (this.#states[index] === MISSING) this.#cursor = Math.min(this.#cursor, index);
    return null;
  }

  /** Whether a chunk of this size has a place here, which is free. */
  fits(index: number, size: number): boolean {
    const state = this.#states[index];
    if (state === undefined || state === HERE || state === LENT) return false;
    const [begin, end] = this.#plan.span(index);
    return size === end - begin;
  }

  /**
   * Return the place of a chunk of this size, to receive it there; null if it has none.
   *
   * `add` takes it once it is complete, and must be given the lease's own bytes as payload. What is
   * `sealed` is opened there.
   */
  lend(index: number, size: number, sealed: SealedChunk | null = null): Lease | null {
    if (!this.fits(index, size)) return null;
    const state = this.#states[index];
    const [begin, end] = this.#plan.span(index);
    const opening = sealed && (this.keyring?.opening(this.#subject, sealed, size) ?? null);
    if (sealed !== null && opening === null) return null;
    this.revoke();
    if (state === ASKED) this.#asked -= 1;
    this.#states[index] = LENT;
    this.#lent = index;
    this.#lentHere = 0;
    const cancel = () => {
      if (this.#lease === lease) this.revoke();
    };
    const lease: Lease = new Lease(this.#buffer.subarray(begin, end), cancel, opening);
    this.#lease = lease;
    return lease;
  }

  /**
   * Let nobody write into the version's memory any more; return whether somebody was about to. (The
   * kernel may have been told where the next bytes go, and still write there.)
   */
  revoke(): boolean {
    if (this.#patching !== null) this.#patching.end(); // it ends before its next step
    if (this.#lease === null) return false;
    this.#lease.end();
    this.#lease = null;
    this.#states[this.#lent] = MISSING;
    this.#cursor = Math.min(this.#cursor, this.#lent);
    return this.patch === null; // else it was about to write into the patch
  }

  /** Have a patch that is here, whole, decoded into a buffer; null: somebody does. */
  decode(buffer: Uint8Array): Patching | null {
    if (this.#comes === "decoded" || this.#base === null || this.#digest === null) return null;
    this.#changeWay("patched");
    const { model } = this.announce;
    this.#patching = new Patching(model, this.#base, this.#buffer, buffer, this.#digest);
    return this.#patching;
  }

  /** The patch is decoded, in so many milliseconds, and not needed any more. */
  decoded(took: number): void {
    this.#decodeUs = Math.round(took * 1000);
    this.#patching = null;
    this.#buffer = NOTHING;
  }

  /** What the patch builds on is not needed any more: return it. */
  release(): Base | null {
    const base = this.#base;
    this.#base = null;
    return base;
  }

  /** Take the digest of the whole: no more chunks will be pushed. */
  end(digest: string): void {
    this.#digest = digest;
    this.pull();
  }

  /** Nothing more will be pushed, as far as we can tell: fetch at once. */
  pull(): void {
    this.#changeWay("unpushed");
  }

  #changeWay(way: Way): void {
    this.#comes = COMING[this.#comes][way] ?? this.#comes;
  }

  /** A ping that was sent then was answered, and so was whatever was asked before it. */
  answered(sentAt: number): void {
    this.#answered = sentAt;
  }

  /** Return what to fetch now. */
  wants(now: number): Range[] {
    if (this.#comes === "decoded") return [];
    if (this.#lease !== null && this.#lease.count > this.#lentHere) {
      this.#lentHere = this.#lease.count;
      this.#heardAt = now;
    }
    const silent = now - this.#heardAt;
    if (silent >= this.timing.quiet) this.pull(); // W30
    const passed = this.#answered > this.#askedAt; // else what was asked is still on its way
    if (silent >= (passed ? this.#patience : this.timing.patienceMax)) {
      this.#tries += 1;
      this.#askAgain(now); // W12, W32
      this.#patience = Math.min(2 * this.#patience, this.timing.patienceMax);
    }
    const ranges: Range[] = [];
    if (this.#digest === null && this.#comes === "pulled" && !this.#endAsked) {
      this.#endAsked = true;
      ranges.push({ first: 0, count: 0 });
    }
    if (this.#asked <= WINDOW_CHUNKS / 2) this.#fill(ranges); // W11
    if (ranges.length > 0) this.#askedAt = now;
    return ranges;
  }

  /** Ask for what is missing, up to a window. */
  #fill(ranges: Range[]): void {
    const limit = this.#comes === "pulled" ? this.#plan.count : this.#pushed;
    while (this.#asked < WINDOW_CHUNKS) {
      const offset = this.#states.subarray(this.#cursor, limit).indexOf(MISSING as number);
      if (offset < 0) {
        this.#cursor = Math.max(this.#cursor, limit);
        return;
      }
      const first = this.#cursor + offset;
      const most = Math.min(limit, first + WINDOW_CHUNKS - this.#asked);
      let last = first;
      while (last < most && this.#states[last] === MISSING) this.#states[last++] = ASKED as number;
      this.#asked += last - first;
      this.#cursor = last;
      ranges.push({ first, count: last - first });
    }
  }

  /** Return whether the whole is what was published; if not, start over. */
  verify(): boolean {
    if (this.#digest === digest(this.announce.layout, this.#plan.chunkBytes, this.#crcs))
      return true;
    this.#restarts += 1;
    this.#here = this.#asked = this.#cursor = 0;
    this.#states.fill(MISSING as number);
    this.#digest = null;
    this.#endAsked = false;
    this.pull();
    return false;
  }

  /** The connection is new: what was asked on the old one will not come. */
  reconnected(now: number): void {
    this.#askAgain(now);
    this.pull();
    this.#tries = 0;
  }

  /** Something arrived: be patient in proportion to how long it took, for slow links. */
  #hear(now: number): void {
    this.#tries = 0;
    this.#gap = Math.max(now - this.#heardAt, (this.#gap * 7) / 8);
    const patience = Math.max(this.timing.patience, 4 * this.#gap); // W32
    this.#patience = Math.min(patience, this.timing.patienceMax);
    this.#heardAt = now;
  }

  #askAgain(now: number): void {
    for (let i = 0; i < this.#states.length; i++) {
      if (this.#states[i] === ASKED) this.#states[i] = MISSING as number;
    }
    this.#asked = this.#cursor = 0;
    this.#endAsked = false;
    this.#heardAt = now;
  }
}

function idOf({ encoding, epoch, version }: Patch): PatchId {
  return { encoding, epoch, version };
}

/** Return what a patch is sealed as. (D12) */
function subjectOf({ model, epoch, version, chunk_bytes }: Announce, patch: Patch): Subject {
  const { encoding, nbytes } = patch;
  const base = [patch.epoch, patch.version] as const;
  return { model, epoch, version, nbytes, chunk_bytes, encoding, base };
}
