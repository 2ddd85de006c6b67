/** A readers-writer lock of a model; a waiting writer keeps new readers out. */

import { TimeoutError } from "./errors.js";
import { type Deadline, Waiters } from "./waiters.js";

export class Gate {
  readonly #waiters = new Waiters<void>();
  #readers = 0;
  #wanted = false; // a writer waits for the readers inside
  #shut = false;

  /** Lock for writing. If readers are inside, return false, and let no new readers in meanwhile. */
  shut(): boolean {
    this.#wanted = this.#readers > 0;
    this.#shut = !this.#wanted;
    return this.#shut;
  }

  open(): void {
    this.#shut = false;
    this.admit();
  }

  /**
   * Start to read; waits while a writer is active or waiting.
   *
   * @throws TimeoutError, or the signal's reason.
   */
  async enter(deadline: Deadline, text: string): Promise<void> {
    if (this.#shut || this.#wanted) {
      const late = `${text}: are two reads one in the other?`;
      await this.#waiters.wait(deadline, (waiter) => waiter.reject(new TimeoutError(late)));
    } else this.#readers += 1;
  }

  /** Stop reading. The caller then lets a waiting writer call `shut`, before it calls `admit`. */
  leave(): void {
    this.#readers -= 1;
    if (this.#readers === 0) this.#wanted = false;
  }

  /** Let the waiting readers in, unless a writer is active or waiting. */
  admit(): void {
    if (this.#shut || this.#wanted) return;
    for (const waiter of this.#waiters.all()) {
      this.#readers += 1; // counted at once, not when the reader's promise continues
      waiter.resolve();
    }
  }
}
