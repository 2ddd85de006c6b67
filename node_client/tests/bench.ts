/** A worker's machine on a bench: what it is told, what it says, and a clock that is turned by hand. */

import "../driver/tables.js"; // an arrow of which may lead elsewhere
import type { Effect } from "../src/effects.js";
import type { Keyring } from "../src/keyring.js";
import type { Layout } from "../src/layout.js";
import { timing } from "../src/limits.js";
import { WorkerMachine } from "../src/machine.js";
import type { WorkerMessage } from "../src/messages.js";
import { patching } from "../src/patching.js";
import { atOnce } from "../src/slices.js";
import type { StagedVersion } from "../src/staging.js";
import { type Frames, type Published, welcome } from "./published.js";

type Fetch = Extract<WorkerMessage, { type: "fetch" }>;
const TOPIC = Buffer.from("m/ctl");
export const DECODE_MS = 5; // that the decoding of each patch is said to take

export class Bench {
  now = 100_000;
  readonly machine: WorkerMachine;

  constructor({
    bytesMax = 1000,
    fault = (_: Layout) => "",
    inside = true,
    keyring = null as Keyring | null,
    patches = true,
  } = {}) {
    const identity = { name: "w", instance: "a".repeat(32), client: "c", host: "h", pid: 5 };
    const models = new Map([["m", { fault, nbytes: 0 }]]);
    this.machine = new WorkerMachine(identity, models, bytesMax, timing(), keyring, patches);
    if (!inside) return;
    this.machine.helloIfOutside(this.now);
    this.control(welcome(7));
  }

  control(frames: Frames): Effect[] {
    return this.machine.receive(frames, this.now);
  }

  publish(frames: Frames): Effect[] {
    return this.machine.receivePublished([TOPIC, ...frames], this.now);
  }

  /** Publish a version as a publisher does that sees no loss. */
  push(version: Published): Effect[] {
    const effects = this.publish(version.announce());
    for (let i = 0; i < version.plan.count; i++) effects.push(...this.publish(version.chunk(i)));
    return [...effects, ...this.publish(version.say("end"))];
  }

  /** Decode what is to be decoded, at once; a fuzzer may have something newer come before. */
  decode(effects: readonly Effect[]): Effect[] {
    return effects.flatMap((effect) => {
      if (effect.do !== "decode") return [];
      return this.machine.decoded(effect.job, atOnce(patching(effect.job)), DECODE_MS, this.now);
    });
  }

  wait(milliseconds: number): Effect[] {
    const effects: Effect[] = [];
    for (const until = this.now + milliseconds; this.now < until; ) {
      this.now = Math.min(until, this.now + 100);
      effects.push(...this.machine.helloIfOutside(this.now), ...this.machine.tick(this.now));
    }
    return effects;
  }

  /** The version that waits to be applied. */
  get ready(): StagedVersion | null {
    return this.machine.followers.get("m")?.versions.inPhase("ready")?.staged ?? null;
  }

  /** Apply it; `kept`: as a snapshot, which stays with the user. */
  apply(kept = false): Effect[] {
    this.machine.takeReady("m");
    return this.machine.applied("m", this.now, kept);
  }
}

/** Return the messages of a type that were sent. */
export function sent<T extends WorkerMessage["type"]>(
  effects: readonly Effect[],
  type: T,
): Extract<WorkerMessage, { type: T }>[] {
  const messages = effects.flatMap((effect) => (effect.do === "send" ? [effect.message] : []));
  return messages.filter((m): m is Extract<WorkerMessage, { type: T }> => m.type === type);
}

/** Return the indexes of the chunks that were asked for. */
export function asked(effects: readonly Effect[]): number[] {
  return (sent(effects, "fetch") as Fetch[]).flatMap(({ first = 0, count = 0 }) =>
    Array.from({ length: count }, (_, i) => first + i),
  );
}

export function kinds(effects: readonly Effect[]): string[] {
  return effects.map((effect) => (effect.do === "send" ? effect.message.type : effect.do));
}
