/** What became of the versions of one model that were applied here, or could not be. (W15, W24) */

import type { Asking } from "./asking.js";
import type { Effect } from "./effects.js";
import type { Held, Holdings } from "./holdings.js";
import { APPLIES_MAX } from "./limits.js";
import { asText, type Failed, type Rename } from "./messages.js";
import * as reports from "./reports.js";
import { type Key, newer, sameKey } from "./staging.js";

// What may be otherwise next time, since bytes were damaged or memory was short: it is tried again,
// after a while.
export const TRANSIENT = new Set(["digest-mismatch", "layout-invalid", "no-memory", "unsupported"]);

/** What runs, and what did not. */
export class Applying {
  #epoch = 0; // the greatest of which bytes were written into the model
  #torn = 0; // applies in a row that failed half-way: while there is one, nothing runs
  #failed: Failed | null = null; // the last one, until another version is begun

  constructor(
    readonly model: string,
    readonly holds: Holdings,
    readonly asking: Asking,
    /** Whether patches are taken, which build on what runs. */
    readonly patches: boolean,
  ) {}

  get epoch(): number {
    return this.#epoch;
  }

  /** Whether an apply failed half-way: the model holds no version. */
  get torn(): boolean {
    return this.#torn > 0;
  }

  /** The version that is being applied runs now. `kept`: its memory stays with the user. */
  applied(kept: boolean): Effect[] {
    const [held, older] = [this.holds.at("applying"), this.holds.at("running")]; // W16
    if (held === null) return [];
    const running = { epoch: held.epoch, version: held.version, digest: held.staged.digest };
    if (kept) this.holds.letGo(held);
    const data = held.announce.keep && this.patches ? held.staged.data : null;
    this.holds.rebase(held, running, data); // D3
    this.holds.move(older, "newer");
    this.holds.move(held, "applied", { running });
    return [this.#runs(held)];
  }

  /** It could not be. If the model is `intact`, what ran before still runs; else nothing does. */
  failed(text: string, now: number, intact: boolean, kept: boolean): Effect[] {
    const held = this.holds.at("applying"); // W24
    if (held === null) return [];
    if (kept) this.holds.letGo(held);
    if (!intact) {
      this.holds.move(this.holds.at("running"), "torn");
      this.holds.rebase(null, null, null);
      this.#torn += 1;
      this.#epoch = Math.max(this.#epoch, held.epoch);
    }
    const again = !intact && this.#torn < APPLIES_MAX;
    this.holds.move(held, again ? "torn" : "declined");
    return this.fail(held, "apply", text, now);
  }

  /** A version runs by this name; say so. */
  #runs(held: Held): Effect {
    this.#torn = 0;
    this.#epoch = Math.max(this.#epoch, held.epoch);
    if (this.#failed !== null && !newer(this.#failed, held)) this.#failed = null; // W17
    return reports.applied(this.model, held);
  }

  /** What runs here is a newer version, byte for byte; nothing if that has no effect. */
  renamed({ epoch, version, was, metadata }: Rename): Effect[] {
    const { holds } = this; // W25
    const [held, key] = [holds.at("running"), { epoch, version }];
    if (held === null || !sameKey(held, was) || held.running.digest !== was.digest) return [];
    if (holds.all("ready", "applying").length > 0 || !newer(key, holds.newest)) return [];
    if (holds.all("arriving").some((begun) => newer(begun, key))) return [];
    for (const older of holds.all("announced", "arriving", "staged")) holds.move(older, "newer");
    holds.rename(held, key, metadata);
    const said = this.#runs(held);
    this.begun();
    return [said];
  }

  /** A session begins: what was torn may be tried as often as at first. */
  reconnected(): void {
    this.#torn = Math.min(this.#torn, 1);
  }

  /** A version is on its way: forget why another was not. (That nothing runs is said on.) */
  begun(): void {
    if (!this.torn) this.#failed = null; // W17
  }

  /** Tell the publisher and the user that a version is not taken; not now, or not ever. */
  fail({ epoch, version }: Key, code: string, text: string, now: number): Effect[] {
    const { model } = this;
    if (TRANSIENT.has(code)) this.asking.putOff({ epoch, version }, now);
    this.#failed = { type: "failed", model, epoch, version, code, text: asText(text) };
    const intact = !this.torn;
    return [...this.failure(), { do: "rejected", model, epoch, version, code, text, intact }];
  }

  /** Say what was not taken last, if it still counts. */
  failure(): Effect[] {
    return this.#failed === null ? [] : [reports.failed(this.#failed, this.torn)];
  }
}
