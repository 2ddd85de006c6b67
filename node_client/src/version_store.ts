/** The versions of one model that are here, each in its phase, and the memory that they take. */

import type { Layout } from "./layout.js";
import type { Announce, Running } from "./messages.js";
import {
  ARROWS,
  type Event,
  LACKS,
  type Lack,
  type LackEvent,
  MODES,
  type Mode,
  type ModeEvent,
  type Phase,
} from "./phases.js";
import { type Base, Buffers, type Key, newer, type StagedVersion, sameKey } from "./staging.js";
import type { Transfer } from "./transfer.js";

const REJECTED_KEPT = 8; // versions remembered that could not be taken here
const IN_MEMORY: readonly Phase[] = ["arriving", "staged", "ready", "applying"]; // need a buffer
const NONE: Key = { epoch: 0, version: 0 };

/** A version that is here, and what there is of it in its phase. */
class VersionRecord implements Key {
  epoch: number;
  version: number;
  phase: Phase = "announced";
  /** While it is announced. */
  lacks: Lack = "layout";
  buffer: Uint8Array | null = null;
  layout!: Layout; // once it does not lack that
  transfer!: Transfer; // while it arrives
  staged!: StagedVersion; // once it is whole
  running!: Running; // while it runs
  note = ""; // while it runs: of values that the model cannot hold
  /** What is said of it: by the name that it has. */
  metadata: ReadonlyMap<string, string>;

  constructor(public announce: Announce) {
    this.epoch = announce.epoch;
    this.version = announce.version;
    this.metadata = announce.metadata;
  }

  /** It is announced again; take that, if the same arrives, and return whether it does. */
  update_announcement(announce: Announce): boolean {
    const [ours, theirs] = [this.announce, announce];
    const same = ours.layout === theirs.layout && ours.nbytes === theirs.nbytes;
    if (!same || ours.chunk_bytes !== theirs.chunk_bytes) return false;
    this.announce = theirs;
    return true;
  }

  /** Something that an announced version lacked is here, or is not to be had for now. */
  resolve(event: LackEvent, layout: Layout = this.layout): void {
    this.lacks = LACKS[this.lacks][event] ?? this.lacks;
    this.layout = layout;
  }

  /** It arrives anew, by other means. */
  comesBy(transfer: Transfer): void {
    this.transfer = transfer;
  }
}

/** To others it can only be read. */
export type VersionEntry = Readonly<VersionRecord>;

/** By what a version arrives, what is whole, as what it runs. */
type Part = Partial<Pick<VersionEntry, "transfer" | "staged" | "running" | "note">>;

/** The versions of one model. */
export class VersionStore {
  readonly buffers = new Buffers();
  #mode: Mode = "following";
  #base: Base | null = null;
  // Could not be taken; not tried again. An older one still may be: what was rejected may have
  // been aborted, or meant for few, and the latest for all be one that was missed.
  #rejected: readonly Key[] = [];
  #live: VersionRecord[] = []; // but for those that were dropped or rejected; each behind those before it

  get mode(): Mode {
    return this.#mode;
  }

  /** What patches may build on. */
  get base(): Base | null {
    return this.#base;
  }

  /** The version in a phase, the oldest if there are several. */
  at(phase: Phase): VersionEntry | null {
    return this.#live.find((entry) => entry.phase === phase) ?? null;
  }

  /** The versions in some phases. */
  all(...phases: Phase[]): VersionEntry[] {
    return phases.flatMap((phase) => this.#live.filter((entry) => entry.phase === phase));
  }

  /** The version of this key, if it is in one of some phases. */
  find(key: Key, ...phases: Phase[]): VersionEntry | null {
    return this.all(...phases).find((entry) => sameKey(entry, key)) ?? null;
  }

  /** The newest version that needs no announcement any more. */
  get newest(): Key {
    const known = this.all("staged", "ready", "applying", "running");
    return known.reduce<Key>((best, entry) => (newer(entry, best) ? entry : best), NONE);
  }

  isRejected(key: Key): boolean {
    return this.#rejected.some((rejected) => sameKey(rejected, key));
  }

  /** Take note of a version that was announced, in place of any that was only announced. */
  expect(announce: Announce): VersionEntry {
    this.move(this.at("announced"), "newer");
    const entry = new VersionRecord(announce);
    this.#live.push(entry);
    return entry;
  }

  /** A session begins, of this epoch: what was asked for before will not come. */
  reconnected(epoch: number, now: number): void {
    for (const entry of this.all("announced", "arriving", "staged")) {
      if (entry.phase === "announced" || entry.epoch !== epoch)
        this.move(entry, "fenced"); // W28
      else if (entry.phase === "arriving") entry.transfer.reconnected(now);
    }
    this.#rejected = [];
  }

  // Memory.

  /**
   * Give a version a staging buffer; false if all are in use: then it lacks one of these.
   *
   * @throws RangeError - if there is no memory, not even that of what patches build on.
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

  /** The user goes on using the buffer of a version: it is ours no more. */
  letGo(entry: VersionRecord): void {
    if (entry.buffer !== null) this.buffers.forget();
    entry.buffer = null;
  }

  // What patches build on.

  /**
   * What runs is another version: keep its bytes in place of those of the one before. But if these
   * are still needed, they stay until the next version runs; then return false.
   */
  setPatchBase(
    entry: VersionRecord | null,
    running: Running | null,
    data: Uint8Array | null,
  ): boolean {
    const old = this.#base;
    if (old !== null && this.at("arriving")?.transfer.base === old) return false;
    const own = entry !== null && data !== null && data === entry.buffer;
    if (old?.own && (entry === null || own)) this.buffers.add(old.data); // else it was for this alone
    this.#base = null;
    if (entry === null || running === null || data === null) return true;
    if (own) this.letGo(entry);
    this.#base = { running, layout: entry.layout, data, own };
    return true;
  }

  /** A patch no longer needs what it builds on: if that runs no more, nobody does. */
  release(transfer: Transfer): void {
    const [base, runs] = [transfer.release(), this.at("running")];
    if (base === null || base !== this.#base || base.running === runs?.running) return;
    this.setPatchBase(runs?.announce.keep === false ? runs : null, null, null);
  }

  // Phases.

  /** Have a version of another name in the place of one that runs. */
  rename(entry: VersionRecord, { epoch, version }: Key, metadata: VersionEntry["metadata"]): void {
    const was = entry.running;
    const running = { epoch, version, digest: was.digest };
    if (!this.move(entry, "renamed", { running })) return;
    if (this.#base?.running === was) this.#base = { ...this.#base, running };
    entry.epoch = epoch;
    entry.version = version;
    entry.metadata = metadata;
  }

  /** Let something happen to the model; return whether its mode is another one now. */
  changeMode(event: ModeEvent): boolean {
    const mode = MODES[this.#mode][event]; // W26
    this.#mode = mode ?? this.#mode;
    return mode !== undefined;
  }

  /** Let something happen to a version, by which there is more of it; or is there no arrow? */
  move(entry: VersionRecord | null, event: Event, by: Part = {}): boolean {
    const after = entry === null ? undefined : ARROWS[entry.phase][event];
    if (entry === null || after === undefined) return false;
    Object.assign(entry, by, { phase: after });
    this.#live = this.#live.filter((other) => other !== entry);
    if (after === "rejected") this.#rejected = [...this.#rejected, entry].slice(-REJECTED_KEPT);
    else if (after !== "dropped") this.#live.push(entry);
    if (!IN_MEMORY.includes(after)) this.#giveBack(entry);
    return true;
  }

  /** What the kernel may yet write into serves no other version. */
  #giveBack(entry: VersionRecord): void {
    if (entry.buffer === null) return;
    if (entry.transfer.revoke()) this.buffers.forget();
    else this.buffers.giveBack(entry.buffer);
    entry.buffer = null;
    this.release(entry.transfer);
  }
}
