/**
 * Receives the chunks of one version, which are pushed and fetched in any order.
 *
 * Each chunk is in one of four states, which takes one byte:
 *
 *     MISSING               a fetch is sent                              REQUESTED
 *     MISSING, REQUESTED    the payload arrives in other memory          HERE
 *     MISSING, REQUESTED    the payload begins to enter the buffer       LEASED
 *     LEASED                the payload is complete and valid            HERE
 *     LEASED                the payload is damaged or cut off            MISSING
 *
 * While a chunk is LEASED, payloads of it from elsewhere are ignored: its memory has one writer.
 *
 * Pushed chunks arrive in order, so a chunk that is missing below the highest pushed chunk was lost,
 * and is fetched at once. Chunks above it may still be pushed; they are fetched after `end`, or when
 * nothing has arrived for a while. At most WINDOW_CHUNKS chunks are REQUESTED. If no chunk arrives in
 * time, all REQUESTED chunks become MISSING, and the retry delay doubles until a chunk arrives. The
 * publisher answers requests and pings in order: as long as it has not answered a ping that was sent
 * after a fetch, the requested chunks may be in flight.
 *
 * A transfer may receive a patch instead, into separate memory. The version is then decoded from the
 * patch.
 */

import { isDeepStrictEqual } from "node:util";
import { crc32c, digest } from "./checksum.js";
import { ChunkPlan } from "./chunks.js";
import type { Keyring } from "./keyring.js";
import { PROGRESS_CHUNKS, type Timing, TRIES_MAX, WINDOW_CHUNKS } from "./limits.js";
import type { Announce, Chunk, Patch, PatchId, SealedChunk } from "./messages.js";
import { Patching } from "./patching.js";
import { ARRIVING_ARROWS, type ArrivingEvent, type ArrivingState } from "./phases.js";
import type { Opening, Subject } from "./sealing.js";
import type { Base } from "./staging.js";

const [MISSING, REQUESTED, HERE, LEASED] = [0, 1, 2, 3];
const DAMAGED_MAX = 16; // this many damaged chunks are requested again before a timeout
const NOTHING = new Uint8Array(0);

/** Memory into which a payload is received, piece by piece. */
export class Lease {
  #live = true;
  #count = 0;
  #crc = 0;

  constructor(
    readonly bytes: Uint8Array,
    /** Called if the payload is not received completely. */
    readonly cancel: () => void = () => {},
    /** Decrypts a sealed payload in place; null if the payload is not sealed. */
    readonly opening: Opening | null = null,
  ) {}

  /** Whether the payload is still wanted; if not, the memory must not be written. */
  get live(): boolean {
    return this.#live;
  }

  /** Bytes received so far. */
  get count(): number {
    return this.#count;
  }

  /** CRC-32C of the bytes received so far, after decryption. */
  get crc(): number {
    return this.#crc;
  }

  /** Revoke the lease: the memory must not be written any more. */
  end(): void {
    this.#live = false;
  }

  /** Return the memory for the next bytes, at most `most`. */
  room(most: number): Uint8Array {
    return this.bytes.subarray(this.#count, this.#count + most);
  }

  /** Decrypt and hash `count` bytes that were written into `room()`. */
  received(count: number): void {
    const piece = this.room(count);
    this.opening?.decryptNext(piece, piece);
    this.#crc = crc32c(piece, this.#crc);
    this.#count += count;
  }

  /**
   * Whether the payload is complete and valid. A payload in the clear must have the CRC-32C `proof`;
   * a sealed payload must be authentic.
   */
  isSound(proof: number | SealedChunk): boolean {
    if (this.#count !== this.bytes.length) return false;
    return this.opening === null ? this.#crc === proof : this.opening.isAuthentic();
  }
}

/** A range of chunks to fetch. A count of 0 requests the announcement and `end` instead. */
export interface Range {
  readonly first: number;
  readonly count: number;
}

/** The transfer of a version into a staging buffer, or of a patch into separate memory. */
export class Transfer {
  /** The patch that is received; null if the version is received whole. */
  readonly patch: PatchId | null;
  #buffer: Uint8Array;
  #base: Base | null;
  #arrival: ArrivingState = "received";
  #here = 0;
  #restarts = 0;
  #decodeUs = 0;
  #digest: string | null = null;
  #reportedAt: number; // when progress was last reported
  readonly #plan: ChunkPlan;
  readonly #subject: Subject;
  readonly #states: Uint8Array;
  readonly #crcs: Uint32Array;
  #requested = 0; // number of REQUESTED chunks
  #cursor = 0; // no chunk with a lower index is MISSING
  #pushed = 0; // all chunks with a lower index were pushed; some may have been lost
  #damaged = 0; // number of damaged chunks that have arrived
  #heardAt: number; // when bytes of a chunk last arrived, or the retry delay was restarted
  #requestedAt: number; // when chunks were last requested
  #answered = Number.NEGATIVE_INFINITY; // when the last answered ping was sent
  #patience: number; // the retry delay
  #gap = 0; // the longest recent time between two chunks
  #endRequested = false;
  #lease: Lease | null = null; // of the LEASED chunk
  #leased = 0; // the index of the LEASED chunk
  #leaseCount = 0; // bytes of the LEASED chunk at the last call of `wants`
  #tries = 0; // consecutive timeouts in this session
  #patching: Patching | null = null; // while the patch is being decoded

  constructor(
    readonly announce: Announce,
    /** Memory of the size of the version or patch that is received. */
    buffer: Uint8Array,
    now: number,
    readonly timing: Timing,
    /** Decrypts the chunks; null if the chunks are not sealed. */
    readonly keyring: Keyring | null = null,
    /** The patch to receive instead of the version, and its base. */
    by: { readonly patch: Patch; readonly base: Base } | null = null,
    /** The reason that no offered patch is received; empty if none was offered. */
    readonly unpatched = "",
  ) {
    this.patch = by && idOf(by.patch);
    this.#buffer = buffer;
    this.#base = by?.base ?? null;
    this.#subject = by === null ? announce : subjectOf(announce, by.patch);
    this.#plan = new ChunkPlan(this.#subject.nbytes, announce.chunk_bytes);
    this.#states = new Uint8Array(this.#plan.count);
    this.#crcs = new Uint32Array(this.#plan.count);
    this.#reportedAt = this.#heardAt = this.#requestedAt = now;
    this.#patience = timing.patience;
  }

  /** The base of the patch, until `takeBase`. */
  get base(): Base | null {
    return this.#base;
  }

  get arrival(): ArrivingState {
    return this.#arrival;
  }

  /** Number of chunks that have arrived. */
  get here(): number {
    return this.#here;
  }

  /** Number of digest mismatches. */
  get restarts(): number {
    return this.#restarts;
  }

  /** Duration of the patch's decoding in microseconds; 0 until the patch is decoded. */
  get decodeUs(): number {
    return this.#decodeUs;
  }

  /** The digest from `end`; null before `end` has arrived. */
  get digest(): string | null {
    return this.#digest;
  }

  /** Whether all chunks have arrived, and the digest is known. */
  get complete(): boolean {
    return this.#here === this.#plan.count && this.#digest !== null;
  }

  /** Whether repeated requests have brought no new chunk. (D5, W12) */
  get hopeless(): boolean {
    return this.#arrival !== "decoded" && this.#tries >= TRIES_MAX;
  }

  /** Whether this transfer receives `patch`; for null, whether it receives the whole version. (D9) */
  isNamed(patch: PatchId | null): boolean {
    return isDeepStrictEqual(patch, this.patch);
  }

  /** Store a received chunk. Return true if a report of progress is due. */
  take(chunk: Chunk | SealedChunk, payload: Uint8Array, now: number, pushed: boolean): boolean {
    const proof = chunk.type === "chunk" ? chunk.crc : chunk;
    const fresh = this.add(chunk.index, proof, payload, now, pushed);
    const slow = now - this.#reportedAt >= this.timing.report; // W23
    if (!fresh || !pushed || !(slow || this.#here % PROGRESS_CHUNKS === 0)) return false;
    this.#reportedAt = now;
    return true;
  }

  /**
   * Store a chunk, and return true if it is new and valid. Any other chunk is ignored.
   *
   * @param proof - the chunk's CRC-32C, or the message of a sealed chunk.
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
    this.#arrived(now);
    return true;
  }

  /** Store a chunk if it is wanted and valid. Return its CRC-32C, or null if it is not stored. */
  #put(index: number, proof: number | SealedChunk, payload: Uint8Array): number | null {
    const lease = this.#lease;
    if (lease !== null && payload === lease.bytes && index === this.#leased) {
      this.revoke();
      return lease.isSound(proof) ? lease.crc : this.#reject(index);
    }
    const state = this.#states[index];
    if (state === HERE || state === LEASED) return null;
    const place = this.#buffer.subarray(...this.#plan.span(index));
    const crc = payload.length === place.length ? this.#copy(proof, payload, place) : null;
    if (crc === null) return this.#reject(index);
    if (state === REQUESTED) this.#requested -= 1;
    return crc;
  }

  /** Copy a valid payload to `place`. Return its CRC-32C, or null if the payload is invalid. */
  #copy(proof: number | SealedChunk, payload: Uint8Array, place: Uint8Array): number | null {
    if (typeof proof !== "number") {
      const opening = this.keyring?.opening(this.#subject, proof, payload.length);
      return opening?.decrypt(payload, place) ?? null; // E4
    }
    if (crc32c(payload) !== proof) return null;
    place.set(payload);
    return proof;
  }

  /** Drop a damaged chunk. The first DAMAGED_MAX are requested again at once, others after a timeout. */
  #reject(index: number): null {
    this.#damaged += 1;
    if (this.#states[index] === REQUESTED && this.#damaged <= DAMAGED_MAX) {
      this.#requested -= 1;
      this.#states[index] = MISSING;
    }
    if (this.#states[index] === MISSING) this.#cursor = Math.min(this.#cursor, index);
    return null;
  }

  /** Whether the chunk with this index is still needed, and `size` is its size. */
  fits(index: number, size: number): boolean {
    const state = this.#states[index];
    if (state === undefined || state === HERE || state === LEASED) return false;
    const [begin, end] = this.#plan.span(index);
    return size === end - begin;
  }

  /**
   * Return a lease to receive a chunk directly into the buffer; null if the chunk is not wanted.
   *
   * Once the payload is complete, call `add` with `Lease.bytes` as payload. If `sealed` is not null,
   * the chunk is decrypted in place.
   */
  lend(index: number, size: number, sealed: SealedChunk | null = null): Lease | null {
    if (!this.fits(index, size)) return null;
    const state = this.#states[index];
    const [begin, end] = this.#plan.span(index);
    const opening = sealed && (this.keyring?.opening(this.#subject, sealed, size) ?? null);
    if (sealed !== null && opening === null) return null;
    this.revoke();
    if (state === REQUESTED) this.#requested -= 1;
    this.#states[index] = LEASED;
    this.#leased = index;
    this.#leaseCount = 0;
    const cancel = () => {
      if (this.#lease === lease) this.revoke();
    };
    const lease: Lease = new Lease(this.#buffer.subarray(begin, end), cancel, opening);
    this.#lease = lease;
    return lease;
  }

  /**
   * End the lease, and cancel the decoding. Return true if the kernel may still write into the
   * version's buffer, since a read may be pending.
   */
  revoke(): boolean {
    if (this.#patching !== null) this.#patching.end(); // the job checks this before its next step
    if (this.#lease === null) return false;
    this.#lease.end();
    this.#lease = null;
    this.#states[this.#leased] = MISSING;
    this.#cursor = Math.min(this.#cursor, this.#leased);
    return this.patch === null; // otherwise the lease was in the patch's memory
  }

  /**
   * Return a job that decodes the complete patch into `buffer`. Return null if the patch is being
   * decoded already, or is not complete.
   */
  decode(buffer: Uint8Array): Patching | null {
    if (this.#arrival === "decoded" || this.#base === null || this.#digest === null) return null;
    this.#changeArrival("patched");
    const { model } = this.announce;
    this.#patching = new Patching(model, this.#base, this.#buffer, buffer, this.#digest);
    return this.#patching;
  }

  /** Record that the patch was decoded in `took` milliseconds, and free the patch's memory. */
  decoded(took: number): void {
    this.#decodeUs = Math.round(took * 1000);
    this.#patching = null;
    this.#buffer = NOTHING;
  }

  /** Return the base of the patch, and forget it. */
  takeBase(): Base | null {
    const base = this.#base;
    this.#base = null;
    return base;
  }

  /** Record the digest from an `end` message, after which no more chunks are pushed. */
  end(digest: string): void {
    this.#digest = digest;
    this.pull();
  }

  /** Make `wants` return all missing chunks from now on, since no more chunks may be pushed. */
  pull(): void {
    this.#changeArrival("unpushed");
  }

  #changeArrival(event: ArrivingEvent): void {
    this.#arrival = ARRIVING_ARROWS[this.#arrival][event] ?? this.#arrival;
  }

  /** Record that the ping sent at `sentAt`, and all requests before it, were answered. */
  answered(sentAt: number): void {
    this.#answered = sentAt;
  }

  /** Return the chunks to fetch now. */
  wants(now: number): Range[] {
    if (this.#arrival === "decoded") return [];
    if (this.#lease !== null && this.#lease.count > this.#leaseCount) {
      this.#leaseCount = this.#lease.count;
      this.#heardAt = now;
    }
    const silent = now - this.#heardAt;
    if (silent >= this.timing.quiet) this.pull(); // W30
    const answered = this.#answered > this.#requestedAt; // else the chunks may be in flight
    if (silent >= (answered ? this.#patience : this.timing.patienceMax)) {
      this.#tries += 1;
      this.#requestAgain(now); // W12, W32
      this.#patience = Math.min(2 * this.#patience, this.timing.patienceMax);
    }
    const ranges: Range[] = [];
    if (this.#digest === null && this.#arrival === "pulled" && !this.#endRequested) {
      this.#endRequested = true;
      ranges.push({ first: 0, count: 0 });
    }
    if (this.#requested <= WINDOW_CHUNKS / 2) this.#fill(ranges); // W11
    if (ranges.length > 0) this.#requestedAt = now;
    return ranges;
  }

  /** Mark missing chunks as REQUESTED, up to WINDOW_CHUNKS, and add their ranges. */
  #fill(ranges: Range[]): void {
    const limit = this.#arrival === "pulled" ? this.#plan.count : this.#pushed;
    while (this.#requested < WINDOW_CHUNKS) {
      const offset = this.#states.subarray(this.#cursor, limit).indexOf(MISSING as number);
      if (offset < 0) {
        this.#cursor = Math.max(this.#cursor, limit);
        return;
      }
      const first = this.#cursor + offset;
      const most = Math.min(limit, first + WINDOW_CHUNKS - this.#requested);
      let last = first;
      while (last < most && this.#states[last] === MISSING)
        this.#states[last++] = REQUESTED as number;
      this.#requested += last - first;
      this.#cursor = last;
      ranges.push({ first, count: last - first });
    }
  }

  /** Return whether the version has its digest. If not, mark all chunks as MISSING, to start again. */
  verify(): boolean {
    if (this.#digest === digest(this.announce.layout, this.#plan.chunkBytes, this.#crcs))
      return true;
    this.#restarts += 1;
    this.#here = this.#requested = this.#cursor = 0;
    this.#states.fill(MISSING as number);
    this.#digest = null;
    this.#endRequested = false;
    this.pull();
    return false;
  }

  /** Handle a new session, in which earlier requests are not answered: request all missing chunks. */
  reconnected(now: number): void {
    this.#requestAgain(now);
    this.pull();
    this.#tries = 0;
  }

  /** Record a chunk's arrival. Lengthen the retry delay on links where chunks arrive slowly. */
  #arrived(now: number): void {
    this.#tries = 0;
    this.#gap = Math.max(now - this.#heardAt, (this.#gap * 7) / 8);
    const patience = Math.max(this.timing.patience, 4 * this.#gap); // W32
    this.#patience = Math.min(patience, this.timing.patienceMax);
    this.#heardAt = now;
  }

  /** Mark all REQUESTED chunks as MISSING, so that they are requested again. */
  #requestAgain(now: number): void {
    for (let i = 0; i < this.#states.length; i++) {
      if (this.#states[i] === REQUESTED) this.#states[i] = MISSING as number;
    }
    this.#requested = this.#cursor = 0;
    this.#endRequested = false;
    this.#heardAt = now;
  }
}

function idOf({ encoding, epoch, version }: Patch): PatchId {
  return { encoding, epoch, version };
}

/** Return the fields that identify a patch for its encryption. (D12) */
function subjectOf({ model, epoch, version, chunk_bytes }: Announce, patch: Patch): Subject {
  const { encoding, nbytes } = patch;
  const base = [patch.epoch, patch.version] as const;
  return { model, epoch, version, nbytes, chunk_bytes, encoding, base };
}
