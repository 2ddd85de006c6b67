/** Versions of several models that are published as one: how a worker's applier applies them. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import { Applier, type Hooks } from "../src/applying.js";
import type { Effect } from "../src/effects.js";
import { timing } from "../src/limits.js";
import { WorkerMachine } from "../src/machine.js";
import { RegisteredTarget, SnapshotTarget, type Target } from "../src/target.js";
import { sent } from "./bench.js";
import { bytesOf, type Frames, Published, welcome } from "./published.js";

const MODELS = ["a", "b", "c"];

/** A worker's machine and applier of models a and b in place, and snapshots of c. */
class Three {
  readonly machine: WorkerMachine;
  readonly applier: Applier;
  readonly said: Effect[] = [];
  readonly memory = { a: new Uint8Array(8), b: new Uint8Array(8) };
  freed = 0;

  constructor(hooks: Partial<Hooks> = {}) {
    const targets = new Map<string, Target>([
      ["a", new RegisteredTarget({ w: this.memory.a })],
      ["b", new RegisteredTarget({ w: this.memory.b })],
      ["c", new SnapshotTarget()],
    ]);
    const identity = { name: "w", instance: "a".repeat(32), client: "c", host: "h", pid: 5 };
    this.machine = new WorkerMachine(identity, targets, 1000, timing());
    const all = { apply: undefined, beforeApply: undefined, timeout: 30_000, ...hooks };
    this.applier = new Applier(this.machine, targets, all, {
      perform: (effects) => this.said.push(...effects),
      freed: () => {
        this.freed += 1;
      },
      late: () => {},
    });
    this.machine.helloIfOutside(0);
    this.machine.receive(welcome(7), 0);
  }

  /** Let a version of each model arrive. Return the effects that hand versions over. */
  arrive(version: number): Effect[] {
    const published = new Published(7, version, bytesOf(8, version), { chunkBytes: 8 });
    const effects = ["c", "a", "b"].flatMap((model) => {
      const others = MODELS.filter((other) => other !== model);
      const companions = Object.fromEntries(others.map((other) => [other, version]));
      const frames = [
        published.announce(true, { companions }),
        published.chunk(0),
        published.say("end"),
      ];
      return frames.flatMap((each) => this.machine.receive(renamed(each, model), 0));
    });
    return effects.filter((effect) => effect.do === "ready");
  }

  get runs(): number[] {
    return MODELS.map((model) => this.machine.running(model)?.version ?? 0);
  }
}

/** Return a message about another model. */
function renamed([header, ...payloads]: Frames, model: string): Frames {
  const fields = JSON.parse(Buffer.from(header ?? []).toString());
  return [Buffer.from(JSON.stringify({ ...fields, model })), ...payloads];
}

test("companions run before any of them is reported, and hooks are called back to back", async () => {
  const calls: string[] = [];
  const three: Three = new Three({
    beforeApply: ({ model }) => calls.push(`before ${model}, ${three.runs}`),
    apply: async ({ model }) => {
      await turn();
      calls.push(`apply ${model}, ${three.runs}, ${sent(three.said, "applied").length}`);
    },
  });
  assert.deepEqual(three.arrive(1), [{ do: "ready", models: MODELS }]);
  assert.ok(three.applier.claim(MODELS));
  const updates = await three.applier.apply(MODELS);
  assert.deepEqual(
    updates.map(({ model }) => model),
    MODELS,
  );
  const before = MODELS.map((model) => `before ${model}, 0,0,0`);
  assert.deepEqual(calls, [...before, ...MODELS.map((model) => `apply ${model}, 0,0,0, 0`)]);
  assert.deepEqual(three.runs, [1, 1, 1]);
  assert.equal(sent(three.said, "applied").length, 3);
});

for (const [hook, intact, code] of [
  ["beforeApply", [true, true, true], "apply"],
  ["apply", [false, false, true], "no-memory"],
] as const) {
  test(`one that ${hook} rejects takes the others with it`, async () => {
    const three = new Three({
      [hook]: ({ model }: { model: string }) => {
        if (model === "b") throw new Error("no");
      },
    });
    three.arrive(1);
    assert.ok(three.applier.claim(MODELS));
    assert.deepEqual(await three.applier.apply(MODELS), []);
    const failed = sent(three.said, "failed");
    assert.deepEqual(
      failed.map((each) => each.intact),
      intact,
    );
    assert.equal(failed[1]?.text, "Error: no");
    const beside = "version 1 of b, which is published as one with it, failed: Error: no";
    assert.deepEqual([failed[0]?.text, failed[2]?.text], [beside, beside]);
    assert.equal(failed[2]?.code, code, "what is intact comes again if another model is torn");
    const rejected = three.said.filter((effect) => effect.do === "rejected");
    assert.deepEqual(
      rejected.map(({ model }) => model),
      ["b"],
      "the user hears of the culprit",
    );
    assert.deepEqual(three.runs, [0, 0, 0]);
  });
}

test("a reader of one model keeps all of them waiting", async () => {
  const three = new Three();
  three.arrive(1);
  const { promise, resolve } = Promise.withResolvers<void>();
  const reading = three.applier.reading("b", () => promise, {});
  await turn();
  assert.ok(!three.applier.claim(MODELS));
  assert.equal(await three.applier.reading("a", () => three.memory.a[0], {}), 0, "a may be read");
  resolve();
  await reading;
  assert.ok(three.freed > 0 && three.applier.claim(MODELS));
  assert.equal((await three.applier.apply(MODELS)).length, 3);
  assert.deepEqual(three.memory, { a: bytesOf(8, 1), b: bytesOf(8, 1) });
});
