/** Receives published messages over the data connection, which may need a ticket to be opened. */

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
  /** Called after several failed attempts, with the reason of the last. More attempts follow. */
  readonly broken: (reason: string) => void;
}

/** A subscription to topics of one publisher. */
export class Subscription {
  readonly #topics = new Set<string>();
  readonly #connection: Connection;
  #destination: Destination | null = null;
  #ticket = ""; // for the next connection
  #ticketed = false; // whether each connection needs a ticket

  constructor(handlers: SubscriptionHandlers, silence = { any: SILENCE_MS, message: PINGS_MS }) {
    const { place, message, broken: failing } = handlers;
    const bounds = { connectTimeout: DIAL_MS, silence, queueMax: UNREAD_BYTES_MAX };
    this.#connection = new Connection(
      { kind: SUB, ...bounds },
      {
        ...{ place, message, failing },
        mayDial: () => !this.needsTicket,
        started: (stream) => {
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
   * Connect to `destination` instead of the current destination.
   *
   * If a ticket is given, a connection or attempt to the same destination is kept, and the ticket is
   * kept for the next connection: a ticket is valid for only one.
   */
  connect(destination: Destination, ticket = ""): void {
    const same = isDeepStrictEqual(destination, this.#destination);
    this.#ticket = ticket;
    this.#ticketed = ticket !== "";
    this.#destination = destination;
    if (!same || !this.#connection.busy || !this.#ticketed) this.redial();
  }

  /** Whether a ticket is needed to connect, and there is none. */
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
