/**
 * Runs a worker on the event loop: owns the connections and the clock, passes received frames to
 * the machine (`machine.ts`), and carries out the effects that the machine returns.
 */

import { setImmediate as nextTurn } from "node:timers/promises";
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
import { inSlices, prefault } from "./slices.js";
import { Subscription } from "./subscription.js";
import { printable } from "./words.js";

const TICK_MS = 100; // between two calls of `machine.tick`

/**
 * What the loop passes to its handlers: the machine's effects, except those for connections, memory
 * and decoding, and changes of address.
 */
export type Reported =
  | Exclude<Effect, { do: "send" | "connect" | "redial" | "subscribe" | "touch" | "decode" }>
  | Moved;

/** The worker has left an address for another one. */
export interface Moved {
  readonly do: "moved";
  readonly from: string;
  readonly to: string;
  readonly why: string;
  /** Whether all addresses have failed since the last session. */
  readonly exhausted: boolean;
}

/** A control address, and the keys for the publisher at this address; null without keys. */
export interface Site {
  readonly address: string;
  readonly keys: WorkerKeys | null;
}

/** A site, with the outcomes of earlier attempts to connect to it. */
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
  #control: Control | null = null; // null in the pause after all addresses have failed
  #visit = 0; // how often an address was dialled or left; handlers of an old visit do nothing
  readonly #route: Route;
  readonly #places: readonly Place[];
  readonly #subscription: Subscription;
  readonly #timer: NodeJS.Timeout;
  readonly #ending = new AbortController(); // ends probes
  readonly #patches: Patching[] = []; // to be decoded; the first is being decoded
  #closed = false;
  #faults = 0; // internal errors since the last report
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
    // The event loop runs timers before input. If user code has blocked the event loop for long, the
    // messages that arrived meanwhile must be read before the publisher may be considered lost.
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
          if (this.#hasAlternatives) this.#changeOver("its publisher is silent");
          else {
            this.#control?.redial();
            this.#subscription.redial();
          }
          break;
        case "refused":
          this.handlers.reported(effect);
          if (this.#hasAlternatives) this.#changeOver(`it refuses this worker (${effect.code})`);
          break;
        case "joined":
          this.#route.joined(now());
          this.handlers.reported(effect);
          break;
        case "subscribe":
          this.#subscription.subscribe(effect.topic, effect.on);
          break;
        case "touch":
          void inSlices(prefault(effect.memory, effect.unused));
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

  /** The address to which the worker is connected, or tries to connect. */
  get address(): string {
    return this.#place.address;
  }

  get #place(): Place {
    return this.#places[this.#route.present] as Place;
  }

  get #hasAlternatives(): boolean {
    return this.#places.length > 1;
  }

  // Addresses.

  /** Connect to the present address. Once the worker leaves it, the channel's handlers do nothing. */
  #dial(): Control {
    const { machine } = this;
    const { address, keys, handshakes } = this.#place;
    const visit = ++this.#visit;
    const isCurrent = () => visit === this.#visit;
    const guarded = (effects: () => Effect[]) => {
      if (isCurrent()) this.#guarded(effects);
    };
    return control(address, keys, machine.bytesMax, handshakes, {
      place: (header, size) =>
        isCurrent() ? this.#guard(() => machine.placeControl(header, size), null) : null,
      message: (frames) => guarded(() => machine.receive(frames, now())),
      connected: () => guarded(() => machine.helloIfOutside(now())),
      changed: () => isCurrent() && machine.changed(now()),
      shutOut: (why) => guarded(() => machine.shutOut(why, now())),
      broke: (why) => isCurrent() && this.#hasAlternatives && this.#changeOver(why),
      ended: (error) => isCurrent() && this.#end(error),
    });
  }

  /** End the session, if there is one, and change over to the next address. */
  #changeOver(why: string): void {
    if (this.#closed) return;
    const from = this.address;
    const wait = this.#route.failed(now());
    this.#move(from, why, wait > 0);
  }

  /** Leave the address `from` for the route's present address; if `waits`, dial it only later. */
  #move(from: string, why: string, waits: boolean): void {
    const old = this.#control;
    this.#visit += 1;
    this.#control = null;
    old?.close();
    this.#subscription.close();
    this.machine.moved();
    this.handlers.reported({ do: "moved", from, to: this.address, why, exhausted: waits });
    if (!waits) this.#tryAddress();
  }

  /** Dial the present address. If that throws, change over to the next address. */
  #tryAddress(): void {
    try {
      this.#control = this.#dial();
    } catch (error) {
      this.#changeOver((error as Error).message);
    }
  }

  /** Dial if the pause after a round of addresses is over. Probe the first address if that is due. */
  #dialOrProbe(): void {
    if (this.#closed || !this.#hasAlternatives) return;
    if (this.#control === null && now() >= this.#route.movedAt) this.#tryAddress();
    if (this.#route.startProbe(now())) void this.#probe();
  }

  async #probe(): Promise<void> {
    const destination = controlDestination((this.#places[0] as Site).address);
    const answered = await answers(destination, this.#ending.signal);
    const from = this.address;
    if (this.#closed || !this.#route.probed(answered, now())) return;
    this.perform(this.machine.close()); // bye
    this.#move(from, "the first address answers again", false);
  }

  /** Decode the queued patches one at a time: several at once would block the event loop too long. */
  async #decode(): Promise<void> {
    while (this.#patches.length > 0) {
      await nextTurn();
      const job = this.#patches[0] as Patching;
      const start = now();
      const fault = await inSlices(patching(job)).catch((error) => this.#fault(error));
      const took = now() - start;
      this.#guarded(() => this.machine.decoded(job, fault, took, now()));
      this.#patches.shift();
    }
  }

  #tick(): void {
    if (!this.#closed && !this.machine.inSession && this.#control?.connected) {
      this.#guarded(() => this.machine.helloIfOutside(now()));
    }
    this.#dialOrProbe();
    if (this.#subscription.needsTicket) this.#guarded(() => this.machine.withoutTicket(now()));
    // Tick last: messages that are sent just after `tick` has closed a connection would be lost.
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

  /** Carry out the effects that `effects` returns, unless closed. Report exceptions as notices. */
  #guarded(effects: () => Effect[]): void {
    if (!this.#closed) this.#guard(() => this.perform(effects()), undefined);
  }

  /** Return the result of `work`; `otherwise` if it throws, since no message may end a worker. */
  #guard<T>(work: () => T, otherwise: T): T {
    try {
      return work();
    } catch (error) {
      this.#fault(error);
      return otherwise;
    }
  }

  /**
   * Report an internal error to the user, at most once every `FAULT_MS` milliseconds. Return the
   * text of the error.
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
