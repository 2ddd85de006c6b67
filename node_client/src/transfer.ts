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
 * time turns all ASKED back to MISSING, and the patience doubles until something arrives.
 */

import { crc32c, digest } from "./checksum.js";
import { ChunkPlan } from "./chunks.js";
import type { Layout } from "./layout.js";
import { type Timing, WINDOW_CHUNKS } from "./limits.js";
import type { Announce } from "./messages.js";

const [MISSING, ASKED, HERE, LENT] = [0, 1, 2, 3];
const DAMAGED_MAX = 16; // damaged chunks asked for again at once, before patience decides

/** Memory into which a payload is being received, piece by piece. */
export class Lease {
  /** Whether somebody still wants it; if not, the memory must be left alone. */
  live = true;
  count = 0;
  crc = 0;

  constructor(
    readonly bytes: Uint8Array,
    /** Called when the payload will never be complete. */
    readonly cancel: () => void = () => {},
  ) {}

  /** Return where the next bytes go. */
  room(most: number): Uint8Array {
    return this.bytes.subarray(this.count, this.count + most);
  }

  /** Take note of so many bytes in `room()`, while they are in the processor's cache. */
  received(count: number): void {
    this.crc = crc32c(this.room(count), this.crc);
    this.count += count;
  }
}

/** Chunks to fetch; a count of 0 asks for the announcement and the `end`. */
export interface Range {
  readonly first: number;
  readonly count: number;
}

/** A version on its way into a staging buffer of `announce.nbytes` bytes. */
export class Transfer {
  /** Chunks that have arrived. */
  here = 0;
  /** Times the whole did not match its digest. */
  restarts = 0;
  /** From `end`. */
  digest: string | null = null;
  /** When the publisher was told last how far this is. */
  reportedAt: number;
  readonly #plan: ChunkPlan;
  readonly #states: Uint8Array;
  readonly #crcs: Uint32Array;
  #asked = 0;
  #cursor = 0; // nothing below it is MISSING
  #pushed = 0; // everything below it was pushed, or dropped on the way
  #damaged = 0;
  #heardAt: number;
  #patience: number;
  #gap = 0; // between two chunks, the longest lately
  #endAsked = false;
  #pulling = false; // nothing more will be pushed, as far as we can tell
  #lease: Lease | null = null; // of the chunk that is LENT
  #lent = 0; // which chunk that is,
  #lentHere = 0; // and how much of it was here when we looked last

  constructor(
    readonly announce: Announce,
    readonly layout: Layout,
    readonly buffer: Uint8Array,
    now: number,
    readonly timing: Timing,
  ) {
    this.#plan = new ChunkPlan(announce.nbytes, announce.chunk_bytes);
    this.#states = new Uint8Array(this.#plan.count);
    this.#crcs = new Uint32Array(this.#plan.count);
    this.reportedAt = this.#heardAt = now;
    this.#patience = timing.patience;
  }

  /** Whether every chunk is here and the digest is known. */
  get complete(): boolean {
    return this.here === this.#plan.count && this.digest !== null;
  }

  /** Take a chunk; return whether it is new and sound. A chunk that is neither is ignored. */
  add(index: number, crc: number, payload: Uint8Array, now: number, pushed: boolean): boolean {
    if (index >= this.#plan.count) return false;
    if (pushed) this.#pushed = Math.max(this.#pushed, index + 1); // W10
    if (!this.#put(index, crc, payload)) return false; // W9
    this.#states[index] = HERE;
    this.#crcs[index] = crc;
    this.here += 1;
    this.#hear(now);
    return true;
  }

  #put(index: number, crc: number, payload: Uint8Array): boolean {
    const lease = this.#lease;
    if (lease !== null && payload === lease.bytes && index === this.#lent) {
      this.revoke();
      return (lease.count === lease.bytes.length && lease.crc === crc) || this.#reject(index);
    }
    const state = this.#states[index];
    if (state === HERE || state === LENT) return false;
    const [begin, end] = this.#plan.span(index);
    if (payload.length !== end - begin || crc32c(payload) !== crc) return this.#reject(index);
    this.buffer.set(payload, begin);
    if (state === ASKED) this.#asked -= 1;
    return true;
  }

  /** A chunk came damaged: fetch it (again), at once for the first few, else in due time. */
  #reject(index: number): false {
    this.#damaged += 1;
    if (this.#states[index] === ASKED && this.#damaged <= DAMAGED_MAX) {
      this.#asked -= 1;
      this.#states[index] = MISSING;
    }
    if (this.#states[index] === MISSING) this.#cursor = Math.min(this.#cursor, index);
    return false;
  }

  /**
   * Return the place of a chunk of this size, to receive it there; null if it has none.
   *
   * `add` takes it once it is complete, and must be given the lease's own bytes as payload.
   */
  lend(index: number, size: number): Lease | null {
    const state = this.#states[index];
    if (state === undefined || state === HERE || state === LENT) return null;
    const [begin, end] = this.#plan.span(index);
    if (size !== end - begin) return null;
    this.revoke();
    if (state === ASKED) this.#asked -= 1;
    this.#states[index] = LENT;
    this.#lent = index;
    this.#lentHere = 0;
    const lease = new Lease(this.buffer.subarray(begin, end), () => {
      if (this.#lease === lease) this.revoke();
    });
    this.#lease = lease;
    return lease;
  }

  /**
   * Let nobody write into the buffer any more; return whether somebody was about to. (The kernel
   * may have been told where the next bytes go, and still write there.)
   */
  revoke(): boolean {
    if (this.#lease === null) return false;
    this.#lease.live = false;
    this.#lease = null;
    this.#states[this.#lent] = MISSING;
    this.#cursor = Math.min(this.#cursor, this.#lent);
    return true;
  }

  /** Take the digest of the whole: no more chunks will be pushed. */
  end(digest: string): void {
    this.digest = digest;
    this.#pulling = true;
  }

  /** Nothing will be pushed: fetch at once. */
  pull(): void {
    this.#pulling = true;
  }

  /** Return what to fetch now. */
  wants(now: number): Range[] {
    if (this.#lease !== null && this.#lease.count > this.#lentHere) {
      this.#lentHere = this.#lease.count;
      this.#heardAt = now;
    }
    const silent = now - this.#heardAt;
    if (silent >= this.timing.quiet) this.#pulling = true; // W30
    if (silent >= this.#patience) {
      this.#askAgain(now); // W12, W32
      this.#patience = Math.min(2 * this.#patience, this.timing.patienceMax);
    }
    const ranges: Range[] = [];
    if (this.digest === null && this.#pulling && !this.#endAsked) {
      this.#endAsked = true;
      ranges.push({ first: 0, count: 0 });
    }
    if (this.#asked <= WINDOW_CHUNKS / 2) this.#fill(ranges); // W11
    return ranges;
  }

  /** Ask for what is missing, up to a window. */
  #fill(ranges: Range[]): void {
    const limit = this.#pulling ? this.#plan.count : this.#pushed;
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
    if (this.digest === digest(this.announce.layout, this.#plan.chunkBytes, this.#crcs))
      return true;
    this.restarts += 1;
    this.here = this.#asked = this.#cursor = 0;
    this.#states.fill(MISSING as number);
    this.digest = null;
    this.#endAsked = false;
    this.#pulling = true;
    return false;
  }

  /** The connection is new: what was asked on the old one will not come. */
  reconnected(now: number): void {
    this.#askAgain(now);
    this.#pulling = true;
  }

  /** Something arrived: be patient in proportion to how long it took, for slow links. */
  #hear(now: number): void {
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
