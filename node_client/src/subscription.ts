/** The worker's data connection. One that breaks or falls silent is dialled again. */

import { connect, type Socket } from "node:net";
import { isDeepStrictEqual } from "node:util";
import type { Destination } from "./endpoints.js";
import type { Lease } from "./transfer.js";
import { Stream } from "./zmtp.js";

const DIAL_MS = 5_000; // for the host's address and the connection; and as long for the handshake
const REDIAL_MS = 50; // between two attempts; doubles,
const REDIAL_MAX_MS = 1_000; // up to this
const CLOSED = "the publisher closed the connection";
const SILENCE_MS = 30_000; // a publisher pings and sends beacons far more often than that

export interface SubscriptionHandlers {
  readonly place: (frames: readonly Uint8Array[], size: number) => Lease | null;
  readonly message: (frames: readonly Uint8Array[]) => void;
  /** No connection has been of use for a while, and why; it is dialled again and again. */
  readonly broken: (reason: string) => void;
}

/** Messages of some topics from one publisher. */
export class Subscription {
  readonly #topics = new Set<string>();
  #destination: Destination | null = null;
  #ticket = ""; // for the next connection
  #ticketed = false; // each connection needs one
  #socket: Socket | null = null;
  #stream: Stream | null = null;
  #timer: NodeJS.Timeout | undefined; // until it is dialled again, or must be open
  #pause = REDIAL_MS;
  #reason = CLOSED;

  constructor(readonly handlers: SubscriptionHandlers) {}

  /**
   * Take messages from there, in place of anywhere else.
   *
   * With a ticket, each connection needs one, which is spent with it: one that there is stays.
   */
  connect(destination: Destination, ticket = ""): void {
    const same = isDeepStrictEqual(destination, this.#destination);
    this.#ticket = ticket;
    this.#ticketed = ticket !== "";
    this.#destination = destination;
    if (!same || this.#socket === null || !this.#ticketed) this.redial();
  }

  /** Whether there is no connection for want of a ticket. */
  get needsTicket(): boolean {
    return this.#ticketed && this.#ticket === "" && this.#socket === null;
  }

  /** Connect anew, and at once. */
  redial(): void {
    this.#hangUp();
    this.#pause = REDIAL_MS;
    if (this.#destination !== null) this.#dial(this.#destination);
  }

  /** Ask for a topic, or no longer; asking twice is asking once. */
  subscribe(topic: string, on: boolean): void {
    if (on) this.#topics.add(topic);
    else this.#topics.delete(topic);
    this.#stream?.subscribe(topic, on);
  }

  /** Hang up for good. */
  close(): void {
    this.#destination = null;
    this.#hangUp();
  }

  #hangUp(): void {
    clearTimeout(this.#timer);
    const socket = this.#socket;
    this.#socket = null;
    socket?.destroy();
    this.#stream?.close();
    this.#stream = null;
  }

  #dial(destination: Destination): void {
    if (this.needsTicket) return; // it is dialled once there is one
    const stream = new Stream({ ...this.handlers, send: (bytes) => socket.write(bytes) });
    const socket: Socket = connect({
      ...destination,
      noDelay: true,
      timeout: DIAL_MS,
      onread: {
        buffer: () => stream.room(),
        callback: (count) => this.#received(socket, stream, count),
      },
    });
    this.#socket = socket;
    this.#stream = stream;
    this.#reason = CLOSED;
    for (const topic of this.#topics) stream.subscribe(topic, true);
    const silent = () => socket.destroy(new Error("it was silent for too long"));
    socket.on("connect", () => {
      socket.setTimeout(SILENCE_MS);
      this.#timer = setTimeout(silent, DIAL_MS); // bytes alone are no sign of life in a handshake
      stream.greet(this.#ticket);
      this.#ticket = ""; // K7
    });
    socket.on("timeout", silent);
    socket.on("error", (error) => {
      this.#reason = error.message; // and `close` follows
    });
    socket.on("close", () => this.#closed(socket));
  }

  #received(socket: Socket, stream: Stream, count: number): boolean {
    if (socket !== this.#socket) return false;
    try {
      stream.received(count);
      if (stream.state === "open") {
        this.#pause = REDIAL_MS;
        clearTimeout(this.#timer);
      }
      return true;
    } catch (error) {
      socket.destroy(error as Error);
      return false;
    }
  }

  #closed(socket: Socket): void {
    const destination = this.#destination;
    if (socket !== this.#socket || destination === null) return;
    this.#hangUp();
    this.#timer = setTimeout(() => this.#dial(destination), this.#pause);
    if (this.#pause >= REDIAL_MAX_MS) return;
    this.#pause = Math.min(2 * this.#pause, REDIAL_MAX_MS);
    if (this.#pause === REDIAL_MAX_MS) this.handlers.broken(this.#reason); // once for each outage
  }
}
