/** Implements a queue of promises that wait for a result, oldest first, each with a deadline. */

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

const TIMEOUT_MAX = 2 ** 31 - 1; // milliseconds; with a longer delay `setTimeout` fires at once

export class Waiters<T> {
  readonly #waiting = new Set<Waiter<T>>();

  get count(): number {
    return this.#waiting.size;
  }

  /** Queue a waiter and return its promise. `timedOut` must resolve or reject the waiter. */
  wait({ timeout, signal }: Deadline, timedOut: (waiter: Waiter<T>) => void): Promise<T> {
    if (timeout !== undefined && !(timeout >= 0)) {
      throw new RangeError(`timeout ${timeout}: milliseconds must not be negative`);
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
      const timer = timeout === undefined ? undefined : setTimeout(() => timedOut(waiter), limit);
      signal?.addEventListener("abort", abort);
      this.#waiting.add(waiter);
    });
  }

  /** Return the oldest waiter, which stays in the queue; undefined if the queue is empty. */
  next(): Waiter<T> | undefined {
    const [first] = this.#waiting;
    return first;
  }

  /** Return all waiters, oldest first. */
  all(): Waiter<T>[] {
    return [...this.#waiting];
  }
}
