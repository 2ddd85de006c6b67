/** Opens the control channel: a DEALER socket that is connected to the publisher's ROUTER. */

import { Connection } from "./connection.js";
import { controlDestination } from "./endpoints.js";
import { type Handshakes, NO_KEYS_HERE } from "./handshakes.js";
import { KeyedControl } from "./keyed_control.js";
import type { WorkerKeys } from "./keys.js";
import { CONNECT_MS, LINGER_MS, UNSENT_BYTES_MAX } from "./limits.js";
import type { Lease } from "./transfer.js";
import { DEALER, MechanismError } from "./zmtp.js";

export interface ControlHandlers {
  /**
   * Returns a lease to receive a payload, given its header and size; null if the payload is not
   * wanted.
   */
  readonly place: (header: Uint8Array, size: number) => Lease | null;
  readonly message: (frames: readonly Uint8Array[]) => void;
  /** Called when the publisher is connected. */
  readonly connected: () => void;
  /** Called when the connection has opened or broken, or an attempt has started or failed. */
  readonly changed: () => void;
  /** Called when a handshake failed because of keys. `why` explains the failure. */
  readonly shutOut: (why: string) => void;
  /**
   * Called, possibly more than once, when the connection has closed or an attempt has failed.
   * Another attempt follows unless the channel is closed.
   */
  readonly broke: (why: string) => void;
  /** Called when the channel has failed for good: no more messages will be received. */
  readonly ended: (error: unknown) => void;
}

export interface Control {
  /** Whether a publisher is connected, as far as this side knows. */
  readonly connected: boolean;
  /** Send a message to the publisher. The message is dropped if not connected. */
  send(header: string): void;
  /** Reconnect. Messages queued on the old connection are lost. */
  redial(): void;
  close(): void;
}

/**
 * Return a control channel that connects to the publisher in the background.
 *
 * With keys the channel uses libzmq: the peer must prove that it is the publisher before it can send
 * messages. Without keys the peer may be any process, so the channel does not use libzmq, which
 * would collect the frames of a message without limit.
 *
 * @param keys - the worker's pair and the publisher's public key; null without keys.
 * @param bytesMax - the largest version to accept, in bytes.
 * @param handshakes - the outcomes of earlier handshakes at this address.
 * @throws AddressError, KeysError - if the address or the keys cannot be used.
 */
export function control(
  address: string,
  keys: WorkerKeys | null,
  bytesMax: number,
  handshakes: Handshakes,
  handlers: ControlHandlers,
): Control {
  return keys === null
    ? new PlainControl(address, handlers)
    : new KeyedControl(address, keys, bytesMax, handshakes, handlers);
}

/** The control channel without keys. */
class PlainControl implements Control {
  readonly #connection: Connection;
  readonly #dial: () => void;

  constructor(address: string, handlers: ControlHandlers) {
    const destination = controlDestination(address);
    const bounds = { connectTimeout: CONNECT_MS, silence: null, queueMax: UNSENT_BYTES_MAX };
    this.#connection = new Connection(
      { kind: DEALER, ...bounds },
      {
        place: ([header], size) => (header ? handlers.place(header, size) : null),
        message: handlers.message,
        started: handlers.changed,
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
          handlers.broke(error.message);
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
    this.#connection.send(Buffer.from(header));
  }

  redial(): void {
    this.#dial();
  }

  close(): void {
    this.#connection.close(LINGER_MS);
  }
}
