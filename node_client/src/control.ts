/** The control channel: a DEALER of the `zeromq` package, connected to the publisher's ROUTER. */

import { Dealer } from "zeromq";
import { AddressError } from "./errors.js";
import { MESSAGE_BYTES_MAX } from "./limits.js";

const LINGER_MS = 200; // what is on its way at closing (a goodbye, an acknowledgement) gets this
const CONNECT_MS = 3_000; // for one attempt: the kernel's own second comes after 1 s, its third 3 s

export interface ControlHandlers {
  readonly message: (frames: readonly Uint8Array[]) => void;
  /** The publisher is at the other end. */
  readonly connected: () => void;
  /** Anything became of the connection: it was made or broke, an attempt at one began or failed. */
  readonly changed: () => void;
}

/** After an error of ZMTP the last one comes, and then none any more. */
const CHANGES = ["connect:delay", "connect:retry", "connect", "handshake", "disconnect"] as const;

export class Control {
  readonly #socket = new Dealer({
    immediate: true, // say nothing to nobody: it would pile up
    sendTimeout: 0, // a message that cannot go out now is lost, and will be repeated
    linger: LINGER_MS,
    receiveHighWaterMark: 32, // messages held before TCP pushes back
    maxMessageSize: MESSAGE_BYTES_MAX,
    connectTimeout: CONNECT_MS,
    reconnectInterval: 50,
    reconnectMaxInterval: 1_000,
  });

  constructor(
    readonly address: string,
    readonly handlers: ControlHandlers,
  ) {
    try {
      this.#socket.ipv6 = address.includes("[");
      this.#socket.connect(address);
    } catch (error) {
      this.#socket.close();
      throw new AddressError(`cannot connect to ${address}: ${(error as Error).message}`);
    }
    for (const change of CHANGES) this.#socket.events.on(change, () => handlers.changed());
    this.#socket.events.on("handshake", () => handlers.connected());
  }

  /** Whether a publisher is at the other end, as far as ZeroMQ knows. */
  get connected(): boolean {
    return !this.#socket.closed && this.#socket.writable;
  }

  /** Hand over messages until the channel is closed. */
  async run(): Promise<void> {
    for await (const frames of this.#socket) this.handlers.message(frames);
  }

  /** Send to the publisher; lost while nobody is there. */
  send(header: string): void {
    if (!this.#socket.closed) this.#socket.send(header).catch(() => {});
  }

  /** Make the connection anew; what waits to be sent on the old one is lost. */
  redial(): void {
    try {
      this.#socket.disconnect(this.address);
    } catch {} // there is none
    this.#socket.connect(this.address);
  }

  close(): void {
    this.#socket.close();
  }
}
