/** Implements the readers-writer lock of a model. A waiting writer precedes new readers. */

import { TimeoutError } from "./errors.js";
import { type Deadline, Waiters } from "./waiters.js";

export class Gate {
  readonly #waiters = new Waiters<void>();
  #readers = 0;
  #writerWaits = false; // a writer waits for the active readers
  #shut = false;

  /** Lock for writing. If there are active readers, return false, and let new readers wait. */
  shut(): boolean {
    this.#writerWaits = this.#readers > 0;
    this.#shut = !this.#writerWaits;
    return this.#shut;
  }

  open(): void {
    this.#shut = false;
    this.admit();
  }

  /**
   * Start to read. Waits while a writer is active or waiting.
   *
   * @throws TimeoutError, or the signal's reason.
   */
  async enter(deadline: Deadline, text: string): Promise<void> {
    if (this.#shut || this.#writerWaits) {
      const late = `${text}: is one call of \`reading\` inside another?`;
      await this.#waiters.wait(deadline, (waiter) => waiter.reject(new TimeoutError(late)));
    } else this.#readers += 1;
  }

  /**
   * Stop reading. The caller must then give a waiting writer the chance to call `shut`, and after
   * that call `admit`.
   */
  leave(): void {
    this.#readers -= 1;
    if (this.#readers === 0) this.#writerWaits = false;
  }

  /** Admit the waiting readers, unless a writer is active or waiting. */
  admit(): void {
    if (this.#shut || this.#writerWaits) return;
    for (const waiter of this.#waiters.all()) {
      this.#readers += 1; // counted at once, not when the reader's promise continues
      waiter.resolve();
    }
  }
}
