/** A queue of promises that wait for a result, oldest first, each with its own deadline. */

export interface Deadline {
  /** Milliseconds; no limit if omitted. */
  readonly timeout?: number | undefined;
  /** If the signal is aborted, the wait rejects with the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

export interface Waiter<T> {
  readonly resolve: (value: T) => void;
  readonly reject: (reason: unknown) => void;
}

const TIMEOUT_MAX = 2 ** 31 - 1; // milliseconds; `setTimeout` fires at once for more

export class Waiters<T> {
  readonly #waiting = new Set<Waiter<T>>();

  get count(): number {
    return this.#waiting.size;
  }

  /** Queue a waiter and return its promise. On a timeout, `late` must resolve or reject it. */
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

  /** Return the oldest waiter, which stays in the queue. */
  next(): Waiter<T> | undefined {
    const [first] = this.#waiting;
    return first;
  }

  /** Return all waiters, oldest first. */
  all(): Waiter<T>[] {
    return [...this.#waiting];
  }
}
