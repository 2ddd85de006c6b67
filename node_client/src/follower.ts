/**
 * Runs the worker's state machine of one model: handles the model's messages and moves the model's
 * versions through their phases (`phases.ts`).
 *
 * A newer version displaces an older one that is arriving, but not twice in a row: the version that
 * displaced another is received completely, even if a still newer one is announced.
 */

import { type FailedCode, TRANSIENT } from "./codes.js";
import type { Effect } from "./effects.js";
import { FetchPlanner } from "./fetch_planner.js";
import { asText } from "./headers.js";
import type { Keyring } from "./keyring.js";
import { Acceptance, type Fault, type Mismatch, type Most } from "./layouts.js";
import { APPLIES_MAX, type Timing } from "./limits.js";
import type {
  Announce,
  Chunk,
  Commit,
  End,
  Failed,
  Rename,
  Running,
  SealedChunk,
} from "./messages.js";
import { Patches } from "./patches.js";
import type { Patching } from "./patching.js";
import type { ModelEvent } from "./phases.js";
import * as reports from "./reports.js";
import { AES_256_GCM } from "./sealing.js";
import { type Key, newer, type StagedVersion, sameKey } from "./staging.js";
import type { Lease } from "./transfer.js";
import { type VersionEntry, VersionStore } from "./version_store.js";

const RESTARTS_MAX = 3; // digest mismatches of one version before it is declined

export class Follower {
  readonly versions = new VersionStore();
  readonly planner: FetchPlanner;
  readonly patches: Patches;
  readonly #acceptance: Acceptance;
  #epoch = 0; // the latest epoch whose versions were written into the model, even in part
  #tornApplies = 0; // number of consecutive applies that failed half-way; above 0, no version runs
  #failed: Failed | null = null; // the last failure, until another version starts to arrive

  constructor(
    readonly model: string,
    mismatch: Mismatch,
    most: Most,
    timing: Timing,
    keyring: Keyring | null,
    /** Whether patches are accepted. */
    patches: boolean,
  ) {
    this.#acceptance = new Acceptance(model, mismatch, most, keyring && AES_256_GCM);
    this.planner = new FetchPlanner(model, this.versions, timing);
    this.patches = new Patches(model, this.versions, timing, keyring, patches);
  }

  /** The effect that subscribes to pushed chunks; while catching up, the one that unsubscribes. */
  get subscription(): Effect {
    const on = this.versions.mode === "following";
    return { do: "subscribe", topic: this.patches.topic, on };
  }

  get epoch(): number {
    return this.#epoch;
  }

  /** Whether an apply failed half-way, so that the model holds no version. */
  get torn(): boolean {
    return this.#tornApplies > 0;
  }

  get running(): Running | null {
    return this.versions.inPhase("running")?.running ?? null;
  }

  /** The metadata of the running version. */
  get metadata(): VersionEntry["metadata"] | undefined {
    return this.versions.inPhase("running")?.metadata;
  }

  // Messages from the publisher.

  /**
   * Handle an announcement. `layout` has the bytes of the layout if the announcement has them. If
   * `pushed` is true, the publisher may push the version's chunks.
   */
  announced(
    announce: Announce,
    layout: Uint8Array | undefined,
    now: number,
    pushed: boolean,
  ): Effect[] {
    const staged = this.versions.inPhase("staged");
    if (staged !== null && sameKey(staged, announce) && announce.commit === "auto") {
      return this.#commit(staged, now); // W5
    }
    if (!this.#wants(announce)) return [];
    const large = this.#acceptance.excess(announce) !== null; // `#begin` declines the version
    const fault = layout === undefined || large ? null : this.#acceptance.learn(announce, layout);
    if (fault !== null) return this.#unreadable(announce, fault, now);
    const entry = this.versions.expect(announce);
    const effects = this.#begin(entry, now); // W6 to W8
    if (entry.phase !== "arriving" || pushed) return effects;
    entry.transfer.pull(); // W31
    return [...effects, ...reports.fetches(entry.transfer, now)];
  }

  /** Decline a version whose layout is invalid or too large, or retry it later if that may help. */
  #unreadable(announce: Announce, fault: Fault, now: number): Effect[] {
    if (!TRANSIENT.has(fault[0])) {
      return this.#decline(this.versions.expect(announce), ...fault, now);
    }
    // The version may wait for this layout.
    this.versions.move(this.versions.find(announce, "announced"), "failed");
    return this.#fail(announce, ...fault, now);
  }

  /** Whether to receive the announced version, or to start again if it was arriving already. */
  #wants(announce: Announce): boolean {
    const arriving = this.versions.inPhase("arriving"); // W5, W8, W26
    if (!newer(announce, this.versions.newest) || this.versions.isRejected(announce)) return false;
    if (arriving !== null && sameKey(arriving, announce)) {
      // If the two announcements differ, one of them was damaged.
      if (arriving.updateAnnouncement(announce)) return false;
    } else if (arriving !== null) {
      if (!newer(announce, arriving) || this.versions.mode !== "following") return false;
    }
    const waiting = this.versions.inPhase("announced");
    return waiting === null || !newer(waiting, announce);
  }

  /** Handle a rename: the running version gets the key of a newer version with the same bytes. */
  renamed({ epoch, version, was, metadata }: Rename, now: number): Effect[] {
    const { versions } = this; // W25
    const [entry, key] = [versions.inPhase("running"), { epoch, version }];
    if (entry === null || !sameKey(entry, was) || entry.running.digest !== was.digest) return [];
    if (versions.inPhases("ready", "applying").length || !newer(key, versions.newest)) return [];
    if (versions.inPhases("arriving").some((arriving) => newer(arriving, key))) return [];
    for (const older of versions.inPhases("announced", "arriving", "staged"))
      versions.move(older, "newer");
    versions.rename(entry, key, metadata);
    const report = this.#reportRunning(entry);
    this.#forgetFailure();
    return [report, ...this.#changeMode("completed", now)];
  }

  /** Start to receive a version, or request its layout if the layout is unknown. */
  #begin(entry: VersionEntry, now: number): Effect[] {
    const { announce } = entry;
    const fault = this.#acceptance.fault(announce);
    if (fault !== null) return this.#decline(entry, ...fault, now);
    const layout = this.#acceptance.layout(announce);
    if (layout === undefined) return this.planner.layout(entry, now); // W7
    entry.resolve("known", layout);
    return this.#reserve(entry, now);
  }

  /**
   * Take a buffer and start the transfer. If no buffer is free, `#resume` starts the transfer
   * later.
   */
  #reserve(entry: VersionEntry, now: number): Effect[] {
    const { announce } = entry;
    const replaced = this.versions.move(this.versions.inPhase("arriving"), "newer"); // W8
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
    if (announce.whole !== null) return effects; // the bytes came with the announcement
    const listenEffects = this.patches.listen(transfer);
    if (listenEffects.length > 0) transfer.pull(); // D7
    return [...effects, ...listenEffects, ...reports.fetches(transfer, now)];
  }

  /**
   * Apply an event to the mode. A change to `following` subscribes to pushed chunks and requests
   * the latest version. A change to `catching-up` unsubscribes.
   */
  #changeMode(event: ModelEvent, now: number): Effect[] {
    if (!this.versions.changeMode(event)) return [];
    const following = this.versions.mode === "following";
    const asks = following ? this.planner.requestLatest(this.versions.newest.epoch, now) : [];
    return [this.subscription, ...asks];
  }

  /** Reject a version, or only drop it if a retry may help. Report the reason. */
  #decline(entry: VersionEntry, code: FailedCode, text: string, now: number): Effect[] {
    this.versions.move(entry, TRANSIENT.has(code) ? "failed" : "declined"); // W15
    return this.#fail(entry, code, text, now);
  }

  // Chunks.

  /** Return a lease to receive the payload of a chunk; null if the chunk is not wanted. */
  place(chunk: Chunk | SealedChunk, size: number): Lease | null {
    const sealed = chunk.type === "chunk" ? null : chunk;
    const transfer = this.versions.find(chunk, "arriving")?.transfer;
    if (!transfer?.isNamed(chunk.patch)) return null;
    return transfer.lend(chunk.index, size, sealed);
  }

  /** Whether this chunk, of `size` bytes, is a missing chunk of the arriving version. */
  wantsChunk(chunk: Chunk | SealedChunk, size: number): boolean {
    const transfer = this.versions.find(chunk, "arriving")?.transfer;
    return transfer?.isNamed(chunk.patch) === true && transfer.fits(chunk.index, size);
  }

  /**
   * Whether the announcement may have a payload of `size` bytes. The payload is the layout or the
   * whole version.
   */
  wantsAnnounced(announce: Announce, size: number): boolean {
    const { whole, layout_bytes, nbytes } = announce;
    if (this.#acceptance.excess(announce) !== null) return false;
    return size === (whole === null ? layout_bytes : nbytes);
  }

  /** Handle a chunk. */
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

  /** Handle an `end`: all chunks of the version were pushed, and this is its digest. */
  end(end: End, now: number): Effect[] {
    const entry = this.versions.find(end, "arriving");
    if (entry === null) return this.#stray(end, now);
    if (!entry.transfer.isNamed(end.patch)) return []; // D9
    entry.transfer.end(end.digest);
    return this.#advance(entry, now);
  }

  /** Handle a chunk or `end` of a version that is not arriving. */
  #stray(key: Key, now: number): Effect[] {
    return this.versions.inPhase("announced") === null ? this.planner.noteLatest(key, now) : []; // W4
  }

  /** Return the fetches that are due. If the version is complete, verify and stage it. */
  #advance(entry: VersionEntry, now: number): Effect[] {
    return [...reports.fetches(entry.transfer, now), ...this.#completed(entry, now)];
  }

  /**
   * If all chunks and the digest have arrived, verify and stage the version; decode it first if it
   * is a patch.
   */
  #completed(entry: VersionEntry, now: number): Effect[] {
    const { transfer } = entry; // W13
    if (!transfer.complete) return [];
    if (transfer.patch !== null) return this.patches.decode(entry);
    if (transfer.verify()) return this.#arrived(entry, transfer.digest ?? "", now);
    if (transfer.restarts < RESTARTS_MAX) return []; // the next tick fetches all chunks
    const text = `the version did not match its digest, ${transfer.restarts} times`;
    return this.#decline(entry, "digest-mismatch", text, now);
  }

  /**
   * Handle the result of decoding a patch: stage the version or, if `fault` is not empty, fetch the
   * whole version.
   */
  decoded(job: Patching, fault: string, took: number, now: number): Effect[] {
    const entry = this.versions.inPhase("arriving");
    if (!job.live || entry === null) return []; // displaced or aborted
    if (fault) return this.patches.giveUp(entry, fault, now);
    entry.transfer.decoded(took);
    this.versions.release(entry.transfer);
    return this.#arrived(entry, job.digest, now);
  }

  /** Stage a complete and verified version. Commit it unless its commit is `together`. */
  #arrived(entry: VersionEntry, digest: string, now: number): Effect[] {
    const { announce, epoch, version, layout, transfer } = entry;
    const together = announce.commit === "together"; // W14
    const reportStaged = together || announce.acknowledge === "staged";
    const staged = {
      ...{ model: this.model, epoch, version, layout, digest, reportStaged },
      ...{ data: entry.buffer as Uint8Array, metadata: announce.metadata },
      ...{ patch: transfer.patch, decodeUs: transfer.decodeUs },
    };
    this.versions.move(this.versions.inPhase("staged"), "newer");
    this.versions.move(entry, "whole", { staged });
    const effects = reports.staged(this.model, [entry]);
    if (!together) effects.push(...this.#commit(entry, now));
    return [...effects, ...this.#changeMode("completed", now)];
  }

  /** Make a staged version ready. If it has companions, leave that to `Companions`. */
  #commit(entry: VersionEntry, now: number): Effect[] {
    if (entry.announce.companions.size > 0) {
      entry.hold();
      return [];
    }
    return [{ do: "ready", models: [this.model] }, ...this.release(now)];
  }

  /** Make the staged version ready, and drop an older ready version. */
  release(now: number): Effect[] {
    this.versions.move(this.versions.inPhase("ready"), "newer");
    this.versions.move(this.versions.inPhase("staged"), "committed");
    return this.#resume(now);
  }

  /** Handle a commit: make the version ready if it is staged. */
  committed(commit: Commit, now: number): Effect[] {
    const entry = this.versions.inPhase("staged"); // W14
    if (entry === null || !sameKey(entry, commit)) return [];
    return entry.staged.digest === commit.digest ? this.#commit(entry, now) : [];
  }

  /** Handle an abort: drop the version. */
  aborted(key: Key, now: number): Effect[] {
    const arrived = this.versions.find(key, "arriving") !== null;
    for (const entry of this.versions.inPhases("announced", "arriving", "staged")) {
      if (sameKey(entry, key)) this.versions.move(entry, "aborted"); // W14
    }
    this.planner.endBackoff(key);
    // The abort may have freed a buffer for a waiting version. If the worker was catching up with
    // the aborted version, and no other version waits, it requests the latest version.
    const effects = this.#resume(now);
    const busy = effects.length > 0 || this.versions.inPhase("arriving") !== null;
    return !arrived || busy || this.versions.mode === "following"
      ? effects
      : this.planner.requestLatest(key.epoch, now); // W26
  }

  /**
   * Handle a refusal: drop a version that the publisher no longer has. Version 0 means that the
   * publisher has no version at all.
   */
  gone({ epoch, version }: Key, now: number): Effect[] {
    this.planner.endBackoff({ epoch, version });
    for (const entry of this.versions.inPhases("announced", "arriving")) {
      const was = entry.phase; // W27
      const named = version === entry.version || (version === 0 && was === "announced");
      if (!named || (epoch !== 0 && epoch !== entry.epoch)) continue;
      if (!this.versions.move(entry, "gone") || was === "announced") continue;
      const resumed = this.#resume(now);
      return resumed.length > 0 ? resumed : this.planner.requestLatest(entry.epoch, now);
    }
    return [];
  }

  // The session.

  /** Reserve a buffer of the expected size, and prefault it. */
  expect(nbytes: number): Effect[] {
    const { buffers } = this.versions;
    const memory = nbytes <= this.#acceptance.most.bytesMax ? buffers.preallocate(nbytes) : null;
    return memory === null ? [] : [{ do: "touch", memory, unused: () => buffers.unused(memory) }];
  }

  /** Handle the start of a session. `latest` is the publisher's latest version. */
  reconnected(latest: Key, now: number): Effect[] {
    this.versions.reconnected(latest.epoch, now);
    this.#tornApplies = Math.min(this.#tornApplies, 1); // earlier sessions count as one torn apply
    this.planner.reconnected();
    const heldBack = this.versions.inPhases("ready", "applying", "staged");
    return [...reports.staged(this.model, heldBack), ...this.planner.noteLatest(latest, now)];
  }

  // Applying the ready version.

  /** Start to apply the ready version and return it; null if there is none. */
  takeReady(): StagedVersion | null {
    const entry = this.versions.inPhase("ready");
    return entry !== null && this.versions.move(entry, "taken") ? entry.staged : null;
  }

  /**
   * Handle the success of an apply: the version is the running version from now on. `kept` is true
   * if the user keeps the version's memory, which then must not be used for other versions. `note`
   * is a text for the publisher on values that became infinite; empty if there are none.
   */
  applied(now: number, kept: boolean, note: string): Effect[] {
    const [entry, older] = [this.versions.inPhase("applying"), this.versions.inPhase("running")]; // W16
    if (entry === null) return [];
    const running = { epoch: entry.epoch, version: entry.version, digest: entry.staged.digest };
    if (kept) this.versions.detachBuffer(entry);
    const data = entry.announce.keep && this.patches.accepted ? entry.staged.data : null;
    this.versions.setPatchBase(entry, running, data); // D3
    this.versions.move(older, "newer");
    this.versions.move(entry, "applied", { running, note });
    return [this.#reportRunning(entry), ...this.#resume(now)];
  }

  /**
   * Handle the failure of an apply. `intact` is true if the previous version still runs. `kept` is
   * true if the user keeps the version's memory, which then must not be used for other versions.
   */
  failed(text: string, now: number, intact: boolean, kept: boolean): Effect[] {
    const entry = this.versions.inPhase("applying"); // W24
    if (entry === null) return [];
    if (kept) this.versions.detachBuffer(entry);
    if (!intact) {
      this.versions.move(this.versions.inPhase("running"), "torn");
      this.versions.setPatchBase(null, null, null);
      this.#tornApplies += 1;
      this.#epoch = Math.max(this.#epoch, entry.epoch);
    }
    const again = !intact && this.#tornApplies < APPLIES_MAX;
    this.versions.move(entry, again ? "torn" : "declined");
    return [...this.#fail(entry, "apply", text, now), ...this.#resume(now)];
  }

  /**
   * Handle a version that was not applied because a companion failed; see `failed`. If `again` is
   * true, the version is received again, together with its companion. The user gets no report.
   */
  failedBeside(
    text: string,
    now: number,
    intact: boolean,
    again: boolean,
    kept: boolean,
  ): Effect[] {
    const entry = this.versions.inPhase("applying");
    if (entry === null) return [];
    let effects: Effect[];
    if (again) {
      if (kept) this.versions.detachBuffer(entry);
      this.versions.move(entry, "failed");
      effects = [...this.#fail(entry, "no-memory", text, now), ...this.#resume(now)];
    } else effects = this.failed(text, now, intact, kept);
    return effects.filter((effect) => effect.do !== "rejected");
  }

  /** Record that a version runs, and return the report. */
  #reportRunning(entry: VersionEntry): Effect {
    this.#tornApplies = 0;
    this.#epoch = Math.max(this.#epoch, entry.epoch);
    if (this.#failed !== null && !newer(this.#failed, entry)) this.#failed = null; // W17
    return reports.applied(this.model, entry);
  }

  /**
   * Clear the last failure when another version starts. Keep the failure if an apply failed
   * half-way.
   */
  #forgetFailure(): void {
    if (!this.torn) this.#failed = null; // W17
  }

  /**
   * Return the effects that report a failed version to the publisher and to the user. If a retry
   * may help, delay the retry.
   */
  #fail({ epoch, version }: Key, code: FailedCode, text: string, now: number): Effect[] {
    const { model } = this;
    if (TRANSIENT.has(code)) this.planner.backOff({ epoch, version }, now);
    this.#failed = { type: "failed", model, epoch, version, code, text: asText(text) };
    const intact = !this.torn;
    return [...this.#failure(), { do: "rejected", model, epoch, version, code, text, intact }];
  }

  /** Return the report of the last failure, or nothing if the failure was cleared. */
  #failure(): Effect[] {
    return this.#failed === null ? [] : [reports.failed(this.#failed, this.torn)];
  }

  /** Start the announced version that waits for a buffer, unless a version is arriving. */
  #resume(now: number): Effect[] {
    const waiting = this.versions.inPhase("announced");
    if (waiting === null || this.versions.inPhase("arriving") !== null) return [];
    if (!newer(waiting, this.versions.newest)) this.versions.move(waiting, "newer");
    else if (waiting.lacks === "buffer") return this.#reserve(waiting, now);
    return [];
  }

  // Time.

  /** Return the requests that are due. Decline a version that makes no progress. */
  tick(now: number): Effect[] {
    const arriving = this.versions.inPhase("arriving");
    if (arriving?.transfer.hopeless) {
      if (arriving.transfer.patch !== null) {
        return this.patches.giveUp(arriving, "no more of its chunks arrive", now);
      }
      const text = "no chunks arrive that fit the announcement"; // W12
      return this.#decline(arriving, "digest-mismatch", text, now);
    }
    if (arriving !== null) return this.#advance(arriving, now);
    const waiting = this.versions.inPhase("announced");
    if (waiting?.lacks !== "layout") return this.#resume(now);
    return this.planner.due(now) ? this.#begin(waiting, now) : []; // W7
  }

  /** Return all current reports again, since earlier ones may have been lost. */
  repeat(): Effect[] {
    return reports.standing(this.model, this.versions, this.#failure()); // W17
  }
}
