/**
 * Tracks the ages of publishers whose versions run at the worker or may still be applied.
 *
 * A publisher announces its age. The worker reports the present age to other publishers: of two
 * publishers the younger one started later, whatever their clocks show.
 */

import { EPOCHS_KEPT, INTEGER_MAX } from "./limits.js";

export class Ages {
  /** By epoch, the latest time at which its publisher can have started. */
  #since = new Map<number, number>();

  /** Record the age of an epoch's publisher; `applied` is the epoch of the running versions. */
  heard(epoch: number, ageMs: number, applied: number, now: number): void {
    const since = Math.min(now - ageMs, this.#since.get(epoch) ?? now);
    const others = [...this.#since].filter(([known]) => known >= applied && known !== epoch);
    others.sort(([one], [other]) => one - other);
    this.#since = new Map([...others.slice(0, EPOCHS_KEPT - 1), [epoch, since]]);
  }

  /** Return for how many milliseconds an epoch's publisher has run at least. */
  of(epoch: number, now: number): number {
    return Math.min(INTEGER_MAX, Math.round(now - (this.#since.get(epoch) ?? now)));
  }
}
