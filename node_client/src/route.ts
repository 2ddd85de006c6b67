/**
 * Decides with which of its addresses a worker is, in the order that the user gave (W37 of the
 * protocol). It has neither clock nor sockets; times are in milliseconds.
 */

const PROBE_MIN_MS = 1_000; // between two probes of the first address
const PROBE_MAX_MS = 60_000; // the longest such pause, however often a return fails

export class Route {
  #present = 0;
  #failures = 0; // in a row
  #inside = false; // a session has begun with the present address
  #insideAt = 0; // when that was
  #returned = false; // the worker is with the first address because a probe found it
  #movedAt = 0; // when the worker turned, or will turn, to the present address
  readonly #every: number; // between two probes
  #pause: number; // before the next probe
  #probeAt = Number.POSITIVE_INFINITY;

  constructor(
    /** The number of addresses. */
    readonly count: number,
    /** The pause after a round. */
    readonly retry: number,
    lostAfter: number,
  ) {
    this.#every = this.#pause = Math.max(PROBE_MIN_MS, lostAfter);
  }

  /** The index of the address that the worker is with, or tries. */
  get present(): number {
    return this.#present;
  }

  /** When the present address may be tried. */
  get movedAt(): number {
    return this.#movedAt;
  }

  /** Record that a session has begun. */
  joined(now: number): void {
    if (this.#inside) return;
    this.#inside = true;
    this.#insideAt = now;
    if (this.#present > 0) this.#probeAt = now + this.#pause;
  }

  /**
   * Move on to the next address. Return how long to wait before it is tried: 0, or a pause after
   * each round of failures.
   *
   * A session that ends at once is a failure, too: otherwise a publisher that closes every
   * connection would be dialled without a pause.
   */
  failed(now: number): number {
    if (this.#inside && now - this.#insideAt >= this.retry) this.#failures = 0;
    if (this.#present === 0) this.#judgeReturn(now);
    this.#failures += 1;
    const wait = this.#failures % this.count === 0 ? this.retry : 0;
    this.#turn((this.#present + 1) % this.count, now + wait);
    return wait;
  }

  /**
   * Set the pause before the next probe, as the worker leaves the first address: longer after a
   * return that was in vain, and as at first after a session that lasted.
   */
  #judgeReturn(now: number): void {
    if (this.#inside && now - this.#movedAt >= this.#every) this.#pause = this.#every;
    else if (this.#returned && this.#pause < PROBE_MAX_MS) {
      this.#pause = Math.min(2 * this.#pause, PROBE_MAX_MS);
    }
  }

  #turn(to: number, at: number): void {
    this.#present = to;
    this.#movedAt = at;
    this.#inside = this.#returned = false;
    this.#probeAt = Number.POSITIVE_INFINITY;
  }

  /** Whether to probe the first address now. After true, it is false until `probed` is called. */
  probes(now: number): boolean {
    if (now < this.#probeAt) return false;
    this.#probeAt = Number.POSITIVE_INFINITY;
    return true;
  }

  /** Record the outcome of a probe. Return true after a return to the first address. */
  probed(answers: boolean, now: number): boolean {
    if (this.#present === 0 || !this.#inside) return false;
    if (answers) {
      this.#turn(0, now);
      this.#returned = true;
    } else this.#probeAt = now + this.#pause;
    return answers;
  }
}
