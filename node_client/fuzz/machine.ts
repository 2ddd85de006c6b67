/** The worker's machine, told anything by anybody: what it runs is what arrived, and only rises. */

import assert from "node:assert/strict";
import fc from "fast-check";
import { crc32c, digest } from "../src/checksum.js";
import { ChunkPlan } from "../src/chunks.js";
import type { Effect } from "../src/effects.js";
import { decode, encode } from "../src/headers.js";
import { CHUNKS_MAX, HEADER_BYTES_MAX, WINDOW_CHUNKS } from "../src/limits.js";
import type { WorkerMachine } from "../src/machine.js";
import { newer, type StagedVersion } from "../src/staging.js";
import { Bench } from "../tests/bench.js";
import { bytesOf, type Frames, header, Published, welcome } from "../tests/published.js";
import { conversations, damaged, headers, type Step } from "./cases.js";

const CHUNK_BYTES = [1, 3, 4, 64];
const TOPIC = Buffer.from("m/ctl");
const EMPTY = new Uint8Array(0);

type User = "apply" | "keep" | "fail" | "tear";

/** What the user does, beside what the network does. */
type Act = Step | { readonly user: User };

export const versions = fc
  .record({
    epoch: fc.constantFrom(7, 7, 7, 7, 8, 6),
    version: fc.integer({ min: 1, max: 5 }),
    size: fc.constantFrom(0, 4, 11, 60),
    chunkBytes: fc.constantFrom(...CHUNK_BYTES),
    commit: fc.constantFrom("auto" as const, "auto" as const, "together" as const),
  })
  .map(({ epoch, version, size, ...options }) => {
    return new Published(epoch, version, bytesOf(size, version), options);
  });

/** One message of a version, a sound one but for the bytes of some chunks. */
const word: fc.Arbitrary<Frames> = fc
  .tuple(versions, fc.nat(8), fc.nat(20))
  .map(([version, kind, index]) => {
    const said = (["end", "commit", "abort", "beacon"] as const)[kind];
    if (said !== undefined) return version.say(said);
    if (kind === 4) return version.whole();
    const chunk = index % Math.max(1, version.plan.count);
    if (kind === 5) return version.chunk(chunk);
    if (kind === 6)
      return version.chunk(
        chunk,
        version.bytes(chunk).map((byte) => byte ^ index),
      );
    return version.announce(kind === 7);
  });

const act: fc.Arbitrary<Act> = fc.oneof(
  { weight: 4, arbitrary: fc.record({ pushed: fc.boolean(), frames: word }) },
  fc.record({ pushed: fc.boolean(), frames: damaged(headers).map((h) => [h, bytesOf(4, 1)]) }),
  fc.record({
    pushed: fc.constant(false),
    frames: fc.oneof(
      fc.tuple(fc.constantFrom(6, 7, 8), fc.nat(9)).map(([e, v]) => welcome(e, { m: v })),
      fc
        .constantFrom("gone", "unknown-worker", "name-taken", "new-code")
        .map((code) => [header("refuse", { code, text: "", model: "m", version: 1 })]),
    ),
  }),
  fc.record({ wait: fc.constantFrom(100, 300, 1100, 6000) }),
  fc.record({ user: fc.constantFrom<User>("apply", "keep", "fail", "tear") }),
);

/** All of a version, in order, with accidents. */
const push: fc.Arbitrary<Act[]> = fc
  .tuple(versions, fc.boolean(), fc.array(fc.nat(99), { maxLength: 3 }))
  .map(([version, pushed, lost]) => {
    const chunks = version.crcs.map((_, index) => version.chunk(index));
    const all = [version.announce(), ...chunks, version.say("end")].map((frames) => ({
      pushed,
      frames,
    }));
    for (const index of lost.slice(1)) all.splice(index % (all.length + 3), 1);
    const damaged = all[lost[0] ?? all.length]?.frames;
    if (damaged?.[1] !== undefined) damaged[1] = damaged[1].map((byte) => byte ^ 1);
    return all;
  });
const scene = fc
  .tuple(
    fc.oneof(fc.constantFrom(...conversations), fc.constant([])),
    fc.array(fc.oneof(push, fc.tuple(act)), { maxLength: 25 }),
    fc.nat(30),
  )
  .map(([begin, more, at]) => [...begin.slice(0, at), ...more.flat(), ...begin.slice(at)] as Act[]);

/** The machine, and what must hold of it after each act. */
export class Stage {
  readonly machine: WorkerMachine;
  readonly #chunkBytes = new Set<number>(); // of versions that were announced

  constructor(readonly bench = new Bench({ bytesMax: 10_000 })) {
    this.machine = bench.machine;
  }

  play(act: Act, piece: number): void {
    const before = this.machine.running("m");
    if ("frames" in act) this.#note(act.frames);
    if ("user" in act) this.use(act.user);
    else if ("wait" in act) this.check(this.bench.wait(act.wait));
    else if (act.pushed) this.publish(act.frames, piece);
    else this.check(this.machine.receive(act.frames, this.bench.now));
    const after = this.machine.running("m");
    if (before !== null && after !== null && after !== before) assert.ok(newer(after, before));
  }

  #note(frames: readonly Uint8Array[]): void {
    try {
      const { message } = decode(frames);
      if (message.type === "announce") this.#chunkBytes.add(message.chunk_bytes);
    } catch {} // malformed, as the machine will find
  }

  /** Receive a published message as the stream does: into its place, perhaps cut off there. */
  publish(frames: readonly Uint8Array[], piece: number): void {
    const [head = EMPTY, payload, ...more] = frames;
    if (payload === undefined) {
      this.check(this.bench.publish([...frames]));
      return;
    }
    const lease = this.machine.place([TOPIC, head], payload.length);
    if (lease !== null) assert.equal(lease.bytes.length, payload.length);
    for (let at = 0; lease?.live && at < payload.length; at += piece) {
      const bytes = payload.subarray(at, at + piece);
      lease.room(piece).set(bytes);
      lease.received(bytes.length);
    }
    const cut = piece === 1;
    if (!cut) this.check(this.bench.publish([head, lease?.live ? lease.bytes : EMPTY, ...more]));
    lease?.cancel();
  }

  use(how: User): void {
    const { now } = this.bench;
    const staged = this.machine.takeReady("m");
    if (staged !== null) this.checkStaged(staged);
    if (how === "fail" || how === "tear") {
      this.check(this.machine.failed("m", "it hurts", now, how === "fail"));
    } else this.check(this.machine.applied("m", now, how === "keep"));
  }

  checkStaged({ data, layout, digest: said, ...key }: StagedVersion): void {
    const running = this.machine.running("m");
    assert.ok(running === null || newer(key, running), "it would go back");
    assert.equal(data.length, layout.nbytes);
    const digests = [...this.#chunkBytes].map((size) => {
      const plan = new ChunkPlan(data.length, size);
      const crcs = Array.from({ length: plan.count }, (_, i) =>
        crc32c(data.subarray(...plan.span(i))),
      );
      return digest(layout.id, size, crcs);
    });
    assert.ok(digests.includes(said), "the digest is not that of the bytes");
  }

  check(effects: readonly Effect[]): void {
    if (effects.some((effect) => effect.do === "decode")) this.check(this.bench.decode(effects));
    for (const effect of effects) {
      if (effect.do === "ready") assert.ok(this.bench.ready);
      if (effect.do !== "send") continue;
      assert.ok(Buffer.byteLength(encode(effect.message)) <= HEADER_BYTES_MAX);
      if (effect.message.type !== "fetch") continue;
      const { first = 0, count = 0 } = effect.message;
      assert.ok(count <= WINDOW_CHUNKS && first + count <= CHUNKS_MAX);
    }
  }
}

export const machine = fc.property(scene, fc.integer({ min: 1, max: 6 }), (acts, piece) => {
  const stage = new Stage();
  for (const act of acts) stage.play(act, piece);
});
