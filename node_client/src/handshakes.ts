/**
 * Infers the reason of failed handshakes from the socket's events, since ZMTP sends no reason. (K5)
 */

// How many consecutive handshakes the peer must abort before keys are reported as the cause. A
// publisher that stops may abort one, and an overloaded publisher several, so the aborts must also
// have lasted for `patience`.
const ABORTS_MIN = 3;

const NOT_ALLOWED =
  "the publisher does not allow this worker's key: add the file allowed/NAME.json that " +
  "`weightbus keygen` made for it to the publisher's folder of keys";
const ANOTHER_KEY =
  "the other side closes the connection in the handshake: most likely the publisher has another key than the " +
  "one that this worker's file names, or speaks without keys; or a proxy answers in its place";
const NO_KEYS_THERE =
  "the publisher speaks without keys, and this worker has some, which it does not give up: start " +
  "the publisher with keys, or the worker without";
export const NO_KEYS_HERE =
  "the publisher asks for keys, and this worker has none: give it `keys`, a file that " +
  "`weightbus keygen` makes";

/** The outcomes of the handshakes of one socket of a worker with keys. */
export class Handshakes {
  #aborts = 0; // consecutive handshakes that the peer aborted
  #since = 0; // when the first of these was aborted

  constructor(
    /** Milliseconds for which the aborts must have gone on before they are reported. */
    readonly patience: number,
  ) {}

  succeeded(): void {
    this.#aborts = 0;
  }

  // Each of these returns why a handshake failed, or an empty string if keys are not the cause.

  /** Handle a handshake in which the peer refused the key. */
  refused(): string {
    return NOT_ALLOWED;
  }

  /** Handle a handshake in which the peer broke ZMTP, or uses another security mechanism. */
  mismatched(code: string): string {
    return code === "ERR_ZMTP_MECHANISM_MISMATCH" ? NO_KEYS_THERE : "";
  }

  /** Handle a handshake in which the peer closed the connection. */
  cutOff(now: number): string {
    if (this.#aborts === 0) this.#since = now;
    this.#aborts += 1;
    return this.#aborts >= ABORTS_MIN && now - this.#since >= this.patience ? ANOTHER_KEY : "";
  }
}
