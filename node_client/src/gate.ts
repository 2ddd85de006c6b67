/** Who reads a model and who writes it: never both, and who wants to write is not starved. */

import { TimeoutError } from "./errors.js";
import { type Deadline, Waiters } from "./waiters.js";

export class Gate {
  readonly #waiters = new Waiters<void>();
  #readers = 0;
  #wanted = false; // shut once the readers have left: nobody else comes in
  #shut = false;

  /** Keep readers out, from now on or once those inside have left; return whether none is inside. */
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
   * Begin to read, as soon as nobody writes or is about to.
   *
   * @throws TimeoutError, or the signal's reason.
   */
  async enter(deadline: Deadline, text: string): Promise<void> {
    if (this.#shut || this.#wanted) {
      const late = `${text}: are two reads one in the other?`;
      await this.#waiters.wait(deadline, (waiter) => waiter.reject(new TimeoutError(late)));
    } else this.#readers += 1;
  }

  /** Stop reading. Whoever wants to write comes first; then `admit` those who wait. */
  leave(): void {
    this.#readers -= 1;
    if (this.#readers === 0) this.#wanted = false;
  }

  /** Let in who waits, unless somebody writes or is about to. */
  admit(): void {
    if (this.#shut || this.#wanted) return;
    for (const waiter of this.#waiters.all()) {
      this.#readers += 1; // before it knows: it is inside from now on
      waiter.resolve();
    }
  }
}
