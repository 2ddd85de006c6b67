/** The data connection of a worker. */

import { isDeepStrictEqual } from "node:util";
import { Connection } from "./connection.js";
import type { Destination } from "./endpoints.js";
import { PINGS_MS, SILENCE_MS, UNREAD_BYTES_MAX } from "./limits.js";
import type { Lease } from "./transfer.js";
import { SUB } from "./zmtp.js";

const DIAL_MS = 5_000; // for name lookup and connecting

export interface SubscriptionHandlers {
  readonly place: (frames: readonly Uint8Array[], size: number) => Lease | null;
  readonly message: (frames: readonly Uint8Array[]) => void;
  /** Called when several attempts have failed, with the last reason. More attempts follow. */
  readonly broken: (reason: string) => void;
}

/** A subscription to topics of one publisher. */
export class Subscription {
  readonly #topics = new Set<string>();
  readonly #connection: Connection;
  #destination: Destination | null = null;
  #ticket = ""; // for the next connection
  #ticketed = false; // each connection needs a ticket

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
   * Connect to `destination` instead of any other.
   *
   * If a ticket is given, a current connection to the same destination is kept, since a ticket is
   * valid for only one connection.
   */
  connect(destination: Destination, ticket = ""): void {
    const same = isDeepStrictEqual(destination, this.#destination);
    this.#ticket = ticket;
    this.#ticketed = ticket !== "";
    this.#destination = destination;
    if (!same || !this.#connection.busy || !this.#ticketed) this.redial();
  }

  /** Whether the connection waits for a ticket. */
  get needsTicket(): boolean {
    return this.#ticketed && this.#ticket === "" && !this.#connection.busy;
  }

  /** Reconnect at once. */
  redial(): void {
    this.#connection.dial(this.#destination);
  }

  /** Subscribe to a topic, or unsubscribe if `on` is false. A repeated call has no effect. */
  subscribe(topic: string, on: boolean): void {
    if (on) this.#topics.add(topic);
    else this.#topics.delete(topic);
    this.#connection.stream?.subscribe(topic, on);
  }

  /** Close the connection, until the next `connect`. Subscriptions stay. */
  close(): void {
    this.#destination = null;
    this.#ticketed = false;
    this.#connection.close();
  }
}
