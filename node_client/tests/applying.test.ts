/** What a user's functions decide, and by when: a worker's machine and its applier, no publisher. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import { Applier, type Hooks, type Update } from "../src/applying.js";
import type { Effect } from "../src/effects.js";
import { TimeoutError, TornError } from "../src/errors.js";
import { SLICE_MS } from "../src/limits.js";
import { RegisteredTarget, SnapshotTarget, type Target } from "../src/target.js";
import { Bench, sent } from "./bench.js";
import { bytesOf, Published } from "./published.js";

const LARGE = 12 * 2 ** 20; // bytes, too many to be written within one turn

/** A target of which a large version takes more than one slice, however fast the machine is. */
function slowed(target: RegisteredTarget): Target {
  function* slowly(pieces: Iterable<void>): Generator<void> {
    for (const _ of pieces) {
      const until = performance.now() + SLICE_MS / 2;
      while (performance.now() < until);
      yield;
    }
  }
  const begin = target.begin.bind(target);
  target.begin = (staged) => {
    const writing = begin(staged);
    return writing.large ? { ...writing, pieces: slowly(writing.pieces) } : writing;
  };
  return target;
}

/** A worker's machine and applier, with one model. */
class Scene {
  readonly bench: Bench;
  readonly applier: Applier;
  readonly memory: Uint8Array<ArrayBuffer>;
  readonly said: Effect[] = [];
  readonly notices: string[] = [];
  freed = 0;

  constructor(hooks: Partial<Hooks> = {}, size: number | "snapshot" = 8) {
    this.memory = new Uint8Array(size === "snapshot" ? 0 : size);
    this.bench = new Bench({ bytesMax: 2 * LARGE });
    const target: Target =
      size === "snapshot" ? new SnapshotTarget() : slowed(new RegisteredTarget({ w: this.memory }));
    const { machine } = this.bench;
    const all = { apply: undefined, beforeApply: undefined, timeout: 30_000, ...hooks };
    this.applier = new Applier(machine, new Map([["m", target]]), all, {
      perform: (effects) => this.said.push(...effects),
      freed: () => {
        this.freed += 1;
      },
      late: (text) => this.notices.push(text),
    });
  }

  /** Let a version arrive, and begin to apply it. */
  apply(version: number, size = this.memory.length || 8): Promise<Update | null> {
    const chunkBytes = 2 ** 20;
    this.bench.push(new Published(7, version, bytesOf(size, version), { chunkBytes }));
    assert.ok(this.applier.claim(["m"]));
    return this.applier.apply(["m"]).then(([update]) => update ?? null);
  }

  /** The last report, and whether it is of success. */
  get failed() {
    return sent(this.said, "failed").at(-1);
  }

  get runs(): number {
    return this.bench.machine.running("m")?.version ?? 0;
  }
}

test("applied is said only when the user's function has returned", async () => {
  const { promise, resolve } = Promise.withResolvers<void>();
  const scene = new Scene({ apply: () => promise });
  const applying = scene.apply(1);
  await turn();
  assert.deepEqual(scene.said, [], "nobody knows yet");
  assert.deepEqual(scene.memory, bytesOf(8, 1), "but the bytes are there");
  const [progress] = sent(scene.bench.wait(1000), "progress");
  assert.equal(progress?.phase, "applying");
  assert.ok(!scene.applier.claim(["m"]), "one at a time");
  resolve();
  assert.equal((await applying)?.version, 1);
  assert.equal(sent(scene.said, "applied").length, 1);
  assert.ok(scene.applier.claim(["m"]));
});

for (const how of ["throws", "rejects"]) {
  const fails = (text: string) => {
    if (how === "throws") throw new Error(text);
    return Promise.reject(new Error(text));
  };

  test(`a snapshot is turned down by a function that ${how}, and what ran still runs`, async () => {
    const scene = new Scene({ apply: (u) => u.version === 2 && fails("too hot") }, "snapshot");
    const kept = await scene.apply(1);
    assert.equal(await scene.apply(2), null);
    const { code, text, intact, version } = scene.failed ?? {};
    assert.deepEqual([code, text, intact, version], ["apply", "Error: too hot", true, 2]);
    assert.equal(scene.runs, 1);
    await scene.apply(3);
    assert.deepEqual(kept?.tensors.get("w")?.data, bytesOf(8, 1));
  });

  test(`registered memory is torn by a function that ${how}`, async () => {
    const scene = new Scene({ apply: (u) => u.version === 2 && fails("no device") });
    await scene.apply(1);
    assert.equal(await scene.apply(2), null);
    assert.deepEqual([scene.failed?.intact, scene.runs], [false, 0]);
    await assert.rejects(
      scene.applier.reading("m", () => 1, {}),
      TornError,
    );
    await scene.apply(3);
    assert.equal(scene.runs, 3);
    assert.equal(await scene.applier.reading("m", () => scene.memory[0], {}), bytesOf(1, 3)[0]);
  });

  test(`a veto that ${how} leaves every byte`, async () => {
    const seen: unknown[] = [];
    const scene = new Scene({
      beforeApply: ({ version, tensors }) => {
        seen.push([...(tensors.get("w")?.data ?? [])]);
        return version === 2 && fails("no");
      },
    });
    await scene.apply(1);
    await scene.apply(2);
    assert.deepEqual([scene.failed?.intact, scene.runs], [true, 1]);
    assert.deepEqual(scene.memory, bytesOf(8, 1));
    assert.deepEqual(seen[1], [...bytesOf(8, 2)], "it sees the new ones");
  });
}

test("a snapshot that was turned down stays what it was for whoever kept it", async () => {
  const kept: Update[] = [];
  const scene = new Scene({ apply: (u) => kept.push(u) && Promise.reject("no") }, "snapshot");
  for (let version = 1; version <= 4; version++) await scene.apply(version);
  const found = kept.map(({ tensors }) => tensors.get("w")?.data);
  assert.deepEqual(
    found,
    [1, 2, 3, 4].map((version) => bytesOf(8, version)),
  );
});

test("whatever is thrown has words", async () => {
  const scene = new Scene({ apply: () => Promise.reject(Object.create(null)) }, "snapshot");
  assert.equal(await scene.apply(1), null);
  assert.match(scene.failed?.text ?? "", /without a text/);
});

for (const [hook, size, intact] of [
  ["apply", 8, false],
  ["apply", "snapshot", true],
  ["beforeApply", 8, true],
] as const) {
  test(`${hook} that hangs has failed (${size}), and its model waits for it`, async () => {
    const hangs = Promise.withResolvers<void>();
    let views: Update["tensors"] = new Map();
    const scene = new Scene(
      {
        [hook]: ({ version, tensors }: Update) => {
          if (version !== 1) return;
          views = tensors;
          return hangs.promise;
        },
        timeout: 20,
      },
      size,
    );
    assert.equal(await scene.apply(1), null);
    assert.equal(scene.failed?.text, `${hook} did not return within 0.02 s`);
    assert.deepEqual([scene.failed?.intact, scene.runs], [intact, 0]);
    assert.ok(!scene.applier.claim(["m"]), "it takes no other version");
    const before = [...(views.get("w")?.data ?? [])];
    for (let version = 2; version <= 4; version++) {
      scene.bench.push(new Published(7, version, bytesOf(8, version)));
    }
    assert.deepEqual([...(views.get("w")?.data ?? [])], before, "its memory is left alone");
    assert.deepEqual(scene.notices, []);
    hangs.resolve();
    await turn();
    assert.match(scene.notices.join(), new RegExp(`^${hook} of m has returned, too late`));
    assert.equal(scene.freed, 1);
    assert.ok(scene.applier.claim(["m"]));
    assert.equal((await scene.applier.apply(["m"]))[0]?.version, 4);
  });
}

test("a large version is written while the event loop turns, a small one within a turn", async () => {
  for (const [size, turns] of [
    [LARGE, true],
    [8 * 2 ** 20, false],
  ] as const) {
    const scene = new Scene({}, size);
    const applying = scene.apply(1);
    assert.equal(scene.memory.at(-1) === bytesOf(size, 1).at(-1), !turns);
    assert.equal(sent(scene.said, "applied").length, 0, "a promise is never too early");
    await applying;
    assert.ok(Buffer.from(scene.memory).equals(bytesOf(size, 1)));
  }
});

test("nobody reads half of a large version", async () => {
  const scene = new Scene({}, LARGE);
  const expected = [new Uint8Array(LARGE), bytesOf(LARGE, 1)].map((all) => Buffer.from(all));
  const seen: number[] = [];
  const look = () => seen.push(expected.findIndex((all) => all.equals(scene.memory)));
  await scene.applier.reading("m", look, {});
  const applying = scene.apply(1);
  const reads = [0, 1].map(() => scene.applier.reading("m", look, {}));
  await Promise.all([applying, ...reads]);
  assert.deepEqual(seen, [0, 1, 1]);
});

test("a version waits for readers, and later readers wait for it", async () => {
  const scene = new Scene();
  scene.bench.push(new Published(7, 1, bytesOf(8, 1)));
  const { promise, resolve } = Promise.withResolvers<void>();
  const first = scene.applier.reading("m", () => promise, {});
  await turn();
  assert.ok(!scene.applier.claim(["m"]));
  await assert.rejects(
    scene.applier.reading("m", () => 0, { timeout: 5 }),
    TimeoutError,
  );
  const second = scene.applier.reading("m", () => scene.memory[0], {});
  resolve();
  await first;
  assert.equal(await second, 0, "who wanted to write did not come back");
  assert.ok(scene.applier.claim(["m"]));
  await scene.applier.apply(["m"]);
  assert.deepEqual(scene.memory, bytesOf(8, 1));
});

test("memory that is transferred while it is written is torn", async () => {
  const scene = new Scene({}, LARGE);
  const applying = scene.apply(1);
  structuredClone(scene.memory.buffer, { transfer: [scene.memory.buffer] });
  assert.equal(await applying, null);
  assert.match(scene.failed?.text ?? "", /memory of w has 0 bytes now/);
  assert.equal(scene.failed?.intact, false);
});

test("closing waits for bytes, and not for functions", async () => {
  const called: number[] = [];
  const scene = new Scene({ apply: (u) => called.push(u.version) }, LARGE);
  const applying = scene.apply(1);
  await scene.applier.close();
  assert.ok(Buffer.from(scene.memory).equals(bytesOf(LARGE, 1)), "no half of it");
  await applying;
  assert.deepEqual([called, scene.said], [[], []], "nothing is called or said any more");
  const hung = new Scene({ apply: () => new Promise(() => {}) });
  const never = hung.apply(1);
  await turn();
  await hung.applier.close();
  assert.equal(await never, null);
});
