/** The versions of one model that are here, each in its phase, and the memory that they take. */

import type { Layout } from "./layout.js";
import type { Announce, Running } from "./messages.js";
import { ARROWS, type Event, type Gain, LACKS, type Lack, type Phase } from "./phases.js";
import { type Base, Buffers, type Key, newer, type StagedVersion, sameKey } from "./staging.js";
import type { Transfer } from "./transfer.js";

const REJECTED_KEPT = 8; // versions remembered that could not be taken here
const IN_MEMORY: readonly Phase[] = ["arriving", "staged", "ready", "applying"]; // need a buffer
const NONE: Key = { epoch: 0, version: 0 };

/** A version that is here, and what there is of it in its phase. */
export class Held implements Key {
  epoch: number;
  version: number;
  phase: Phase = "announced";
  /** While it is announced. */
  lacks: Lack = "layout";
  buffer: Uint8Array | null = null;
  /** Whether the user keeps the buffer, once the version runs. */
  kept = false;
  layout!: Layout; // once it arrives
  transfer!: Transfer; // while it arrives
  staged!: StagedVersion; // once it is whole
  running!: Running; // while it runs
  /** What is said of it: by the name that it has. */
  metadata: ReadonlyMap<string, string>;

  constructor(public announce: Announce) {
    this.epoch = announce.epoch;
    this.version = announce.version;
    this.metadata = announce.metadata;
  }

  /** Something that an announced version lacked is here, or is not to be had for now. */
  gain(event: Gain): void {
    this.lacks = LACKS[this.lacks][event] ?? this.lacks;
  }
}

/** The versions of one model. */
export class Holdings {
  readonly buffers = new Buffers();
  /** What patches may build on. */
  base: Base | null = null;
  // Could not be taken; not tried again. An older one still may be: what was rejected may have
  // been aborted, or meant for few, and the latest for all be one that was missed.
  rejected: readonly Key[] = [];
  #live: Held[] = []; // but for those that were dropped or rejected; each behind those before it

  /** The version in a phase, the oldest if there are several. */
  at(phase: Phase): Held | null {
    return this.#live.find((held) => held.phase === phase) ?? null;
  }

  /** The versions in some phases. */
  all(...phases: Phase[]): Held[] {
    return phases.flatMap((phase) => this.#live.filter((held) => held.phase === phase));
  }

  /** The newest version that needs no announcement any more. */
  get newest(): Key {
    const known = this.all("staged", "ready", "applying", "running");
    return known.reduce<Key>((best, held) => (newer(held, best) ? held : best), NONE);
  }

  isRejected(key: Key): boolean {
    return this.rejected.some((rejected) => sameKey(rejected, key));
  }

  /** Take note of a version that was announced, in place of any that was only announced. */
  expect(announce: Announce): Held {
    this.move(this.at("announced"), "newer");
    const held = new Held(announce);
    this.#live.push(held);
    return held;
  }

  /**
   * Give a version a staging buffer; false if all are in use: then it lacks one of these.
   *
   * @throws RangeError - if there is no memory, not even that of what patches build on.
   */
  takeMemory(held: Held): boolean {
    const { nbytes } = held.announce;
    try {
      held.buffer = this.buffers.take(nbytes);
    } catch (error) {
      if (!(error instanceof RangeError) || !this.drop(true)) throw error;
      held.buffer = this.buffers.take(nbytes);
    }
    held.gain(held.buffer === null ? "full" : "freed");
    return held.buffer !== null;
  }

  /** Have a version of another name in the place of one that runs. */
  rename(held: Held, { epoch, version }: Key, metadata: Held["metadata"]): void {
    if (!this.move(held, "renamed")) return;
    Object.assign(held, { epoch, version, metadata });
    const running = { epoch, version, digest: held.running.digest };
    if (this.base?.running === held.running) this.base.running = running;
    held.running = running;
  }

  // What patches build on.

  /**
   * What is about to run is what patches build on from now on, in place of what ran; unless one that
   * is arriving still needs that.
   */
  keep(held: Held): void {
    const own = !held.kept; // else the user has it, and we look at it
    this.drop(own);
    if (this.base !== null) return;
    this.base = { running: held.running, layout: held.layout, data: held.staged.data, own };
    if (!own) return;
    this.buffers.forget();
    held.buffer = null;
  }

  /**
   * Have nothing for patches to build on, unless one that is arriving needs it. Its buffer serves
   * other versions if it is of `use`: else it was needed for this alone.
   *
   * @returns whether there was something.
   */
  drop(use: boolean): boolean {
    const { base } = this;
    if (base === null || this.at("arriving")?.transfer.base === base) return false;
    if (base.own && use) this.buffers.add(base.data);
    this.base = null;
    return true;
  }

  /** A patch no longer needs what it builds on: if that runs no more, nobody does. */
  release(transfer: Transfer): void {
    const { base } = transfer;
    transfer.base = null;
    const runs = this.at("running");
    if (base === null || base.running === runs?.running) return;
    this.drop(runs?.announce.keep ?? true);
  }

  /** Let something happen to a version; return whether it has an arrow for that. */
  move(held: Held | null, event: Event): boolean {
    const after = held === null ? undefined : ARROWS[held.phase][event];
    if (held === null || after === undefined) return false;
    held.phase = after;
    this.#live = this.#live.filter((other) => other !== held);
    if (after === "rejected") this.rejected = [...this.rejected, held].slice(-REJECTED_KEPT);
    else if (after !== "dropped") this.#live.push(held);
    if (!IN_MEMORY.includes(after)) this.#giveBack(held);
    return true;
  }

  /** What the user keeps, or the kernel may yet write into, serves no other version. */
  #giveBack(held: Held): void {
    if (held.buffer === null) return;
    if (held.transfer.revoke() || held.kept) this.buffers.forget();
    else this.buffers.giveBack(held.buffer);
    held.buffer = null;
    this.release(held.transfer);
  }
}
