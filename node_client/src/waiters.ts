/** Those who wait for something, oldest first, each for as long as it likes. */

export interface Deadline {
  /** Milliseconds; for ever, if it is left out. */
  readonly timeout?: number | undefined;
  /** Ends the waiting with the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

export interface Waiter<T> {
  readonly resolve: (value: T) => void;
  readonly reject: (reason: unknown) => void;
}

const TIMEOUT_MAX = 2 ** 31 - 1; // milliseconds; `setTimeout` takes more for none

export class Waiters<T> {
  readonly #waiting = new Set<Waiter<T>>();

  get count(): number {
    return this.#waiting.size;
  }

  /** Wait until `next` or `all` finds this waiter; `late` answers it if the time is over first. */
  wait({ timeout, signal }: Deadline, late: (waiter: Waiter<T>) => void): Promise<T> {
    if (timeout !== undefined && !(timeout >= 0)) {
      throw new RangeError(`timeout ${timeout}; milliseconds are not negative`);
    }
    signal?.throwIfAborted();
    return new Promise<T>((resolve, reject) => {
      const abort = () => waiter.reject(signal?.reason);
      const done = () => {
        this.#waiting.delete(waiter);
        clearTimeout(timer);
        signal?.removeEventListener("abort", abort);
      };
      const waiter: Waiter<T> = {
        resolve: (value) => {
          done();
          resolve(value);
        },
        reject: (reason) => {
          done();
          reject(reason);
        },
      };
      const limit = Math.min(timeout ?? Number.POSITIVE_INFINITY, TIMEOUT_MAX);
      const timer = timeout === undefined ? undefined : setTimeout(() => late(waiter), limit);
      signal?.addEventListener("abort", abort);
      this.#waiting.add(waiter);
    });
  }

  /** Return the one that has waited for longest. */
  next(): Waiter<T> | undefined {
    const [first] = this.#waiting;
    return first;
  }

  /** Return all who wait now. */
  all(): Waiter<T>[] {
    return [...this.#waiting];
  }
}
