/** Stores the versions of one model at the worker, each with its phase, and their memory. */

import type { Layout } from "./layout.js";
import type { Announce, Running } from "./messages.js";
import {
  ANNOUNCED_ARROWS,
  type AnnouncedEvent,
  type AnnouncedState,
  MODEL_ARROWS,
  type ModelEvent,
  type ModelState,
  VERSION_ARROWS,
  type VersionEvent,
  type VersionState,
} from "./phases.js";
import { type Base, Buffers, type Key, newer, type StagedVersion, sameKey } from "./staging.js";
import type { Transfer } from "./transfer.js";

const REJECTED_KEPT = 8; // rejected versions that are remembered
// The phases in which a version has a buffer.
const IN_MEMORY: readonly VersionState[] = ["arriving", "staged", "ready", "applying"];
const NONE: Key = { epoch: 0, version: 0 };

/** A version, with its phase and the data that a version has in that phase. */
class VersionRecord implements Key {
  epoch: number;
  version: number;
  phase: VersionState = "announced";
  /** What the version waits for, while it is announced. */
  lacks: AnnouncedState = "layout";
  buffer: Uint8Array | null = null;
  layout!: Layout; // once known
  transfer!: Transfer; // while arriving
  staged!: StagedVersion; // once staged
  held = false; // while staged: whether it is committed and waits for its companions
  running!: Running; // while running
  note = ""; // while running: a text on values that the model's dtypes cannot hold
  /** The metadata of the version's current key. */
  metadata: ReadonlyMap<string, string>;

  constructor(public announce: Announce) {
    this.epoch = announce.epoch;
    this.version = announce.version;
    this.metadata = announce.metadata;
  }

  /**
   * Replace the stored announcement with a repeated one. Return false, and change nothing, if the
   * two announcements describe different bytes.
   */
  updateAnnouncement(announce: Announce): boolean {
    const [ours, theirs] = [this.announce, announce];
    const same = ours.layout === theirs.layout && ours.nbytes === theirs.nbytes;
    if (!same || ours.chunk_bytes !== theirs.chunk_bytes) return false;
    this.announce = theirs;
    return true;
  }

  /** Apply an event to `lacks`, such as that the layout or memory is available, and set the layout. */
  resolve(event: AnnouncedEvent, layout: Layout = this.layout): void {
    this.lacks = ANNOUNCED_ARROWS[this.lacks][event] ?? this.lacks;
    this.layout = layout;
  }

  /** Record that the staged version is committed, and waits for its companions. (C2) */
  hold(): void {
    this.held = true;
  }

  /** Set the transfer that receives the version. */
  setTransfer(transfer: Transfer): void {
    this.transfer = transfer;
  }
}

/** A version, read-only for other modules. */
export type VersionEntry = Readonly<VersionRecord>;

/** The fields that `move` sets together with the phase. */
type Part = Partial<Pick<VersionEntry, "transfer" | "staged" | "running" | "note">>;

/** The versions of one model. */
export class VersionStore {
  readonly buffers = new Buffers();
  #mode: ModelState = "following";
  #base: Base | null = null;
  // Versions that are not retried. A version older than a rejected one is still accepted: the
  // rejected version may have been aborted, or sent to a few workers only, so that the older
  // version is the latest for all workers.
  #rejected: readonly Key[] = [];
  #live: VersionRecord[] = []; // neither dropped nor rejected, in the order of their last moves

  get mode(): ModelState {
    return this.#mode;
  }

  /** The version that patches may build on, with its bytes. */
  get base(): Base | null {
    return this.#base;
  }

  /** Return the version in a phase, the earliest if there are several; null if there is none. */
  inPhase(phase: VersionState): VersionEntry | null {
    return this.#live.find((entry) => entry.phase === phase) ?? null;
  }

  /** Return the versions in any of these phases. */
  inPhases(...phases: VersionState[]): VersionEntry[] {
    return phases.flatMap((phase) => this.#live.filter((entry) => entry.phase === phase));
  }

  /** Return the version with this key; null if it is in none of these phases. */
  find(key: Key, ...phases: VersionState[]): VersionEntry | null {
    return this.inPhases(...phases).find((entry) => sameKey(entry, key)) ?? null;
  }

  /** The staged version if it is committed and waits for its companions; else null. */
  get held(): VersionEntry | null {
    const staged = this.inPhase("staged");
    return staged?.held ? staged : null;
  }

  /** Whether the version with this key, or a newer version, is ready or runs. */
  offers(key: Key): boolean {
    return this.inPhases("ready", "running").some((entry) => !newer(key, entry));
  }

  /** The key of the newest complete version. */
  get newest(): Key {
    const known = this.inPhases("staged", "ready", "applying", "running");
    return known.reduce<Key>((best, entry) => (newer(entry, best) ? entry : best), NONE);
  }

  isRejected(key: Key): boolean {
    return this.#rejected.some((rejected) => sameKey(rejected, key));
  }

  /** Add an announced version, and drop the version that was announced before. */
  expect(announce: Announce): VersionEntry {
    this.move(this.inPhase("announced"), "newer");
    const entry = new VersionRecord(announce);
    this.#live.push(entry);
    return entry;
  }

  /**
   * Begin a session of this epoch: drop all announced versions, and the arriving and staged versions
   * of other epochs. Request missing chunks again, since earlier requests will not be answered.
   */
  reconnected(epoch: number, now: number): void {
    for (const entry of this.inPhases("announced", "arriving", "staged")) {
      if (entry.phase === "announced" || entry.epoch !== epoch)
        this.move(entry, "fenced"); // which drops it (W28)
      else if (entry.phase === "arriving") entry.transfer.reconnected(now);
    }
    this.#rejected = [];
  }

  // Memory.

  /**
   * Take a staging buffer for a version. If all buffers are in use, record that the version waits
   * for a buffer, and return false.
   *
   * @throws RangeError - if there is no memory, even after the patch base is released.
   */
  takeMemory(entry: VersionRecord): boolean {
    const { nbytes } = entry.announce;
    try {
      entry.buffer = this.buffers.take(nbytes);
    } catch (error) {
      const short = error instanceof RangeError && this.#base !== null;
      if (!short || !this.setPatchBase(null, null, null)) throw error;
      entry.buffer = this.buffers.take(nbytes);
    }
    entry.resolve(entry.buffer === null ? "full" : "freed");
    return entry.buffer !== null;
  }

  /** Detach a version's buffer from the staging memory: the user of the version now owns it. */
  detachBuffer(entry: VersionRecord): void {
    if (entry.buffer !== null) this.buffers.forget();
    entry.buffer = null;
  }

  // The patch base.

  /**
   * Make the bytes of a new running version the patch base; if `entry` or `data` is null, there is no
   * base any more. While an arriving patch needs the previous base, change nothing and return false.
   */
  setPatchBase(
    entry: VersionRecord | null,
    running: Running | null,
    data: Uint8Array | null,
  ): boolean {
    const old = this.#base;
    if (old !== null && this.inPhase("arriving")?.transfer.base === old) return false;
    const own = entry !== null && data !== null && data === entry.buffer;
    if (old?.own && (entry === null || own)) this.buffers.add(old.data); // else drop it
    this.#base = null;
    if (entry === null || running === null || data === null) return true;
    if (own) this.detachBuffer(entry);
    this.#base = { running, layout: entry.layout, data, own };
    return true;
  }

  /** End a transfer's use of its patch base. Release the base unless the base's version still runs. */
  release(transfer: Transfer): void {
    const [base, runs] = [transfer.takeBase(), this.inPhase("running")];
    if (base === null || base !== this.#base || base.running === runs?.running) return;
    this.setPatchBase(runs?.announce.keep === false ? runs : null, null, null);
  }

  // Phases.

  /** Give the running version another key and other metadata. */
  rename(entry: VersionRecord, { epoch, version }: Key, metadata: VersionEntry["metadata"]): void {
    const was = entry.running;
    const running = { epoch, version, digest: was.digest };
    if (!this.move(entry, "renamed", { running })) return;
    if (this.#base?.running === was) this.#base = { ...this.#base, running };
    entry.epoch = epoch;
    entry.version = version;
    entry.metadata = metadata;
  }

  /** Apply an event to the mode. Return false if the mode has no transition for the event. */
  changeMode(event: ModelEvent): boolean {
    const mode = MODEL_ARROWS[this.#mode][event]; // W26
    this.#mode = mode ?? this.#mode;
    return mode !== undefined;
  }

  /**
   * Apply an event to a version, and set `fields`. Return false, and change nothing, if `entry` is
   * null, or its phase has no transition for the event.
   */
  move(entry: VersionRecord | null, event: VersionEvent, fields: Part = {}): boolean {
    const after = entry === null ? undefined : VERSION_ARROWS[entry.phase][event];
    if (entry === null || after === undefined) return false;
    Object.assign(entry, fields, { phase: after });
    this.#live = this.#live.filter((other) => other !== entry);
    if (after === "rejected") this.#rejected = [...this.#rejected, entry].slice(-REJECTED_KEPT);
    else if (after !== "dropped") this.#live.push(entry);
    if (!IN_MEMORY.includes(after)) this.#giveBack(entry);
    return true;
  }

  /** Return a version's buffer for reuse, unless the kernel may still write into the buffer. */
  #giveBack(entry: VersionRecord): void {
    if (entry.buffer === null) return;
    if (entry.transfer.revoke()) this.buffers.forget();
    else this.buffers.giveBack(entry.buffer);
    entry.buffer = null;
    this.release(entry.transfer);
  }
}
