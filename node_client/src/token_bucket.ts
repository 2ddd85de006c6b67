/** Token buckets, which limit the rate at which a peer uses a resource. */

/** The size of a bucket, and the tokens added per second. */
export interface Rate {
  readonly burst: number;
  readonly perSecond: number;
}

/** The token bucket of one peer; a new bucket is full. */
export class TokenBucket {
  #left: number;

  constructor(
    readonly rate: Rate,
    /** The time of the last update, in milliseconds of any monotonic clock. */
    private at: number,
  ) {
    this.#left = rate.burst;
  }

  /** Take `count` tokens. Return false if the bucket had fewer; the missing ones become a debt. */
  take(count: number, now: number): boolean {
    const { burst, perSecond } = this.rate;
    this.#left = Math.min(burst, this.#left + ((now - this.at) / 1000) * perSecond) - count;
    this.at = now;
    return this.#left >= 0;
  }
}
