/** Token buckets: how many units a peer may use at once, and how many a second after that. */

/** The size of a bucket, and the units that flow into it each second. */
export interface Rate {
  readonly burst: number;
  readonly perSecond: number;
}

/** The units that one peer may use now; a new bucket is full. */
export class TokenBucket {
  #left: number;

  constructor(
    readonly rate: Rate,
    /** Milliseconds of any clock that never goes back. */
    private at: number,
  ) {
    this.#left = rate.burst;
  }

  /** Take `count` units; return whether the bucket had as many. */
  take(count: number, now: number): boolean {
    const { burst, perSecond } = this.rate;
    this.#left = Math.min(burst, this.#left + ((now - this.at) / 1000) * perSecond) - count;
    this.at = now;
    return this.#left >= 0;
  }
}
