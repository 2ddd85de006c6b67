/**
 * One model of a worker: what comes of it, and what becomes of the versions here (`phases.ts`).
 *
 * The latest version wins: an older one that is on its way makes room for it. But a worker that had
 * to drop one finishes the next, by fetching, before it looks at anything newer.
 */

import type { Effect } from "./effects.js";
import { FetchPlanner } from "./fetch_planner.js";
import type { Keyring } from "./keyring.js";
import { Acceptance, type Accepts, type Fault, type Most } from "./layouts.js";
import { APPLIES_MAX, type Timing } from "./limits.js";
import {
  type Announce,
  asText,
  type Chunk,
  type Commit,
  type End,
  type Failed,
  type Rename,
  type Running,
  type SealedChunk,
} from "./messages.js";
import { Patches } from "./patches.js";
import type { Patching } from "./patching.js";
import type { ModeEvent } from "./phases.js";
import * as reports from "./reports.js";
import { AES_256_GCM } from "./sealing.js";
import { type Key, newer, type StagedVersion, sameKey } from "./staging.js";
import type { Lease } from "./transfer.js";
import { type VersionEntry, VersionStore } from "./version_store.js";

// What may be otherwise next time, since bytes were damaged or memory was short: it is tried again,
// after a while.
const TRANSIENT = new Set(["digest-mismatch", "layout-invalid", "no-memory", "unsupported"]);
const RESTARTS_MAX = 3; // transfers of one version whose digest did not match, before it is given up

export class Follower {
  readonly versions = new VersionStore();
  readonly planner: FetchPlanner;
  readonly patches: Patches;
  readonly #acceptance: Acceptance;
  #epoch = 0; // the greatest of which bytes were written into the model
  #torn = 0; // applies in a row that failed half-way: while there is one, nothing runs
  #failed: Failed | null = null; // the last one, until another version is begun

  constructor(
    readonly model: string,
    accepts: Accepts,
    most: Most,
    timing: Timing,
    keyring: Keyring | null,
    /** Whether patches are taken. */
    patches: boolean,
  ) {
    this.#acceptance = new Acceptance(model, accepts, most, keyring && AES_256_GCM);
    this.planner = new FetchPlanner(model, this.versions, timing);
    this.patches = new Patches(model, this.versions, timing, keyring, patches);
  }

  /** Whether pushed chunks are listened to, and on which topic. */
  get subscription(): Effect {
    const on = this.versions.mode === "following";
    return { do: "subscribe", topic: this.patches.topic, on };
  }

  get epoch(): number {
    return this.#epoch;
  }

  /** Whether an apply failed half-way: the model holds no version. */
  get torn(): boolean {
    return this.#torn > 0;
  }

  get running(): Running | null {
    return this.versions.at("running")?.running ?? null;
  }

  /** What is said of the version that runs. */
  get metadata(): VersionEntry["metadata"] | undefined {
    return this.versions.at("running")?.metadata;
  }

  // What the publisher says.

  /** A version exists; its chunks may follow if the announcement itself was pushed. */
  announced(
    announce: Announce,
    layout: Uint8Array | undefined,
    now: number,
    pushed: boolean,
  ): Effect[] {
    const large = this.#acceptance.excess(announce) !== null; // it is declined, not understood
    const fault = layout === undefined || large ? null : this.#acceptance.learn(announce, layout);
    if (fault !== null) return this.#unreadable(announce, fault, now);
    const staged = this.versions.at("staged");
    if (staged !== null && sameKey(staged, announce) && announce.commit === "auto") {
      return this.#commit(staged, now); // W5
    }
    if (!this.#wants(announce)) return [];
    const entry = this.versions.expect(announce);
    const effects = this.#begin(entry, now); // W6 to W8
    if (entry.phase !== "arriving" || pushed) return effects;
    entry.transfer.pull(); // W31
    return [...effects, ...reports.fetches(entry.transfer, now)];
  }

  /** A layout cannot be understood. */
  #unreadable(announce: Announce, fault: Fault, now: number): Effect[] {
    if (!TRANSIENT.has(fault[0])) {
      const wanted = this.#wants(announce);
      return wanted ? this.#decline(this.versions.expect(announce), ...fault, now) : [];
    }
    this.versions.move(this.versions.find(announce, "announced"), "failed"); // it waited for this
    return this.#fail(announce, ...fault, now);
  }

  /** Whether an announcement is of a version to begin, or to begin anew. */
  #wants(announce: Announce): boolean {
    const arriving = this.versions.at("arriving"); // W5, W8, W26
    if (!newer(announce, this.versions.newest) || this.versions.isRejected(announce)) return false;
    if (arriving === null) return true;
    if (sameKey(arriving, announce)) return !arriving.update_announcement(announce); // one of the two was damaged
    return newer(announce, arriving) && this.versions.mode === "following";
  }

  /** What runs here is a newer version, byte for byte: nothing is to be fetched or applied. */
  renamed({ epoch, version, was, metadata }: Rename, now: number): Effect[] {
    const { versions } = this; // W25
    const [entry, key] = [versions.at("running"), { epoch, version }];
    if (entry === null || !sameKey(entry, was) || entry.running.digest !== was.digest) return [];
    if (versions.all("ready", "applying").length > 0 || !newer(key, versions.newest)) return [];
    if (versions.all("arriving").some((begun) => newer(begun, key))) return [];
    for (const older of versions.all("announced", "arriving", "staged"))
      versions.move(older, "newer");
    versions.rename(entry, key, metadata);
    const said = this.#runs(entry);
    this.#forgetFailure();
    return [said, ...this.#changeMode("completed", now)];
  }

  /** Start to receive a version, if its layout is known. */
  #begin(entry: VersionEntry, now: number): Effect[] {
    const { announce } = entry;
    const fault = this.#acceptance.fault(announce);
    if (fault !== null) return this.#decline(entry, ...fault, now);
    const layout = this.#acceptance.layout(announce);
    if (layout === undefined) return this.planner.layout(entry, now); // W7
    entry.resolve("known", layout);
    return this.#reserve(entry, now);
  }

  /** Find memory for a version; if there is no more, `#resume` goes on when some is free. */
  #reserve(entry: VersionEntry, now: number): Effect[] {
    const { announce } = entry;
    const replaced = this.versions.move(this.versions.at("arriving"), "newer"); // W8
    const effects = replaced ? this.#changeMode("replaced", now) : [];
    try {
      if (!this.versions.takeMemory(entry)) return effects;
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      const text = `there is no memory for ${announce.nbytes} bytes: lower bytesMax, or make room`;
      return [...effects, ...this.#decline(entry, "no-memory", text, now)];
    }
    const transfer = this.patches.transfer(entry, now);
    this.versions.move(entry, "begun", { transfer });
    this.#forgetFailure();
    if (announce.whole !== null) return effects; // it came along, however others come
    const listening = this.patches.listen(transfer);
    if (listening.length > 0) transfer.pull(); // D7
    return [...effects, ...listening, ...reports.fetches(transfer, now)];
  }

  /** Take pushed chunks again, and look for what came meanwhile; or no longer. */
  #changeMode(event: ModeEvent, now: number): Effect[] {
    if (!this.versions.changeMode(event)) return [];
    const following = this.versions.mode === "following";
    const asks = following ? this.planner.latest(this.versions.newest.epoch, now) : [];
    return [this.subscription, ...asks];
  }

  #decline(entry: VersionEntry, code: string, text: string, now: number): Effect[] {
    this.versions.move(entry, TRANSIENT.has(code) ? "failed" : "declined"); // W15
    return this.#fail(entry, code, text, now);
  }

  // What arrives of it.

  /** Say where a chunk's payload belongs that is about to be received; null: nowhere. */
  place(chunk: Chunk | SealedChunk, size: number): Lease | null {
    const sealed = chunk.type === "chunk" ? null : chunk;
    const transfer = this.versions.find(chunk, "arriving")?.transfer;
    if (!transfer?.isNamed(chunk.patch)) return null;
    return transfer.lend(chunk.index, size, sealed);
  }

  /** Whether a chunk of this size is one of what arrives. */
  wantsChunk(chunk: Chunk | SealedChunk, size: number): boolean {
    const transfer = this.versions.find(chunk, "arriving")?.transfer;
    return transfer?.isNamed(chunk.patch) === true && transfer.fits(chunk.index, size);
  }

  /** Whether so many bytes may come with an announcement: its layout, or the whole version. */
  accompanies(announce: Announce, size: number): boolean {
    const { whole, layout_bytes, nbytes } = announce;
    if (this.#acceptance.excess(announce) !== null) return false;
    return size === (whole === null ? layout_bytes : nbytes);
  }

  /** A piece of a version. */
  chunk(chunk: Chunk | SealedChunk, payload: Uint8Array, now: number, pushed: boolean): Effect[] {
    const entry = this.versions.find(chunk, "arriving");
    if (entry === null) return this.#stray(chunk, now);
    const { transfer } = entry;
    if (!transfer.isNamed(chunk.patch)) return []; // D9
    const due = transfer.take(chunk, payload, now, pushed);
    const effects = reports.fetches(transfer, now);
    if (due) effects.push(reports.progress(this.model, entry));
    return [...effects, ...this.#completed(entry, now)];
  }

  /** All chunks of a version are out. */
  end(end: End, now: number): Effect[] {
    const entry = this.versions.find(end, "arriving");
    if (entry === null) return this.#stray(end, now);
    if (!entry.transfer.isNamed(end.patch)) return []; // D9
    entry.transfer.end(end.digest);
    return this.#advance(entry, now);
  }

  #stray(key: Key, now: number): Effect[] {
    return this.versions.at("announced") === null ? this.planner.hearOf(key, now) : []; // W4
  }

  /** Fetch what is due; if the version is whole: verify it, then stage it. */
  #advance(entry: VersionEntry, now: number): Effect[] {
    return [...reports.fetches(entry.transfer, now), ...this.#completed(entry, now)];
  }

  /** If the version is whole: verify it, then stage it. */
  #completed(entry: VersionEntry, now: number): Effect[] {
    const { transfer } = entry; // W13
    if (!transfer.complete) return [];
    if (transfer.patch !== null) return this.patches.decode(entry);
    if (transfer.verify()) return this.#arrived(entry, transfer.digest ?? "", now);
    if (transfer.restarts < RESTARTS_MAX) return []; // the next tick fetches it anew
    const text = `the whole did not match its digest, ${transfer.restarts} times`;
    return this.#decline(entry, "digest-mismatch", text, now);
  }

  /** A patch was decoded, and its version is whole; or, if there is a fault, all of it is fetched. */
  decoded(job: Patching, fault: string, took: number, now: number): Effect[] {
    const entry = this.versions.at("arriving");
    if (!job.live || entry === null) return []; // something newer took its place, or it was aborted
    if (fault) return this.patches.giveUp(entry, fault, now);
    entry.transfer.decoded(took);
    this.versions.release(entry.transfer);
    return this.#arrived(entry, job.digest, now);
  }

  /** A version is whole and sound: stage it, and commit it unless that waits for others. */
  #arrived(entry: VersionEntry, digest: string, now: number): Effect[] {
    const { announce, epoch, version, layout, transfer } = entry;
    const together = announce.commit === "together"; // W14
    const sayStaged = together || announce.acknowledge === "staged";
    const staged = {
      ...{ model: this.model, epoch, version, layout, digest, sayStaged },
      ...{ data: entry.buffer as Uint8Array, metadata: announce.metadata },
      ...{ patch: transfer.patch, decodeUs: transfer.decodeUs },
    };
    this.versions.move(this.versions.at("staged"), "newer");
    this.versions.move(entry, "whole", { staged });
    const effects = reports.staged(this.model, [entry]);
    if (!together) effects.push(...this.#commit(entry, now));
    return [...effects, ...this.#changeMode("completed", now)];
  }

  /** A version is ready, in place of an older one that nobody has applied. */
  #commit(entry: VersionEntry, now: number): Effect[] {
    this.versions.move(this.versions.at("ready"), "newer");
    this.versions.move(entry, "committed");
    return [{ do: "ready", model: this.model }, ...this.#resume(now)];
  }

  /** The version that is staged here may be applied. */
  committed(commit: Commit, now: number): Effect[] {
    const entry = this.versions.at("staged"); // W14
    if (entry === null || !sameKey(entry, commit)) return [];
    return entry.staged.digest === commit.digest ? this.#commit(entry, now) : [];
  }

  /** The version must not be applied; drop what there is of it. */
  aborted(key: Key, now: number): Effect[] {
    for (const entry of this.versions.all("announced", "arriving", "staged")) {
      if (sameKey(entry, key)) this.versions.move(entry, "aborted"); // W14
    }
    this.planner.putOffNoLonger(key);
    // There may be room now for what waited; who is catching up must find something to do.
    const effects = this.#resume(now);
    const busy = effects.length > 0 || this.versions.at("arriving") !== null;
    return busy || this.versions.mode === "following"
      ? effects
      : this.planner.latest(key.epoch, now); // W26
  }

  /** The publisher no longer has a version; 0: it has none. */
  gone({ epoch, version }: Key, now: number): Effect[] {
    this.planner.putOffNoLonger({ epoch, version });
    for (const entry of this.versions.all("announced", "arriving")) {
      const was = entry.phase; // W27
      const named = version === entry.version || (version === 0 && was === "announced");
      if (!named || (epoch !== 0 && epoch !== entry.epoch)) continue;
      if (!this.versions.move(entry, "gone") || was === "announced") continue;
      const resumed = this.#resume(now);
      return resumed.length > 0 ? resumed : this.planner.latest(entry.epoch, now);
    }
    return [];
  }

  // The session.

  /** Versions will come, probably of this size: have a buffer for them. */
  expect(nbytes: number): Effect[] {
    const { buffers } = this.versions;
    const memory = nbytes <= this.#acceptance.most.bytesMax ? buffers.reserve(nbytes) : null;
    return memory === null ? [] : [{ do: "touch", memory, unused: () => buffers.unused(memory) }];
  }

  /** The publisher has let this worker in (again), and has this version for it. */
  reconnected(latest: Key, now: number): Effect[] {
    this.versions.reconnected(latest.epoch, now);
    this.#torn = Math.min(this.#torn, 1); // what failed before counts as one
    this.planner.reconnected();
    const heldBack = this.versions.all("ready", "applying", "staged");
    return [...reports.staged(this.model, heldBack), ...this.planner.hearOf(latest, now)];
  }

  // What the user does with the version that is ready.

  /** Somebody begins to apply it. */
  taken(): StagedVersion | null {
    const entry = this.versions.at("ready");
    return entry !== null && this.versions.move(entry, "taken") ? entry.staged : null;
  }

  /** It was applied, and runs here. `kept`: its memory stays with the user. `note`: of its values. */
  applied(now: number, kept: boolean, note: string): Effect[] {
    const [entry, older] = [this.versions.at("applying"), this.versions.at("running")]; // W16
    if (entry === null) return [];
    const running = { epoch: entry.epoch, version: entry.version, digest: entry.staged.digest };
    if (kept) this.versions.letGo(entry);
    const data = entry.announce.keep && this.patches.taken ? entry.staged.data : null;
    this.versions.setPatchBase(entry, running, data); // D3
    this.versions.move(older, "newer");
    this.versions.move(entry, "applied", { running, note });
    return [this.#runs(entry), ...this.#resume(now)];
  }

  /**
   * It could not be applied. If the model is `intact`, what ran before still runs. `kept`: its
   * memory stays with the user.
   */
  failed(text: string, now: number, intact: boolean, kept: boolean): Effect[] {
    const entry = this.versions.at("applying"); // W24
    if (entry === null) return [];
    if (kept) this.versions.letGo(entry);
    if (!intact) {
      this.versions.move(this.versions.at("running"), "torn");
      this.versions.setPatchBase(null, null, null);
      this.#torn += 1;
      this.#epoch = Math.max(this.#epoch, entry.epoch);
    }
    const again = !intact && this.#torn < APPLIES_MAX;
    this.versions.move(entry, again ? "torn" : "declined");
    return [...this.#fail(entry, "apply", text, now), ...this.#resume(now)];
  }

  /** A version runs by this name; say so. */
  #runs(entry: VersionEntry): Effect {
    this.#torn = 0;
    this.#epoch = Math.max(this.#epoch, entry.epoch);
    if (this.#failed !== null && !newer(this.#failed, entry)) this.#failed = null; // W17
    return reports.applied(this.model, entry);
  }

  /** A version is on its way: forget why another was not. (That nothing runs is said on.) */
  #forgetFailure(): void {
    if (!this.torn) this.#failed = null; // W17
  }

  /** Tell the publisher and the user that a version is not taken; not now, or not ever. */
  #fail({ epoch, version }: Key, code: string, text: string, now: number): Effect[] {
    const { model } = this;
    if (TRANSIENT.has(code)) this.planner.putOff({ epoch, version }, now);
    this.#failed = { type: "failed", model, epoch, version, code, text: asText(text) };
    const intact = !this.torn;
    return [...this.#failure(), { do: "rejected", model, epoch, version, code, text, intact }];
  }

  /** Say what was not taken last, if it still counts. */
  #failure(): Effect[] {
    return this.#failed === null ? [] : [reports.failed(this.#failed, this.torn)];
  }

  /** A buffer is free: begin what waited for it. */
  #resume(now: number): Effect[] {
    const waiting = this.versions.at("announced");
    if (waiting === null || this.versions.at("arriving") !== null) return [];
    if (!newer(waiting, this.versions.newest)) this.versions.move(waiting, "newer");
    else if (waiting.lacks === "buffer") return this.#reserve(waiting, now);
    return [];
  }

  // Time.

  /** Fetch what is due. */
  tick(now: number): Effect[] {
    const arriving = this.versions.at("arriving");
    if (arriving?.transfer.hopeless) {
      if (arriving.transfer.patch !== null) {
        return this.patches.giveUp(arriving, "nothing more of it comes", now);
      }
      const text = "nothing comes that fits what was announced"; // W12
      return this.#decline(arriving, "digest-mismatch", text, now);
    }
    if (arriving !== null) return this.#advance(arriving, now);
    const waiting = this.versions.at("announced");
    if (waiting?.lacks !== "layout") return this.#resume(now);
    return this.planner.due(now) ? this.#begin(waiting, now) : []; // W7
  }

  /** Say again how things stand, in case it got lost. */
  repeat(): Effect[] {
    return reports.standing(this.model, this.versions, this.#failure()); // W17
  }
}
