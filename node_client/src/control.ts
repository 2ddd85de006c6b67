/** The control channel: a DEALER, connected to the publisher's ROUTER. */

import { Connection } from "./connection.js";
import { controlDestination } from "./endpoints.js";
import { NO_KEYS_HERE } from "./handshakes.js";
import { KeyedControl } from "./keyed_control.js";
import type { WorkerKeys } from "./keys.js";
import { CONNECT_MS, LINGER_MS, UNSENT_BYTES_MAX } from "./limits.js";
import type { Lease } from "./transfer.js";
import { DEALER, MechanismError } from "./zmtp.js";

export interface ControlHandlers {
  /** Given a header, and the size of its payload: where that goes; null: nowhere. */
  readonly place: (header: Uint8Array, size: number) => Lease | null;
  readonly message: (frames: readonly Uint8Array[]) => void;
  /** The publisher is at the other end. */
  readonly connected: () => void;
  /** Anything became of the connection: it was made or broke, an attempt at one began or failed. */
  readonly changed: () => void;
  /** The publisher does not let us in, or we not it, for want of the right key. */
  readonly shutOut: (why: string) => void;
  /** Nothing will come any more. */
  readonly ended: (error: unknown) => void;
}

export interface Control {
  /** Whether a publisher is at the other end, as far as is known. */
  readonly connected: boolean;
  /** Send to the publisher; lost while nobody is there. */
  send(header: string): void;
  /** Make the connection anew; what waits to be sent on the old one is lost. */
  redial(): void;
  close(): void;
}

/**
 * Begin to reach for the publisher.
 *
 * With keys the other side proves that it is the publisher before it is listened to, which libzmq
 * does. Without keys it may be anybody, and libzmq collects frames of one message without end.
 *
 * @param keys - our own, and the publisher's public one; null: there are none.
 * @param bytesMax - the largest version to take.
 * @param patience - milliseconds for which handshakes may fail without a word.
 * @throws AddressError, KeysError - if it cannot begin.
 */
export function control(
  address: string,
  keys: WorkerKeys | null,
  bytesMax: number,
  patience: number,
  handlers: ControlHandlers,
): Control {
  return keys === null
    ? new PlainControl(address, handlers)
    : new KeyedControl(address, keys, bytesMax, patience, handlers);
}

/** The control channel without keys. */
class PlainControl implements Control {
  readonly #connection: Connection;
  readonly #dial: () => void;

  constructor(address: string, handlers: ControlHandlers) {
    const destination = controlDestination(address);
    const bounds = { patience: CONNECT_MS, silence: null, unread: UNSENT_BYTES_MAX };
    this.#connection = new Connection(
      { kind: DEALER, ...bounds },
      {
        place: ([header], size) => (header ? handlers.place(header, size) : null),
        message: handlers.message,
        begins: handlers.changed,
        connected: () => {
          handlers.changed();
          return "";
        },
        opened: () => {
          handlers.changed();
          handlers.connected();
        },
        broke: (error) => {
          handlers.changed();
          const keyed = error instanceof MechanismError && error.mechanism === "CURVE";
          if (keyed) handlers.shutOut(NO_KEYS_HERE);
        },
      },
    );
    this.#dial = () => this.#connection.dial(destination);
    this.#dial();
  }

  get connected(): boolean {
    return this.#connection.open;
  }

  send(header: string): void {
    this.#connection.say(Buffer.from(header));
  }

  redial(): void {
    this.#dial();
  }

  close(): void {
    this.#connection.close(LINGER_MS);
  }
}
