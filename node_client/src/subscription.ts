/** The worker's data connection. */

import { isDeepStrictEqual } from "node:util";
import { Connection } from "./connection.js";
import type { Destination } from "./endpoints.js";
import { PINGS_MS, SILENCE_MS, UNREAD_BYTES_MAX } from "./limits.js";
import type { Lease } from "./transfer.js";
import { SUB } from "./zmtp.js";

const DIAL_MS = 5_000; // for the host's address and the connection

export interface SubscriptionHandlers {
  readonly place: (frames: readonly Uint8Array[], size: number) => Lease | null;
  readonly message: (frames: readonly Uint8Array[]) => void;
  /** No connection has been of use for a while, and why; it is dialled again and again. */
  readonly broken: (reason: string) => void;
}

/** Messages of some topics from one publisher. */
export class Subscription {
  readonly #topics = new Set<string>();
  readonly #connection: Connection;
  #destination: Destination | null = null;
  #ticket = ""; // for the next connection
  #ticketed = false; // each connection needs one

  constructor(handlers: SubscriptionHandlers, silence = { any: SILENCE_MS, message: PINGS_MS }) {
    const { place, message, broken: useless } = handlers;
    const bounds = { patience: DIAL_MS, silence, unread: UNREAD_BYTES_MAX };
    this.#connection = new Connection(
      { kind: SUB, ...bounds },
      {
        ...{ place, message, useless },
        may: () => !this.needsTicket,
        begins: (stream) => {
          for (const topic of this.#topics) stream.subscribe(topic, true);
        },
        connected: () => {
          const ticket = this.#ticket;
          this.#ticket = ""; // K7
          return ticket;
        },
      },
    );
  }

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
    if (!same || !this.#connection.busy || !this.#ticketed) this.redial();
  }

  /** Whether there is no connection for want of a ticket. */
  get needsTicket(): boolean {
    return this.#ticketed && this.#ticket === "" && !this.#connection.busy;
  }

  /** Connect anew, and at once. */
  redial(): void {
    this.#connection.dial(this.#destination);
  }

  /** Ask for a topic, or no longer; asking twice is asking once. */
  subscribe(topic: string, on: boolean): void {
    if (on) this.#topics.add(topic);
    else this.#topics.delete(topic);
    this.#connection.stream?.subscribe(topic, on);
  }

  /** Hang up for good. */
  close(): void {
    this.#destination = null;
    this.#connection.close();
  }
}
