/**
 * Why ZeroMQ's handshakes fail. A refusal carries no words: what a socket tells of a connection that
 * has failed is enough for a good guess, which is what the user is told. (K5)
 */

// Handshakes in a row without a word. A publisher that stops may cause one, and one to which many
// workers dial at once several: so they must have gone on for a while as well.
const BROKEN = 3;

const NOT_ALLOWED =
  "the publisher does not allow this worker's key: add the file allowed/NAME.json that " +
  "`weightbus keygen` made for it to the publisher's folder of keys";
const ANOTHER_KEY =
  "the other side hangs up in the handshake: most likely the publisher has another key than the " +
  "one that this worker's file names, or speaks without keys; or a proxy answers in its place";
const NO_KEYS_THERE =
  "the publisher speaks without keys, and this worker has some, which it does not give up: start " +
  "the publisher with keys, or the worker without";
export const NO_KEYS_HERE =
  "the publisher asks for keys, and this worker has none: give it `keys`, a file that " +
  "`weightbus keygen` makes";

/** The handshakes of one socket of a worker with keys. */
export class Handshakes {
  #broken = 0; // in a row that have ended without a word
  #since = 0;

  constructor(
    /** Milliseconds for which they must have ended so. */
    readonly patience: number,
  ) {}

  succeeded(): void {
    this.#broken = 0;
  }

  // Each of these says why one has failed, if that is a matter of keys.

  /** The other side has said no. */
  refused(): string {
    return NOT_ALLOWED;
  }

  /** The other side breaks the rules, or has others. */
  mismatched(code: string): string {
    return code === "ERR_ZMTP_MECHANISM_MISMATCH" ? NO_KEYS_THERE : "";
  }

  /** The other side has hung up. */
  cutOff(now: number): string {
    if (this.#broken === 0) this.#since = now;
    this.#broken += 1;
    return this.#broken >= BROKEN && now - this.#since >= this.patience ? ANOTHER_KEY : "";
  }
}
