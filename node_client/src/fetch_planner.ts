/**
 * Decides when to request the latest version of a model. (W4)
 *
 * After a failure, a version is retried after a delay, which doubles with each failure.
 */

import { type Effect, send } from "./effects.js";
import type { Timing } from "./limits.js";
import { type Key, newer, sameKey } from "./staging.js";
import type { VersionStore } from "./version_store.js";

/** Records what was requested for one model, and which version is postponed. */
export class FetchPlanner {
  #latestAt = Number.NEGATIVE_INFINITY; // when an announcement was last requested
  #answered = Number.NEGATIVE_INFINITY; // when the last answered ping was sent
  #backoffKey: Key = { epoch: 0, version: 0 }; // the version that is postponed
  #backoffUntil = Number.NEGATIVE_INFINITY; // when that version may be retried
  #backoffPause = 0; // the delay of that version

  constructor(
    readonly model: string,
    readonly versions: VersionStore,
    readonly timing: Timing,
  ) {}

  /** Prepare for a new session, in which the latest version may be requested at once. */
  reconnected(): void {
    this.#latestAt = Number.NEGATIVE_INFINITY;
  }

  /**
   * Handle the key of a version, from a beacon or another message. If the key is new, request the
   * latest version.
   */
  noteLatest(key: Key, now: number): Effect[] {
    const { versions } = this; // W4, W15, W26
    const arriving = versions.inPhase("arriving");
    if (key.version === 0 || versions.isRejected(key)) return [];
    if (!newer(key, versions.newest)) return [];
    if (arriving !== null && (!newer(key, arriving) || versions.mode === "catching-up")) return [];
    const waiting = versions.inPhase("announced");
    if (waiting?.lacks === "layout" && !newer(key, waiting)) return []; // W7
    if (!newer(key, this.#backoffKey) && now < this.#backoffUntil) return []; // W36
    return this.requestLatest(key.epoch, now);
  }

  /** Request the latest version, at most once every `timing.quiet` milliseconds. */
  requestLatest(epoch: number, now: number): Effect[] {
    if (now - this.#latestAt < this.timing.quiet) return []; // W4
    this.#latestAt = now;
    const layout = this.versions.inPhase("announced")?.lacks === "layout";
    return [send({ type: "fetch", model: this.model, epoch, version: 0, layout })];
  }

  /** Request the layout of an announced version. */
  layout({ epoch, version }: Key, now: number): Effect[] {
    this.#latestAt = now; // W7
    return [send({ type: "fetch", model: this.model, epoch, version, layout: true })];
  }

  /** Record that the publisher has answered the ping sent at `sentAt`, and all earlier requests. */
  answered(sentAt: number): void {
    this.#answered = sentAt;
    this.versions.inPhase("arriving")?.transfer.answered(sentAt); // W12
  }

  /** Whether to request the layout again. The timeout is longer while an answer may be in flight. */
  due(now: number): boolean {
    const { patience, patienceMax } = this.timing;
    const passed = this.#answered > this.#latestAt; // W7
    return now - this.#latestAt >= (passed ? patience : patienceMax);
  }

  /** Postpone the retry of a version. The delay doubles each time, up to a limit. */
  backOff(key: Key, now: number): void {
    const { patience, patienceMax } = this.timing; // W36
    this.#backoffPause = sameKey(this.#backoffKey, key)
      ? Math.min(2 * this.#backoffPause, patienceMax)
      : patience;
    this.#backoffKey = key;
    this.#backoffUntil = now + this.#backoffPause;
  }

  /** End the delay of a version that the publisher no longer has: the latest may be an older one. */
  endBackoff(key: Key): void {
    if (sameKey(this.#backoffKey, key)) this.#backoffUntil = Number.NEGATIVE_INFINITY;
  }
}
