/** Limits the rate at which a peer uses a resource, with a token bucket. */

/** The size of a bucket, and the tokens added per second. */
export interface Rate {
  readonly burst: number;
  readonly perSecond: number;
}

/** The token bucket of one peer; a new bucket is full. */
export class TokenBucket {
  #tokens: number; // below zero after a debt

  constructor(
    readonly rate: Rate,
    /** The time of the last update, in milliseconds of any monotonic clock. */
    private updatedAt: number,
  ) {
    this.#tokens = rate.burst;
  }

  /** Take `count` tokens. Return false if the bucket had fewer; the missing tokens become a debt. */
  take(count: number, now: number): boolean {
    const { burst, perSecond } = this.rate;
    const added = ((now - this.updatedAt) / 1000) * perSecond;
    this.#tokens = Math.min(burst, this.#tokens + added) - count;
    this.updatedAt = now;
    return this.#tokens >= 0;
  }
}
