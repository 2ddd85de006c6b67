/**
 * One model of a worker: what it runs, what is arriving, and what waits to be applied.
 *
 *     idle ──announce──> arriving ──all chunks, digest──> staged ──commit──> ready ──applied──> idle
 *                           │                               │                  │
 *                           └── newer announced ────────────┴── abort, newer   └── failed, newer
 *
 * `auto` versions are ready as soon as they are staged. The latest version wins: a newer
 * announcement replaces the transfer under way. But a worker that was replaced once finishes the
 * next one, by fetching, before it looks at anything newer; otherwise one that is slower than the
 * trainer would never complete any.
 */

import { type Effect, send } from "./effects.js";
import { Layouts, type Problem } from "./layouts.js";
import { CHUNKS_MAX, PROGRESS_CHUNKS, type Timing } from "./limits.js";
import {
  type Abort,
  type Announce,
  asText,
  type Chunk,
  type Commit,
  dataTopic,
  type End,
  type Running,
  type WorkerMessage,
} from "./messages.js";
import { Buffers, type Key, newer, type StagedVersion, sameKey } from "./staging.js";
import { type Lease, Transfer } from "./transfer.js";

const RESTARTS_MAX = 3; // transfers of one version whose digest did not match
const REJECTED_KEPT = 8; // versions remembered that could not be taken here
// What may be otherwise next time, since bytes were damaged or memory was short.
const TRANSIENT = new Set(["digest-mismatch", "layout-invalid", "no-memory", "unsupported"]);
const NONE: Key = { epoch: 0, version: 0 };

export class Slot {
  running: Running | null = null;
  ready: StagedVersion | null = null;
  catchingUp = false; // finishing one version, whatever is announced
  readonly layouts: Layouts;
  #arriving: Transfer | null = null;
  #undecided: StagedVersion | null = null; // staged together, waiting for the commit
  #waiting: Announce | null = null; // newer, but its layout or a buffer is missing
  // Older versions than these may still be taken: what was rejected may have been aborted, or meant
  // for few, and the latest for all be one that was missed.
  #rejected: Key[] = [];
  #failure: WorkerMessage | null = null; // the last one, until another version is begun
  #askedAt = Number.NEGATIVE_INFINITY; // when the latest announcement was asked for
  readonly #buffers = new Buffers();

  constructor(
    readonly model: string,
    /** Says why a layout cannot be applied here; nothing if it can. */
    fault: ConstructorParameters<typeof Layouts>[0],
    readonly bytesMax: number,
    readonly timing: Timing,
  ) {
    this.layouts = new Layouts(fault);
  }

  /** The newest version that needs no announcement any more. */
  get #newest(): Key {
    const keys = [this.running, this.ready, this.#undecided].filter((key) => key !== null);
    return keys.reduce<Key>((best, key) => (newer(key, best) ? key : best), NONE);
  }

  // What the publisher says.

  /** A beacon, a welcome or a stray chunk speaks of a version: ask if it is news. */
  hearOf(key: Key, now: number): Effect[] {
    const known = this.#arriving !== null && !newer(key, this.#arriving);
    if (key.version === 0 || known || !newer(key, this.#newest)) return [];
    return this.catchingUp || this.#isRejected(key) ? [] : this.#askLatest(key.epoch, now);
  }

  #askLatest(epoch: number, now: number): Effect[] {
    if (now - this.#askedAt < this.timing.quiet) return [];
    this.#askedAt = now;
    const layout = this.#waiting !== null && !this.layouts.knows(this.#waiting.layout);
    return [send({ type: "fetch", model: this.model, epoch, version: 0, layout })];
  }

  /** A version exists; its chunks may follow if the announcement itself was pushed. */
  announced(
    announce: Announce,
    layout: Uint8Array | undefined,
    now: number,
    pushed: boolean,
  ): Effect[] {
    if (layout !== undefined) {
      const broken = this.layouts.learn(announce, layout);
      if (broken) return this.#reject(announce, "layout-invalid", broken);
    }
    if (sameKey(this.#undecided, announce) && announce.commit === "auto") return this.#commit(now);
    if (!newer(announce, this.#newest) || this.#isRejected(announce)) return [];
    if (this.#arriving !== null && !this.#replaces(announce, this.#arriving)) return [];
    const effects = this.#begin(announce, now);
    if (pushed || !sameKey(this.#arriving, announce)) return effects;
    return [...effects, ...this.#pullAtOnce(now)];
  }

  /** No push follows an announcement on the control channel. */
  #pullAtOnce(now: number): Effect[] {
    this.#arriving?.pull();
    return this.#arriving === null ? [] : this.#pull(this.#arriving, now);
  }

  /** Whether an announcement replaces the transfer under way. */
  #replaces(announce: Announce, arriving: Transfer): boolean {
    if (!sameKey(arriving, announce)) return newer(announce, arriving) && !this.catchingUp;
    if (!sameBytes(announce, arriving.announce)) return true; // one of the two was damaged
    arriving.announce = announce; // it may have been committed meanwhile
    return false;
  }

  /** Start to receive a version, replacing an older one that is still arriving. */
  #begin(announce: Announce, now: number): Effect[] {
    this.#waiting = announce;
    const problem = this.#unsupported(announce) ?? this.layouts.problem(announce, this.model);
    if (problem !== null) return this.#reject(announce, ...problem);
    const layout = this.layouts.get(announce.layout);
    if (layout === undefined) {
      this.#askedAt = now;
      const { epoch, version } = announce;
      return [send({ type: "fetch", model: this.model, epoch, version, layout: true })];
    }
    const effects = this.#abandon();
    try {
      const buffer = this.#buffers.take(announce.nbytes);
      if (buffer === null) return effects; // `#resume` begins when one is given back
      this.#waiting = this.#failure = null;
      this.#arriving = new Transfer(announce, layout, buffer, now, this.timing);
      return effects;
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      const text = `there is no memory for ${announce.nbytes} bytes: lower bytesMax, or make room`;
      const rejected = this.#reject(announce, "no-memory", text);
      return [...effects, ...rejected, ...this.#caughtUp(announce.epoch, now)];
    }
  }

  /** A newer version replaces the one arriving; the next is finished, whatever comes. */
  #abandon(): Effect[] {
    if (this.#arriving === null) return [];
    this.#release(this.#arriving);
    if (this.catchingUp) return [];
    this.catchingUp = true;
    return [{ do: "subscribe", topic: dataTopic(this.model), on: false }];
  }

  #unsupported(announce: Announce): Problem | null {
    const { encoding, encryption, nbytes, chunk_bytes } = announce;
    if (encoding !== "raw" || encryption !== null) {
      const what = `encoding ${encoding}, encryption ${encryption ?? "none"}`;
      return ["unsupported", `${what}; this worker takes raw without encryption`];
    }
    if (nbytes > this.bytesMax) {
      const text = `${nbytes} bytes; this worker takes at most ${this.bytesMax}`;
      return ["too-large", `${text}: raise its bytesMax if that is meant`];
    }
    if (nbytes > CHUNKS_MAX * chunk_bytes) {
      const text = `${nbytes} bytes in chunks of ${chunk_bytes}`;
      return ["too-many-chunks", `${text} are more than ${CHUNKS_MAX} chunks`];
    }
    return null;
  }

  #isRejected(key: Key): boolean {
    return this.#rejected.some((rejected) => sameKey(rejected, key));
  }

  #remember(key: Key): void {
    this.#rejected = [...this.#rejected, key].slice(-REJECTED_KEPT);
  }

  #reject(announce: Announce, code: string, text: string): Effect[] {
    if (!TRANSIENT.has(code)) this.#remember(announce);
    this.#waiting = null;
    const { epoch, version } = announce;
    const rejected: Effect = { do: "rejected", model: this.model, epoch, version, code, text };
    return [this.#fail(announce, code, text), rejected];
  }

  #fail({ epoch, version }: Key, code: string, text: string): Effect {
    const { model } = this;
    this.#failure = { type: "failed", model, epoch, version, code, text: asText(text) };
    return send(this.#failure);
  }

  /** Say where a chunk's payload belongs that is about to be received; null: nowhere. */
  place(chunk: Chunk, size: number): Lease | null {
    return sameKey(this.#arriving, chunk)
      ? (this.#arriving?.lend(chunk.index, size) ?? null)
      : null;
  }

  /** A piece of a version. */
  chunk(chunk: Chunk, payload: Uint8Array, now: number, pushed: boolean): Effect[] {
    const transfer = this.#arriving;
    if (transfer === null || !sameKey(transfer, chunk)) {
      return this.#waiting === null ? this.hearOf(chunk, now) : [];
    }
    const fresh = transfer.add(chunk.index, chunk.crc, payload, now, pushed);
    const effects = this.#pull(transfer, now);
    if (fresh && pushed && transfer.here % PROGRESS_CHUNKS === 0) {
      effects.push(this.#progress(transfer));
    }
    return [...effects, ...this.#completed(now)];
  }

  /** All chunks of a version are out. */
  end(end: End, now: number): Effect[] {
    const transfer = this.#arriving;
    if (transfer === null || !sameKey(transfer, end)) {
      return this.#waiting === null ? this.hearOf(end, now) : [];
    }
    transfer.end(end.digest);
    return [...this.#pull(transfer, now), ...this.#completed(now)];
  }

  #pull(transfer: Transfer, now: number): Effect[] {
    const { model } = this;
    const { epoch, version } = transfer;
    return transfer
      .wants(now)
      .map((range) => send({ type: "fetch", model, epoch, version, ...range }));
  }

  #progress({ epoch, version, here }: Transfer): Effect {
    return send({ type: "progress", model: this.model, epoch, version, chunks: here });
  }

  /** If the version is whole: verify it, then stage it. */
  #completed(now: number): Effect[] {
    const transfer = this.#arriving;
    if (transfer === null || !transfer.complete) return [];
    if (!transfer.verify()) {
      if (transfer.restarts < RESTARTS_MAX) return []; // the next tick fetches it anew
      this.#release(transfer);
      const text = `the whole did not match its digest, ${transfer.restarts} times`;
      const rejected = this.#reject(transfer.announce, "digest-mismatch", text);
      return [...rejected, ...this.#caughtUp(transfer.epoch, now)];
    }
    this.#arriving = null;
    return [...this.#stage(transfer, now), ...this.#caughtUp(transfer.epoch, now)];
  }

  #stage(transfer: Transfer, now: number): Effect[] {
    const { announce, layout, epoch, version } = transfer;
    const together = announce.commit === "together";
    const staged: StagedVersion = {
      model: this.model,
      epoch,
      version,
      layout,
      data: transfer.buffer,
      digest: transfer.digest ?? "",
      sayStaged: together || announce.acknowledge === "staged",
    };
    const effects = staged.sayStaged ? [this.#sayStaged(staged)] : [];
    this.#forgetUndecided();
    this.#undecided = staged;
    return together ? effects : [...effects, ...this.#commit(now)];
  }

  /** A newer version is whole, or this one will not be committed. */
  #forgetUndecided(): void {
    if (this.#undecided !== null) this.#buffers.giveBack(this.#undecided.data);
    this.#undecided = null;
  }

  /** What is staged is ready, in place of an older version that nobody has applied. */
  #commit(now: number): Effect[] {
    if (this.#undecided === null) return [];
    const replaced = this.ready;
    this.ready = this.#undecided;
    this.#undecided = null;
    if (replaced !== null) this.#buffers.giveBack(replaced.data);
    return [{ do: "ready", model: this.model }, ...this.#resume(now)];
  }

  /** A transfer is over: take pushed chunks again, and look for what came meanwhile. */
  #caughtUp(epoch: number, now: number): Effect[] {
    if (!this.catchingUp) return [];
    this.catchingUp = false;
    const again: Effect = { do: "subscribe", topic: dataTopic(this.model), on: true };
    return [again, ...this.#askLatest(epoch, now)];
  }

  /** The version that is staged here may be applied. */
  committed(commit: Commit, now: number): Effect[] {
    const staged = this.#undecided;
    return sameKey(staged, commit) && staged?.digest === commit.digest ? this.#commit(now) : [];
  }

  /** The version must not be applied; drop what there is of it. */
  aborted(abort: Abort, now: number): Effect[] {
    if (sameKey(this.#undecided, abort)) {
      this.#forgetUndecided();
      return this.#resume(now);
    }
    return sameKey(this.#arriving, abort) ? this.#dropArriving(now) : [];
  }

  /** The publisher no longer has a version; an epoch of 0 says nothing of whose it was. */
  gone({ epoch, version }: Key, now: number): Effect[] {
    const arriving = this.#arriving;
    if (arriving !== null && epoch !== 0 && epoch !== arriving.epoch) return [];
    if (this.#waiting !== null && (version === 0 || version === this.#waiting.version)) {
      this.#waiting = null;
    }
    if (arriving === null || arriving.version !== version) return [];
    return [...this.#dropArriving(now), ...this.#askLatest(arriving.epoch, now)];
  }

  #dropArriving(now: number): Effect[] {
    const arriving = this.#arriving;
    if (arriving === null) return [];
    this.#release(arriving);
    this.#waiting = null;
    return this.#caughtUp(arriving.epoch, now);
  }

  /** Versions will come, probably of this size: have a buffer for them. */
  expect(nbytes: number): void {
    if (nbytes <= this.bytesMax) this.#buffers.reserve(nbytes);
  }

  /** A transfer is over before it is whole: its buffer may serve another. */
  #release(transfer: Transfer): void {
    if (transfer.revoke()) this.#buffers.forget();
    else this.#buffers.giveBack(transfer.buffer);
    this.#arriving = null;
  }

  /** The publisher has let this worker in (again), and has this version for it. */
  reconnected(latest: Key, now: number): Effect[] {
    const effects: Effect[] = [];
    if (this.#undecided !== null && this.#undecided.epoch !== latest.epoch) this.#forgetUndecided();
    this.#waiting = null;
    this.#rejected = [];
    if (this.#arriving !== null && this.#arriving.epoch !== latest.epoch) {
      effects.push(...this.#dropArriving(now));
    }
    this.#arriving?.reconnected(now);
    this.#askedAt = Number.NEGATIVE_INFINITY;
    return [...effects, ...this.#repeatStaged(), ...this.hearOf(latest, now)];
  }

  #repeatStaged(): Effect[] {
    const held = [this.ready, this.#undecided].filter((staged) => staged !== null);
    return held.filter((staged) => staged.sayStaged).map((staged) => this.#sayStaged(staged));
  }

  #sayStaged({ epoch, version, digest }: StagedVersion): Effect {
    return send({ type: "staged", model: this.model, epoch, version, digest });
  }

  #sayApplied(running: Running): Effect {
    return send({ type: "applied", model: this.model, ...running });
  }

  // What the user does with the version that is ready.

  /** It was applied, and runs here. `keep`: its memory stays with the user. */
  applied(now: number, keep = false): Effect[] {
    const staged = this.#takeReady(keep);
    if (staged === null) return [];
    const { epoch, version, digest } = staged;
    this.running = { epoch, version, digest };
    return [this.#sayApplied(this.running), ...this.#resume(now)];
  }

  /** It could not be applied; the old one still runs. */
  failed(text: string, now: number): Effect[] {
    const staged = this.#takeReady(false);
    if (staged === null) return [];
    this.#remember(staged);
    return [this.#fail(staged, "apply", text), ...this.#resume(now)];
  }

  #takeReady(keep: boolean): StagedVersion | null {
    const staged = this.ready;
    this.ready = null;
    if (staged !== null && keep) this.#buffers.forget();
    else if (staged !== null) this.#buffers.giveBack(staged.data);
    return staged;
  }

  /** A buffer is free: begin what waited for it. */
  #resume(now: number): Effect[] {
    const waiting = this.#waiting;
    if (waiting === null || this.#arriving !== null) return [];
    if (newer(waiting, this.#newest)) return this.#begin(waiting, now);
    this.#waiting = null;
    return [];
  }

  // Time.

  /** Fetch what is due. */
  tick(now: number): Effect[] {
    if (this.#arriving !== null) {
      return [...this.#pull(this.#arriving, now), ...this.#completed(now)];
    }
    if (this.#waiting === null || now - this.#askedAt < this.timing.patience) return [];
    return this.#begin(this.#waiting, now);
  }

  /** Say again how things stand, in case it got lost. */
  repeat(): Effect[] {
    const effects = this.#repeatStaged();
    if (this.#arriving !== null) effects.unshift(this.#progress(this.#arriving));
    if (this.running !== null) effects.push(this.#sayApplied(this.running));
    if (this.#failure !== null) effects.push(send(this.#failure));
    if (this.ready !== null && this.#arriving === null) {
      const { model, epoch, version } = this.ready;
      effects.push(send({ type: "progress", model, epoch, version, chunks: 0, phase: "staged" }));
    }
    return effects;
  }
}

/** Whether two announcements of a version agree on what arrives. */
function sameBytes(one: Announce, other: Announce): boolean {
  return (
    one.layout === other.layout &&
    one.nbytes === other.nbytes &&
    one.chunk_bytes === other.chunk_bytes
  );
}
