/**
 * Decides which of its addresses a worker connects to, in the order that the user gave (W37 of the
 * protocol). This module has neither clock nor sockets; times are in milliseconds.
 */

const PROBE_MIN_MS = 1_000; // between two probes of the first address
const PROBE_MAX_MS = 60_000; // the longest pause between two probes

export class Route {
  #present = 0;
  #failures = 0; // consecutive ones
  #inside = false; // a session has begun at the present address
  #insideAt = 0; // when that session began
  #returned = false; // the worker is at the first address since a probe found a publisher there
  #movedAt = 0; // when the worker changed over, or will change over, to the present address
  readonly #pauseMin: number; // the shortest pause before a probe
  #pause: number; // before the next probe
  #probeAt = Number.POSITIVE_INFINITY;

  constructor(
    /** The number of addresses. */
    readonly count: number,
    /** The pause after all addresses have failed. */
    readonly retry: number,
    lostAfter: number,
  ) {
    this.#pauseMin = this.#pause = Math.max(PROBE_MIN_MS, lostAfter);
  }

  /** The index of the address to which the worker is connected, or tries to connect. */
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
   * Move on to the next address. Return how long to wait before it is dialled: a pause after each
   * round in which all addresses have failed, otherwise 0.
   *
   * A session that ends at once counts as a failure, too: otherwise a publisher that closes every
   * connection would be dialled without a pause.
   */
  failed(now: number): number {
    if (this.#inside && now - this.#insideAt >= this.retry) this.#failures = 0;
    if (this.#present === 0) this.#adaptPause(now);
    this.#failures += 1;
    const wait = this.#failures % this.count === 0 ? this.retry : 0;
    this.#turn((this.#present + 1) % this.count, now + wait);
    return wait;
  }

  /**
   * Set the pause before the next probe when the worker leaves the first address: the shortest pause
   * after a session that lasted, but twice the last pause if a return to this address has failed.
   */
  #adaptPause(now: number): void {
    if (this.#inside && now - this.#movedAt >= this.#pauseMin) this.#pause = this.#pauseMin;
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

  /** Return whether to probe the first address now. If true, `probed` must be called next. */
  startProbe(now: number): boolean {
    if (now < this.#probeAt) return false;
    this.#probeAt = Number.POSITIVE_INFINITY;
    return true;
  }

  /** Record the outcome of a probe. Return whether the first address is now the present one. */
  probed(answers: boolean, now: number): boolean {
    if (this.#present === 0 || !this.#inside) return false;
    if (answers) {
      this.#turn(0, now);
      this.#returned = true;
    } else this.#probeAt = now + this.#pause;
    return answers;
  }
}
