/**
 * How old the publishers are whose weights run at a worker, or may yet be applied there.
 *
 * A publisher tells its age, and a worker tells other publishers how old that one is by now: the
 * younger of two started later, whatever their clocks say.
 */

import { EPOCHS_KEPT, INTEGER_MAX } from "./limits.js";

export class Ages {
  /** By epoch, when its publisher had started, at the latest. */
  #since = new Map<number, number>();

  /** The publisher of an epoch says its age; weights of the epoch `applied` run here. */
  heard(epoch: number, ageMs: number, applied: number, now: number): void {
    const since = Math.min(now - ageMs, this.#since.get(epoch) ?? now);
    const others = [...this.#since].filter(([known]) => known >= applied && known !== epoch);
    others.sort(([one], [other]) => one - other);
    this.#since = new Map([...others.slice(0, EPOCHS_KEPT - 1), [epoch, since]]);
  }

  /** For how many milliseconds, at least, the publisher of an epoch has run. */
  of(epoch: number, now: number): number {
    return Math.min(INTEGER_MAX, Math.round(now - (this.#since.get(epoch) ?? now)));
  }
}
