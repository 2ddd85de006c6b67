/**
 * Tracks the ages of publishers whose versions run at the worker or may be applied.
 *
 * `welcome` has the publisher's age: how long ago it started. The worker's next `hello` has the age
 * that this publisher has by then. So the publisher that receives `hello` learns which of the two
 * started first, even if their hosts' clocks differ.
 */

import { EPOCHS_KEPT, INTEGER_MAX } from "./limits.js";

export class Ages {
  /** By epoch, the latest time at which the publisher can have started. */
  #startedBy = new Map<number, number>();

  /**
   * Record the age of an epoch's publisher. Forget all other epochs before `applied`, the latest
   * epoch of applied versions.
   */
  record(epoch: number, ageMs: number, applied: number, now: number): void {
    const startedBy = Math.min(now - ageMs, this.#startedBy.get(epoch) ?? now);
    const others = [...this.#startedBy].filter(([known]) => known >= applied && known !== epoch);
    others.sort(([one], [other]) => one - other);
    this.#startedBy = new Map([...others.slice(0, EPOCHS_KEPT - 1), [epoch, startedBy]]);
  }

  /** Return the least age in milliseconds of an epoch's publisher at `now`; 0 if unknown. */
  ageOf(epoch: number, now: number): number {
    return Math.min(INTEGER_MAX, Math.round(now - (this.#startedBy.get(epoch) ?? now)));
  }
}
