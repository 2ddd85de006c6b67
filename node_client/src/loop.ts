/**
 * The worker's loop. It owns the connections and the clock, passes frames to the machine, and
 * carries out the machine's effects. It runs on the event loop of the code that created it.
 */

import { setImmediate as turned } from "node:timers/promises";
import { type Control, control } from "./control.js";
import type { Effect } from "./effects.js";
import { dataDestination } from "./endpoints.js";
import { encode } from "./headers.js";
import type { WorkerKeys } from "./keys.js";
import { FAULT_MS } from "./limits.js";
import type { WorkerMachine } from "./machine.js";
import { Names } from "./names.js";
import { type Patching, patching } from "./patching.js";
import { inSlices, touched } from "./slices.js";
import { Subscription } from "./subscription.js";
import { printable } from "./words.js";

const TICK_MS = 100; // between two calls of `machine.tick`

/**
 * The effects that the loop passes to its handlers: all except those for connections, memory and
 * decoding.
 */
export type Told = Exclude<
  Effect,
  { do: "send" | "connect" | "redial" | "subscribe" | "touch" | "decode" }
>;

export interface LoopHandlers {
  readonly told: (effect: Told) => void;
  /** Called when the control channel has ended: no more messages will arrive. */
  readonly ended: (reason: unknown) => void;
}

export class WorkerLoop {
  readonly #control: Control;
  readonly #subscription: Subscription;
  readonly #timer: NodeJS.Timeout;
  readonly #names: Names;
  readonly #patches: Patching[] = []; // to be decoded; the first is in progress
  #closed = false;
  #faults = 0; // internal errors that were not reported yet
  #toldAt = Number.NEGATIVE_INFINITY; // when a fault was last reported

  constructor(
    readonly address: string,
    readonly machine: WorkerMachine,
    readonly handlers: LoopHandlers,
    keys: WorkerKeys | null = null,
    /** Whether the data endpoint may be on another host than the address. */
    readonly anyDataHost = false,
  ) {
    this.#control = control(address, keys, machine.bytesMax, machine.timing.lostAfter, {
      place: (header, size) => this.#guard(() => machine.placeControl(header, size), null),
      message: (frames) => this.#guarded(() => machine.receive(frames, now())),
      connected: () => this.#guarded(() => machine.helloIfOutside(now())),
      changed: () => machine.changed(now()),
      shutOut: (why) => this.#guarded(() => machine.shutOut(why, now())),
      ended: (error) => this.#end(error),
    });
    this.#subscription = new Subscription({
      place: (frames, size) => this.#guard(() => machine.place(frames, size), null),
      message: (frames) => this.#guarded(() => machine.receivePublished(frames, now())),
      broken: (reason) => this.#notice(`no pushed data, all is fetched: ${reason}`),
    });
    this.#names = new Names(address);
    // The event loop runs timers before input. If user code has blocked it for long, the messages
    // that arrived meanwhile must be read before the publisher is considered lost.
    this.#timer = setInterval(() => setImmediate(() => this.#tick()), TICK_MS);
  }

  /** Carry out effects of the machine. */
  perform(effects: readonly Effect[]): void {
    for (const effect of effects) {
      switch (effect.do) {
        case "send":
          this.#control.send(encode(effect.message));
          break;
        case "connect":
          this.#connect(effect.endpoint, effect.ticket);
          break;
        case "redial":
          this.#control.redial();
          this.#subscription.redial();
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
          this.handlers.told(effect);
      }
    }
  }

  close(): void {
    if (this.#closed) return;
    this.perform(this.machine.close());
    this.#stop();
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
    if (!this.#closed && !this.machine.inSession && this.#control.connected) {
      this.#guarded(() => this.machine.helloIfOutside(now()));
    }
    if (this.#subscription.needsTicket) this.#guarded(() => this.machine.withoutTicket(now()));
    // Tick last: if `tick` closes a connection, messages sent just after it would be lost.
    this.#guarded(() => this.machine.tick(now()));
    const text = this.#closed ? null : this.#names.poll(this.machine.inSession, now());
    if (text !== null) this.handlers.told({ do: "notice", code: "unknown-host", text });
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
    this.handlers.told({ do: "notice", code: "no-data", text });
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
    if (this.#closed || now() < this.#toldAt + FAULT_MS) return text;
    this.#toldAt = now();
    const times = this.#faults > 1 ? ` (and ${this.#faults - 1} times before)` : "";
    this.#faults = 0;
    const words = `this worker failed on one message, and goes on: please report it${times}: ${text}`;
    this.handlers.told({ do: "notice", code: "failed-inside", text: words });
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
    this.#subscription.close();
    this.#control.close();
  }
}

/** Return a monotonic time in milliseconds. */
export function now(): number {
  return performance.now();
}
