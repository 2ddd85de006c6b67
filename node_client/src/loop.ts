/**
 * The worker's loop. It owns the connections and the clock, passes frames to the machine, and
 * carries out the machine's effects. It runs on the event loop of the code that created it.
 */

import { setImmediate as turned } from "node:timers/promises";
import { type Control, control } from "./control.js";
import type { Effect } from "./effects.js";
import { controlDestination, dataDestination } from "./endpoints.js";
import { Handshakes } from "./handshakes.js";
import { encode } from "./headers.js";
import type { WorkerKeys } from "./keys.js";
import { FAULT_MS } from "./limits.js";
import type { WorkerMachine } from "./machine.js";
import { Names } from "./names.js";
import { type Patching, patching } from "./patching.js";
import { answers } from "./probe.js";
import { Route } from "./route.js";
import { inSlices, touched } from "./slices.js";
import { Subscription } from "./subscription.js";
import { printable } from "./words.js";

const TICK_MS = 100; // between two calls of `machine.tick`

/**
 * The effects that the loop passes to its handlers: all except those for connections, memory and
 * decoding. Besides, changes of address.
 */
export type Reported =
  | Exclude<Effect, { do: "send" | "connect" | "redial" | "subscribe" | "touch" | "decode" }>
  | Moved;

/** The worker has changed over to another address. */
export interface Moved {
  readonly do: "moved";
  readonly from: string;
  readonly to: string;
  readonly why: string;
  /** Whether all addresses have failed since the last session. */
  readonly exhausted: boolean;
}

/** A control address, and the keys for the publisher there; null without keys. */
export interface Site {
  readonly address: string;
  readonly keys: WorkerKeys | null;
}

/** A site, and what is known of the attempts to connect to it. */
interface Place extends Site {
  readonly handshakes: Handshakes;
  readonly names: Names;
}

export interface LoopHandlers {
  readonly reported: (effect: Reported) => void;
  /** Called when the control channel has ended: no more messages will arrive. */
  readonly ended: (reason: unknown) => void;
}

export class WorkerLoop {
  #control: Control | null = null; // null in the pause after a round of addresses
  #visit = 0; // number of times that an address was dialled or left
  readonly #route: Route;
  readonly #places: readonly Place[];
  readonly #subscription: Subscription;
  readonly #timer: NodeJS.Timeout;
  readonly #ending = new AbortController(); // ends probes
  readonly #patches: Patching[] = []; // to be decoded; the first is in progress
  #closed = false;
  #faults = 0; // internal errors that were not reported yet
  #reportedAt = Number.NEGATIVE_INFINITY; // when a fault was last reported

  constructor(
    /** The addresses, at least one, in order of preference. */
    sites: readonly Site[],
    readonly machine: WorkerMachine,
    readonly handlers: LoopHandlers,
    /** Whether the data endpoint may be on another host than the address. */
    readonly anyDataHost = false,
  ) {
    const { helloRetry, lostAfter } = machine.timing;
    this.#places = sites.map((site) => {
      return { ...site, handshakes: new Handshakes(lostAfter), names: new Names(site.address) };
    });
    this.#route = new Route(sites.length, helloRetry, lostAfter);
    this.#control = this.#dial();
    this.#subscription = new Subscription({
      place: (frames, size) => this.#guard(() => machine.place(frames, size), null),
      message: (frames) => this.#guarded(() => machine.receivePublished(frames, now())),
      broken: (reason) => this.#notice(`no pushed data, all is fetched: ${reason}`),
    });
    // The event loop runs timers before input. If user code has blocked it for long, the messages
    // that arrived meanwhile must be read before the publisher is considered lost.
    this.#timer = setInterval(() => setImmediate(() => this.#tick()), TICK_MS);
  }

  /** Carry out effects of the machine. */
  perform(effects: readonly Effect[]): void {
    for (const effect of effects) {
      switch (effect.do) {
        case "send":
          this.#control?.send(encode(effect.message));
          break;
        case "connect":
          this.#connect(effect.endpoint, effect.ticket);
          break;
        case "redial":
          if (this.#branches) this.#changeOver("its publisher is silent");
          else {
            this.#control?.redial();
            this.#subscription.redial();
          }
          break;
        case "refused":
          this.handlers.reported(effect);
          if (this.#branches) this.#changeOver(`it refuses this worker (${effect.code})`);
          break;
        case "joined":
          this.#route.joined(now());
          this.handlers.reported(effect);
          break;
        case "subscribe":
          this.#subscription.subscribe(effect.topic, effect.on);
          break;
        case "touch":
          void inSlices(touched(effect.memory, effect.unused));
          break;
        case "decode":
          if (this.#patches.push(effect.job) === 1) void this.#decode();
          break;
        default:
          this.handlers.reported(effect);
      }
    }
  }

  close(): void {
    if (this.#closed) return;
    this.perform(this.machine.close());
    this.#stop();
  }

  /** The address that the worker is with, or tries. */
  get address(): string {
    return this.#place.address;
  }

  get #place(): Place {
    return this.#places[this.#route.present] as Place;
  }

  /** Whether there is more than one address. */
  get #branches(): boolean {
    return this.#places.length > 1;
  }

  // Addresses.

  /** Connect to the present address. The handlers ignore a channel once the worker has left it. */
  #dial(): Control {
    const { machine } = this;
    const { address, keys, handshakes } = this.#place;
    const visit = ++this.#visit;
    const here = () => visit === this.#visit;
    const guarded = (effects: () => Effect[]) => {
      if (here()) this.#guarded(effects);
    };
    return control(address, keys, machine.bytesMax, handshakes, {
      place: (header, size) =>
        here() ? this.#guard(() => machine.placeControl(header, size), null) : null,
      message: (frames) => guarded(() => machine.receive(frames, now())),
      connected: () => guarded(() => machine.helloIfOutside(now())),
      changed: () => here() && machine.changed(now()),
      shutOut: (why) => guarded(() => machine.shutOut(why, now())),
      broke: (why) => here() && this.#branches && this.#changeOver(why),
      ended: (error) => here() && this.#end(error),
    });
  }

  /** End the session, if there is one, and go on to the next address. */
  #changeOver(why: string): void {
    if (this.#closed) return;
    const from = this.address;
    const wait = this.#route.failed(now());
    this.#move(from, why, wait > 0);
  }

  /** Go from an address to the present one of the route, at once unless it `waits`. */
  #move(from: string, why: string, waits: boolean): void {
    const left = this.#control;
    this.#visit += 1;
    this.#control = null;
    left?.close();
    this.#subscription.close();
    this.machine.moved();
    this.handlers.reported({ do: "moved", from, to: this.address, why, exhausted: waits });
    if (!waits) this.#arrive();
  }

  #arrive(): void {
    try {
      this.#control = this.#dial();
    } catch (error) {
      this.#changeOver((error as Error).message);
    }
  }

  /** Dial after the pause that follows a round, and probe the first address. */
  #lookAround(): void {
    if (this.#closed || !this.#branches) return;
    if (this.#control === null && now() >= this.#route.movedAt) this.#arrive();
    if (this.#route.probes(now())) void this.#probe();
  }

  async #probe(): Promise<void> {
    const destination = controlDestination((this.#places[0] as Site).address);
    const found = await answers(destination, this.#ending.signal);
    const from = this.address;
    if (this.#closed || !this.#route.probed(found, now())) return;
    this.perform(this.machine.close()); // bye
    this.#move(from, "the first one answers again", false);
  }

  /**
   * Decode the queued patches one at a time: several at once would keep the event loop busy for too
   * long.
   */
  async #decode(): Promise<void> {
    while (this.#patches.length > 0) {
      await turned();
      const job = this.#patches[0] as Patching;
      const begun = now();
      const fault = await inSlices(patching(job)).catch((error) => this.#fault(error));
      const took = now() - begun;
      this.#guarded(() => this.machine.decoded(job, fault, took, now()));
      this.#patches.shift();
    }
  }

  #tick(): void {
    if (!this.#closed && !this.machine.inSession && this.#control?.connected) {
      this.#guarded(() => this.machine.helloIfOutside(now()));
    }
    this.#lookAround();
    if (this.#subscription.needsTicket) this.#guarded(() => this.machine.withoutTicket(now()));
    // Tick last: if `tick` closes a connection, messages sent just after it would be lost.
    this.#guarded(() => this.machine.tick(now()));
    const text = this.#closed ? null : this.#place.names.poll(this.machine.inSession, now());
    if (text !== null) this.handlers.reported({ do: "notice", code: "unknown-host", text });
  }

  #connect(endpoint: string, ticket: string): void {
    try {
      const destination = dataDestination(endpoint, this.address, this.anyDataHost);
      this.#subscription.connect(destination, ticket);
    } catch (error) {
      this.#notice((error as Error).message); // the worker can still fetch everything
    }
  }

  #notice(text: string): void {
    this.handlers.reported({ do: "notice", code: "no-data", text });
  }

  /**
   * Carry out the effects that `effects` returns, unless closed. Report an exception as a notice.
   */
  #guarded(effects: () => Effect[]): void {
    if (!this.#closed) this.#guard(() => this.perform(effects()), undefined);
  }

  /** Return the result of `work`, or `otherwise` if it throws: no message may end a worker. */
  #guard<T>(work: () => T, otherwise: T): T {
    try {
      return work();
    } catch (error) {
      this.#fault(error);
      return otherwise;
    }
  }

  /**
   * Report an internal error to the user, at most once every `FAULT_MS` milliseconds. Return its
   * text.
   */
  #fault(error: unknown): string {
    const text = printable(error instanceof Error ? (error.stack ?? error.message) : `${error}`);
    this.#faults += 1;
    if (this.#closed || now() < this.#reportedAt + FAULT_MS) return text;
    this.#reportedAt = now();
    const times = this.#faults > 1 ? ` (and ${this.#faults - 1} times before)` : "";
    this.#faults = 0;
    const words = `this worker failed on one message, and goes on: please report it${times}: ${text}`;
    this.handlers.reported({ do: "notice", code: "failed-inside", text: words });
    return text;
  }

  #end(error: unknown): void {
    if (this.#closed) return;
    this.#stop();
    this.handlers.ended(error);
  }

  #stop(): void {
    this.#closed = true;
    clearInterval(this.#timer);
    for (const job of this.#patches) job.end();
    this.#ending.abort();
    this.#subscription.close();
    this.#control?.close();
  }
}

/** Return a monotonic time in milliseconds. */
export function now(): number {
  return performance.now();
}
