/** Plays the sequences of the golden vectors with a worker's machine and a simulated clock. */

import type { Effect } from "../src/effects.js";
import { encode } from "../src/headers.js";
import { STAGING_BYTES_MAX, timing } from "../src/limits.js";
import { type Model, WorkerMachine } from "../src/machine.js";
import { patching } from "../src/patching.js";
import { atOnce } from "../src/slices.js";
import { RegisteredTarget, SnapshotTarget } from "../src/target.js";
import { memory, type Spec } from "./memory.js";
import type { Blob, Row } from "./vectors.js";

interface Step {
  readonly wait_ms?: number;
  /** The epoch of a pong to receive. */
  readonly pong?: number;
  readonly control?: readonly Blob[];
  readonly data?: readonly Blob[];
}

export interface Sequence {
  readonly models: readonly string[];
  readonly bytes_max?: number;
  readonly in_place?: Spec;
  readonly applies?: readonly ("done" | "refused" | "torn")[];
  readonly steps: readonly Step[];
}

const TICK_MS = 100;

/** Return for each step the messages that the worker sent, and the versions that it runs then. */
export function play(sequence: Sequence, bytesOf: (blob: Blob) => Uint8Array): Row[] {
  const player = new Player(sequence);
  return sequence.steps.map((step) => player.step(step, bytesOf));
}

/** A worker that applies each ready version at once, or fails to if the sequence says so. */
class Player {
  readonly #machine: WorkerMachine;
  readonly #models: readonly string[];
  #now = 1_000_000;
  #sent: unknown[] = [];
  #token = 0; // of the last ping
  readonly #applies: string[];

  constructor({ models, bytes_max, in_place = {}, applies = [] }: Sequence) {
    this.#applies = [...applies];
    const registered = memory(in_place);
    const targets = new Map<string, Model>();
    for (const model of models) {
      const own = registered[model];
      targets.set(model, own === undefined ? new SnapshotTarget() : new RegisteredTarget(own));
    }
    const identity = { name: "w", instance: "0".repeat(32), client: "", host: "", pid: 0 };
    this.#models = models;
    const bytesMax = bytes_max ?? STAGING_BYTES_MAX;
    this.#machine = new WorkerMachine(identity, targets, bytesMax, timing());
  }

  step(step: Step, bytesOf: (blob: Blob) => Uint8Array): Row {
    this.#sent = [];
    if (step.wait_ms !== undefined) this.#wait(step.wait_ms);
    if (step.pong !== undefined) {
      const pong = { wbp: 1, type: "pong", token: this.#token, epoch: step.pong };
      this.#perform(this.#machine.receive([Buffer.from(JSON.stringify(pong))], this.#now));
    }
    const control = step.control?.map(bytesOf);
    if (control !== undefined) this.#perform(this.#machine.receive(control, this.#now));
    const data = step.data?.map(bytesOf);
    if (data !== undefined) {
      const frames = [Buffer.from("m/ctl"), ...data];
      this.#perform(this.#machine.receivePublished(frames, this.#now));
    }
    const runs = this.#models.map((m) => [m, this.#machine.running(m)?.version ?? 0] as const);
    return { sent: this.#sent, runs: Object.fromEntries(runs) };
  }

  #wait(milliseconds: number): void {
    for (const until = this.#now + milliseconds; this.#now < until; ) {
      this.#now = Math.min(until, this.#now + TICK_MS);
      this.#perform(this.#machine.helloIfOutside(this.#now));
      this.#perform(this.#machine.tick(this.#now));
    }
  }

  #perform(effects: readonly Effect[]): void {
    for (const effect of effects) {
      if (effect.do === "send") {
        this.#sent.push(JSON.parse(encode(effect.message)));
        if (effect.message.type === "ping") this.#token = effect.message.token ?? 0;
      }
      if (effect.do === "ready") {
        for (const model of effect.models) this.#perform(this.#apply(model));
      }
      if (effect.do === "decode") {
        const fault = atOnce(patching(effect.job));
        this.#perform(this.#machine.decoded(effect.job, fault, 0, this.#now));
      }
    }
  }

  #apply(model: string): readonly Effect[] {
    const outcome = this.#applies.shift() ?? "done";
    this.#machine.takeReady(model);
    if (outcome === "done") return this.#machine.applied(model, this.#now);
    return this.#machine.failed(model, "no", this.#now, outcome !== "torn");
  }
}
