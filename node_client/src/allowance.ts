/** How often something may happen: some at once, and so many a second. */

export interface Rate {
  readonly burst: number;
  readonly perSecond: number;
}

export class Allowance {
  #left: number;

  constructor(
    readonly rate: Rate,
    /** Milliseconds of any clock that never goes back. */
    private at: number,
  ) {
    this.#left = rate.burst;
  }

  /** Take so many; return whether they are allowed. */
  take(count: number, now: number): boolean {
    const { burst, perSecond } = this.rate;
    this.#left = Math.min(burst, this.#left + ((now - this.at) / 1000) * perSecond) - count;
    this.at = now;
    return this.#left >= 0;
  }
}
