/**
 * When a worker asks for the latest version of a model, of which it has heard. (W4)
 *
 * A version that has failed, and is to be tried again, is left alone for ever longer pauses.
 */

import { type Effect, send } from "./effects.js";
import type { Timing } from "./limits.js";
import { type Key, newer, sameKey } from "./staging.js";
import type { VersionStore } from "./version_store.js";

/** What was asked for, and when. */
export class FetchPlanner {
  #latestAt = Number.NEGATIVE_INFINITY; // when the latest announcement was asked for
  #answered = Number.NEGATIVE_INFINITY; // when the last ping was sent that was answered
  #later: Key = { epoch: 0, version: 0 }; // what is put off
  #until = Number.NEGATIVE_INFINITY; // when it may be tried again
  #pause = 0; // for which it was put off

  constructor(
    readonly model: string,
    readonly versions: VersionStore,
    readonly timing: Timing,
  ) {}

  /** A session begins. */
  reconnected(): void {
    this.#latestAt = Number.NEGATIVE_INFINITY;
  }

  /** A beacon, a welcome or a stray chunk speaks of a version: ask if it is news. */
  hearOf(key: Key, now: number): Effect[] {
    const { versions } = this; // W4, W15
    const arriving = versions.at("arriving");
    if (key.version === 0 || versions.isRejected(key)) return [];
    if (!newer(key, versions.newest)) return [];
    if (arriving !== null && (!newer(key, arriving) || versions.mode === "catching-up")) return []; // W26
    const waiting = versions.at("announced");
    if (waiting?.lacks === "layout" && !newer(key, waiting)) return []; // W7
    if (!newer(key, this.#later) && now < this.#until) return []; // W36
    return this.latest(key.epoch, now);
  }

  /** Ask for the latest version, but not all the time. */
  latest(epoch: number, now: number): Effect[] {
    if (now - this.#latestAt < this.timing.quiet) return []; // W4
    this.#latestAt = now;
    const layout = this.versions.at("announced")?.lacks === "layout";
    return [send({ type: "fetch", model: this.model, epoch, version: 0, layout })];
  }

  /** Ask for the layout of a version that was announced. */
  layout({ epoch, version }: Key, now: number): Effect[] {
    this.#latestAt = now; // W7
    return [send({ type: "fetch", model: this.model, epoch, version, layout: true })];
  }

  /** A ping that was sent then was answered, and so was whatever was asked before it. */
  answered(sentAt: number): void {
    this.#answered = sentAt;
    this.versions.at("arriving")?.transfer.answered(sentAt); // W12
  }

  /** Whether to ask again for a layout, which may be on its way. */
  due(now: number): boolean {
    const { patience, patienceMax } = this.timing;
    const passed = this.#answered > this.#latestAt; // W7
    return now - this.#latestAt >= (passed ? patience : patienceMax);
  }

  /** Leave a version alone for a while, for twice as long as the last time. */
  putOff(key: Key, now: number): void {
    const { patience, patienceMax } = this.timing; // W36
    this.#pause = sameKey(this.#later, key) ? Math.min(2 * this.#pause, patienceMax) : patience;
    this.#later = key;
    this.#until = now + this.#pause;
  }

  /** A version is not to be had any more: what was before it may be what there is. */
  putOffNoLonger(key: Key): void {
    if (sameKey(this.#later, key)) this.#until = Number.NEGATIVE_INFINITY;
  }
}
