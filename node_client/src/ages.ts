/**
 * Tracks the ages of publishers whose versions run at the worker or may still be applied.
 *
 * A publisher sends its age, and the worker reports the present age to other publishers. So two
 * publishers can be ordered by their starts, even if their hosts' clocks differ.
 */

import { EPOCHS_KEPT, INTEGER_MAX } from "./limits.js";

export class Ages {
  /** By epoch, the latest possible time of the publisher's start. */
  #since = new Map<number, number>();

  /**
   * Record the age of an epoch's publisher. Forget the epochs before `applied`, the latest epoch of
   * applied versions.
   */
  heard(epoch: number, ageMs: number, applied: number, now: number): void {
    const since = Math.min(now - ageMs, this.#since.get(epoch) ?? now);
    const others = [...this.#since].filter(([known]) => known >= applied && known !== epoch);
    others.sort(([one], [other]) => one - other);
    this.#since = new Map([...others.slice(0, EPOCHS_KEPT - 1), [epoch, since]]);
  }

  /** Return the least age in milliseconds of an epoch's publisher at `now`; 0 if unknown. */
  of(epoch: number, now: number): number {
    return Math.min(INTEGER_MAX, Math.round(now - (this.#since.get(epoch) ?? now)));
  }
}
