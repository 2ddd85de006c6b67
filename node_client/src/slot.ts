/**
 * One model of a worker: what comes of it, and what becomes of the versions here (`phases.ts`).
 *
 * The latest version wins: an older one that is on its way makes room for it. But a worker that had
 * to drop one finishes the next, by fetching, before it looks at anything newer.
 */

import { type Effect, send } from "./effects.js";
import { type Held, Holdings } from "./holdings.js";
import type { Keyring } from "./keyring.js";
import { Acceptance, type Accepts } from "./layouts.js";
import { APPLIES_MAX, PROGRESS_CHUNKS, type Timing } from "./limits.js";
import {
  type Announce,
  asText,
  type Chunk,
  type Commit,
  type End,
  type Failed,
  type Refuse,
  type Rename,
  type Running,
  type SealedChunk,
} from "./messages.js";
import { Patches } from "./patches.js";
import type { Patching } from "./patching.js";
import { MODES, type Mode, type Turn } from "./phases.js";
import { AES_256_GCM } from "./sealing.js";
import { type Key, newer, type StagedVersion, sameKey } from "./staging.js";
import type { Lease } from "./transfer.js";

const RESTARTS_MAX = 3; // transfers of one version whose digest did not match, before it is given up
// What may be otherwise next time, since bytes were damaged or memory was short: it is tried again,
// after a while.
const TRANSIENT = new Set(["digest-mismatch", "layout-invalid", "no-memory", "unsupported"]);

export class Slot {
  readonly holds = new Holdings();
  mode: Mode = "following";
  epoch = 0; // the greatest of which bytes were written into the model
  #torn = 0; // applies in a row that failed half-way: while there is one, nothing runs
  #failure: Failed | null = null; // the last one, until another version is begun
  #askedAt = Number.NEGATIVE_INFINITY; // when the latest announcement was asked for
  #answered = Number.NEGATIVE_INFINITY; // when the last ping was sent that was answered
  #later: Key = { epoch: 0, version: 0 }; // what has failed, and is put off
  #until = Number.NEGATIVE_INFINITY; // when it may be tried again
  #pause = 0; // for which it was put off
  readonly #acceptance: Acceptance;
  readonly #patches: Patches;

  constructor(
    readonly model: string,
    accepts: Accepts,
    bytesMax: number,
    readonly timing: Timing,
    keyring: Keyring | null,
    /** Whether patches are taken. */
    patches: boolean,
  ) {
    this.#acceptance = new Acceptance(model, accepts, bytesMax, keyring && AES_256_GCM);
    this.#patches = new Patches(model, this.holds, timing, keyring, patches);
  }

  /** Whether pushed chunks are listened to, and on which topic. */
  get subscription(): Effect {
    return { do: "subscribe", topic: this.#patches.topic, on: this.mode === "following" };
  }

  /** Whether an apply failed half-way: the model holds no version. */
  get torn(): boolean {
    return this.#torn > 0;
  }

  get running(): Running | null {
    return this.holds.at("running")?.running ?? null;
  }

  /** What is said of the version that runs. */
  get metadata(): Held["metadata"] | undefined {
    return this.holds.at("running")?.metadata;
  }

  // What the publisher says.

  /** A beacon, a welcome or a stray chunk speaks of a version: ask if it is news. */
  hearOf(key: Key, now: number): Effect[] {
    const arriving = this.holds.at("arriving"); // W4, W15, W26
    if (key.version === 0 || this.holds.isRejected(key)) return [];
    if (!newer(key, this.holds.newest)) return [];
    if (arriving !== null && (!newer(key, arriving) || this.mode === "catching-up")) return [];
    const waiting = this.holds.at("announced");
    if (waiting?.lacks === "layout" && !newer(key, waiting)) return []; // W7
    if (!newer(key, this.#later) && now < this.#until) return []; // W36
    return this.#askLatest(key.epoch, now);
  }

  #askLatest(epoch: number, now: number): Effect[] {
    if (now - this.#askedAt < this.timing.quiet) return []; // W4
    this.#askedAt = now;
    const layout = this.holds.at("announced")?.lacks === "layout";
    return [send({ type: "fetch", model: this.model, epoch, version: 0, layout })];
  }

  /** A version exists; its chunks may follow if the announcement itself was pushed. */
  announced(
    announce: Announce,
    layout: Uint8Array | undefined,
    now: number,
    pushed: boolean,
  ): Effect[] {
    const fault = layout === undefined ? null : this.#acceptance.learn(announce, layout);
    if (fault !== null) {
      const waiting = this.holds.at("announced");
      if (sameKey(waiting, announce)) this.holds.move(waiting, "failed"); // it waited for this
      return this.#fail(announce, ...fault, now);
    }
    const staged = this.holds.at("staged");
    if (staged !== null && sameKey(staged, announce) && announce.commit === "auto") {
      return this.#commit(staged, now); // W5
    }
    if (!this.#wants(announce)) return [];
    const held = this.holds.expect(announce);
    const effects = this.#begin(held, now); // W6 to W8
    if (held.phase !== "arriving" || pushed) return effects;
    held.transfer.pull(); // W31
    return [...effects, ...this.#pull(held, now)];
  }

  /** Whether an announcement is of a version to begin, or to begin anew. */
  #wants(announce: Announce): boolean {
    const arriving = this.holds.at("arriving"); // W5, W8, W26
    if (!newer(announce, this.holds.newest) || this.holds.isRejected(announce)) return false;
    if (arriving === null) return true;
    if (!sameKey(arriving, announce)) return newer(announce, arriving) && this.mode === "following";
    if (!sameBytes(announce, arriving.announce)) return true; // one of the two was damaged
    arriving.announce = announce; // it may have been committed meanwhile
    return false;
  }

  /** What runs here is a newer version, byte for byte: nothing is to be fetched or applied. */
  renamed({ epoch, version, was, metadata }: Rename, now: number): Effect[] {
    const [held, key] = [this.holds.at("running"), { epoch, version }]; // W25
    if (held === null || !sameKey(held, was) || held.running.digest !== was.digest) return [];
    if (this.holds.all("ready", "applying").length > 0 || !newer(key, this.holds.newest)) return [];
    if (this.holds.all("arriving").some((begun) => newer(begun, key))) return [];
    for (const older of this.holds.all("announced", "arriving", "staged")) {
      this.holds.move(older, "newer");
    }
    this.holds.rename(held, key, metadata);
    this.epoch = Math.max(this.epoch, epoch);
    this.#failure = null;
    return [this.#sayApplied(held), ...this.#turn("completed", now)];
  }

  /** Start to receive a version, if its layout is known. */
  #begin(held: Held, now: number): Effect[] {
    const { announce, epoch, version } = held;
    const fault = this.#acceptance.fault(announce);
    if (fault !== null) return this.#decline(held, ...fault, now);
    const layout = this.#acceptance.layout(announce);
    if (layout === undefined) {
      this.#askedAt = now; // W7
      return [send({ type: "fetch", model: this.model, epoch, version, layout: true })];
    }
    held.layout = layout;
    held.gain("known");
    return this.#reserve(held, now);
  }

  /** Find memory for a version; if there is no more, `#resume` goes on when some is free. */
  #reserve(held: Held, now: number): Effect[] {
    const { announce } = held;
    const replaced = this.holds.move(this.holds.at("arriving"), "newer"); // W8
    const effects = replaced ? this.#turn("replaced", now) : [];
    try {
      if (!this.holds.takeMemory(held)) return effects;
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      const text = `there is no memory for ${announce.nbytes} bytes: lower bytesMax, or make room`;
      return [...effects, ...this.#decline(held, "no-memory", text, now)];
    }
    held.transfer = this.#patches.transfer(held, now);
    this.holds.move(held, "begun");
    if (!this.torn) this.#failure = null; // that nothing runs is said on (W17)
    if (announce.whole !== null) return effects; // it came along, however others come
    const listening = this.#patches.listen(held.transfer, this.mode === "following");
    if (listening.length > 0) held.transfer.pull(); // D7
    return [...effects, ...listening, ...this.#pull(held, now)];
  }

  /** Take pushed chunks again, and look for what came meanwhile; or no longer. */
  #turn(turn: Turn, now: number): Effect[] {
    const mode = MODES[this.mode][turn]; // W26
    if (mode === undefined) return [];
    this.mode = mode;
    const following = mode === "following";
    const asks = following ? this.#askLatest(this.holds.newest.epoch, now) : [];
    return [this.subscription, ...asks];
  }

  #decline(held: Held, code: string, text: string, now: number): Effect[] {
    this.holds.move(held, TRANSIENT.has(code) ? "failed" : "declined"); // W15
    return this.#fail(held, code, text, now);
  }

  #fail({ epoch, version }: Key, code: string, text: string, now: number): Effect[] {
    const { model } = this;
    if (TRANSIENT.has(code)) this.#putOff({ epoch, version }, now);
    this.#failure = { type: "failed", model, epoch, version, code, text: asText(text) };
    const intact = !this.torn;
    const rejected = { do: "rejected", model, epoch, version, code, text, intact } as const;
    return [this.#sayFailed(this.#failure), rejected];
  }

  /** Leave a version alone for a while, for twice as long as the last time. */
  #putOff(key: Key, now: number): void {
    const { patience, patienceMax } = this.timing; // W36
    this.#pause = sameKey(this.#later, key) ? Math.min(2 * this.#pause, patienceMax) : patience;
    this.#later = key;
    this.#until = now + this.#pause;
  }

  /** A version is not to be had any more: what was before it may be what there is. */
  #putOffNoLonger(key: Key): void {
    if (sameKey(this.#later, key)) this.#until = Number.NEGATIVE_INFINITY;
  }

  // What arrives of it.

  /** Return the version of this key, if it is on its way. */
  arriving(key: Key): Held | null {
    const held = this.holds.at("arriving");
    return sameKey(held, key) ? held : null;
  }

  /** Say where a chunk's payload belongs that is about to be received; null: nowhere. */
  place(chunk: Chunk | SealedChunk, size: number): Lease | null {
    const sealed = chunk.type === "chunk" ? null : chunk;
    const transfer = this.arriving(chunk)?.transfer;
    if (!transfer?.isNamed(chunk.patch)) return null;
    return transfer.lend(chunk.index, size, sealed);
  }

  /** A piece of a version. */
  chunk(chunk: Chunk | SealedChunk, payload: Uint8Array, now: number, pushed: boolean): Effect[] {
    const held = this.arriving(chunk);
    if (held === null) return this.#stray(chunk, now);
    const { transfer } = held;
    if (!transfer.isNamed(chunk.patch)) return []; // D9
    const proof = chunk.type === "chunk" ? chunk.crc : chunk;
    const fresh = transfer.add(chunk.index, proof, payload, now, pushed);
    const effects = this.#pull(held, now);
    const slow = now - transfer.reportedAt >= this.timing.report; // W23
    if (fresh && pushed && (slow || transfer.here % PROGRESS_CHUNKS === 0)) {
      transfer.reportedAt = now;
      effects.push(this.#sayProgress(held));
    }
    return [...effects, ...this.#completed(held, now)];
  }

  /** All chunks of a version are out. */
  end(end: End, now: number): Effect[] {
    const held = this.arriving(end);
    if (held === null) return this.#stray(end, now);
    if (!held.transfer.isNamed(end.patch)) return []; // D9
    held.transfer.end(end.digest);
    return [...this.#pull(held, now), ...this.#completed(held, now)];
  }

  /** A ping that was sent then was answered, and so was whatever was asked before it. */
  answered(sentAt: number): void {
    this.#answered = sentAt;
    this.holds.at("arriving")?.transfer.answered(sentAt); // W12
  }

  #stray(key: Key, now: number): Effect[] {
    return this.holds.at("announced") === null ? this.hearOf(key, now) : []; // W4
  }

  #pull({ epoch, version, transfer }: Held, now: number): Effect[] {
    const { model } = this;
    const patch = transfer.patch ?? undefined;
    const unpatched = transfer.unpatched || undefined; // D10
    return transfer.wants(now).map((range) => {
      return send({ type: "fetch", model, epoch, version, ...range, patch, unpatched });
    });
  }

  /** If the version is whole: verify it, then stage it. */
  #completed(held: Held, now: number): Effect[] {
    const { transfer } = held; // W13
    if (!transfer.complete) return [];
    if (transfer.patch !== null) return this.#patches.decode(held);
    if (transfer.verify()) return this.#arrived(held, transfer.digest ?? "", now);
    if (transfer.restarts < RESTARTS_MAX) return []; // the next tick fetches it anew
    const text = `the whole did not match its digest, ${transfer.restarts} times`;
    return this.#decline(held, "digest-mismatch", text, now);
  }

  /** A patch was decoded, and its version is whole; or, if there is a fault, all of it is fetched. */
  decoded(job: Patching, fault: string, took: number, now: number): Effect[] {
    const held = this.holds.at("arriving");
    if (!job.live || held === null) return []; // something newer took its place, or it was aborted
    if (fault) return this.#fetchWhole(held, fault, now);
    held.transfer.decoded(took);
    this.holds.release(held.transfer);
    return this.#arrived(held, job.digest, now);
  }

  /** The publisher has no patch (any more) that was asked for. */
  withoutPatch(refuse: Refuse, now: number): Effect[] {
    const held = this.arriving(refuse); // D8
    if (held === null || held.transfer.patch === null || held.transfer.comes === "decoded")
      return [];
    return this.#fetchWhole(held, "the publisher has no such patch (any more)", now);
  }

  #fetchWhole(held: Held, why: string, now: number): Effect[] {
    return [...this.#patches.giveUp(held, why, now), ...this.#pull(held, now)];
  }

  /** A version is whole and sound: stage it, and commit it unless that waits for others. */
  #arrived(held: Held, digest: string, now: number): Effect[] {
    const { announce, epoch, version, layout, transfer } = held;
    const together = announce.commit === "together"; // W14
    const sayStaged = together || announce.acknowledge === "staged";
    const { patch, decodeUs } = transfer;
    const { metadata } = announce;
    const said = {
      model: this.model,
      epoch,
      version,
      digest,
      sayStaged,
      patch,
      decodeUs,
      metadata,
    };
    this.holds.move(this.holds.at("staged"), "newer");
    held.staged = { ...said, layout, data: held.buffer as Uint8Array };
    this.holds.move(held, "whole");
    const effects = this.#sayStaged([held]);
    if (!together) effects.push(...this.#commit(held, now));
    return [...effects, ...this.#turn("completed", now)];
  }

  /** A version is ready, in place of an older one that nobody has applied. */
  #commit(held: Held, now: number): Effect[] {
    this.holds.move(this.holds.at("ready"), "newer");
    this.holds.move(held, "committed");
    return [{ do: "ready", model: this.model }, ...this.#resume(now)];
  }

  /** The version that is staged here may be applied. */
  committed(commit: Commit, now: number): Effect[] {
    const held = this.holds.at("staged"); // W14
    if (held === null || !sameKey(held, commit)) return [];
    return held.staged.digest === commit.digest ? this.#commit(held, now) : [];
  }

  /** The version must not be applied; drop what there is of it. */
  aborted(key: Key, now: number): Effect[] {
    for (const held of this.holds.all("announced", "arriving", "staged")) {
      if (sameKey(held, key)) this.holds.move(held, "aborted"); // W14
    }
    this.#putOffNoLonger(key);
    // There may be room now for what waited; who is catching up must find something to do.
    const effects = this.#resume(now);
    const busy = effects.length > 0 || this.holds.at("arriving") !== null;
    return busy || this.mode === "following" ? effects : this.#askLatest(key.epoch, now); // W26
  }

  /** The publisher no longer has a version; 0: it has none. */
  gone({ epoch, version }: Key, now: number): Effect[] {
    this.#putOffNoLonger({ epoch, version });
    for (const held of this.holds.all("announced", "arriving")) {
      const was = held.phase; // W27
      const named = version === held.version || (version === 0 && was === "announced");
      if (!named || (epoch !== 0 && epoch !== held.epoch)) continue;
      if (!this.holds.move(held, "gone") || was === "announced") continue;
      const resumed = this.#resume(now);
      return resumed.length > 0 ? resumed : this.#askLatest(held.epoch, now);
    }
    return [];
  }

  // The session.

  /** Versions will come, probably of this size: have a buffer for them. */
  expect(nbytes: number): Effect[] {
    const { buffers } = this.holds;
    const memory = nbytes <= this.#acceptance.bytesMax ? buffers.reserve(nbytes) : null;
    return memory === null ? [] : [{ do: "touch", memory, unused: () => buffers.unused(memory) }];
  }

  /** The publisher has let this worker in (again), and has this version for it. */
  reconnected(latest: Key, now: number): Effect[] {
    for (const held of this.holds.all("announced", "arriving", "staged")) {
      const other = held.epoch !== latest.epoch; // W28
      if (other || held.phase === "announced") this.holds.move(held, "fenced");
      else if (held.phase === "arriving") held.transfer.reconnected(now);
    }
    this.holds.rejected = [];
    this.#torn = Math.min(this.#torn, 1); // it may be tried as often as at first
    this.#askedAt = Number.NEGATIVE_INFINITY;
    const heldBack = this.holds.all("ready", "applying", "staged");
    return [...this.#sayStaged(heldBack), ...this.hearOf(latest, now)];
  }

  // What the user does with the version that is ready.

  /** Somebody begins to apply it. */
  taken(): StagedVersion | null {
    const held = this.holds.at("ready");
    return held !== null && this.holds.move(held, "taken") ? held.staged : null;
  }

  /** It was applied, and runs here. `kept`: its memory stays with the user. */
  applied(now: number, kept = false): Effect[] {
    const held = this.holds.at("applying"); // W16
    if (held === null) return [];
    const { epoch, version } = held;
    held.kept = kept;
    held.running = { epoch, version, digest: held.staged.digest };
    if (held.announce.keep && this.#patches.taken)
      this.holds.keep(held); // D3
    else this.holds.drop(false);
    this.holds.move(this.holds.at("running"), "newer");
    this.holds.move(held, "applied");
    this.#torn = 0;
    this.epoch = Math.max(this.epoch, epoch);
    if (this.#failure !== null && !newer(this.#failure, held)) this.#failure = null; // W17
    return [this.#sayApplied(held), ...this.#resume(now)];
  }

  /**
   * It could not be applied. If the model is `intact`, what ran before still runs. `kept`: its
   * memory stays with the user.
   */
  failed(text: string, now: number, intact = true, kept = false): Effect[] {
    const held = this.holds.at("applying"); // W24
    if (held === null) return [];
    held.kept = kept;
    if (!intact) {
      this.holds.move(this.holds.at("running"), "torn");
      this.holds.drop(true);
      this.#torn += 1;
      this.epoch = Math.max(this.epoch, held.epoch);
    }
    const again = !intact && this.#torn < APPLIES_MAX;
    this.holds.move(held, again ? "torn" : "declined");
    return [...this.#fail(held, "apply", text, now), ...this.#resume(now)];
  }

  /** A buffer is free: begin what waited for it. */
  #resume(now: number): Effect[] {
    const waiting = this.holds.at("announced");
    if (waiting === null || this.holds.at("arriving") !== null) return [];
    if (!newer(waiting, this.holds.newest)) this.holds.move(waiting, "newer");
    else if (waiting.lacks === "buffer") return this.#reserve(waiting, now);
    return [];
  }

  // Time.

  /** Fetch what is due. */
  tick(now: number): Effect[] {
    const arriving = this.holds.at("arriving");
    if (arriving?.transfer.hopeless) {
      if (arriving.transfer.patch !== null) {
        return this.#fetchWhole(arriving, "nothing more of it comes", now);
      }
      const text = "nothing comes that fits what was announced"; // W12
      return this.#decline(arriving, "digest-mismatch", text, now);
    }
    if (arriving !== null) return [...this.#pull(arriving, now), ...this.#completed(arriving, now)];
    const waiting = this.holds.at("announced");
    if (waiting?.lacks !== "layout") return this.#resume(now);
    const { patience, patienceMax } = this.timing;
    const passed = this.#answered > this.#askedAt; // W7: else it may be on its way
    const due = now - this.#askedAt >= (passed ? patience : patienceMax);
    return due ? this.#begin(waiting, now) : [];
  }

  /** Say again how things stand, in case it got lost. */
  repeat(): Effect[] {
    const { holds } = this; // W17
    const [arriving, applying] = [holds.at("arriving"), holds.at("applying")];
    const ready = applying ?? (arriving === null ? holds.at("ready") : null);
    const running = holds.at("running");
    const effects = this.#sayStaged(holds.all("ready", "applying", "staged"));
    if (arriving !== null && applying === null) effects.push(this.#sayProgress(arriving));
    if (running !== null) effects.push(this.#sayApplied(running));
    if (this.#failure !== null) effects.push(this.#sayFailed(this.#failure));
    if (ready !== null) effects.push(this.#sayProgress(ready));
    return effects;
  }

  #sayProgress({ epoch, version, phase: at, transfer }: Held): Effect {
    const arriving = at === "arriving" ? transfer : null;
    const phase = arriving ? "receiving" : at === "applying" ? at : "staged";
    const [chunks, patch] = [arriving?.here ?? 0, arriving?.patch ?? undefined];
    return send({ type: "progress", model: this.model, epoch, version, chunks, phase, patch });
  }

  #sayStaged(some: readonly Held[]): Effect[] {
    const { model } = this;
    const due = some.map(({ staged }) => staged).filter(({ sayStaged }) => sayStaged);
    return due.map(({ epoch, version, digest, patch }) =>
      send({ type: "staged", model, epoch, version, digest, patch: patch ?? undefined }),
    );
  }

  #sayApplied({ running, staged }: Held): Effect {
    const patch = staged.patch ?? undefined; // D11
    const decode_us = staged.decodeUs || undefined;
    return send({ type: "applied", model: this.model, ...running, patch, decode_us });
  }

  #sayFailed(failure: Failed): Effect {
    return send({ ...failure, intact: !this.torn });
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
