/** Workers of a real publisher, over loopback. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { test } from "node:test";
import {
  ApplyError,
  ClosedError,
  RefusedError,
  TimeoutError,
  tensor,
  Worker,
  type WorkerOptions,
} from "../src/index.js";
import { NO_PUBLISHER, Publisher } from "./publisher.js";

const live = { skip: NO_PUBLISHER, timeout: 120_000 };
const SOON = { timeout: 30_000 };

/** Memory for the model that `Publisher.publish` sends. */
function memory() {
  return { w: tensor(new Float32Array(6), [2, 3]), b: tensor(new Float32Array(1), []) };
}

function join(publisher: Publisher, models: WorkerOptions["models"], name = "n"): Promise<Worker> {
  return Worker.connect(publisher.address, { models, name, ping: 200, lostAfter: 2000 });
}

/** Keep applying, so that a publisher that waits for it gets its answer. */
async function keepApplying(worker: Worker): Promise<void> {
  for await (const _ of worker);
}

test("versions come in place, and as snapshots", live, async () => {
  await using publisher = await Publisher.start();
  const m = memory();
  await using worker = await join(publisher, { m }, "in-place");
  await using other = await join(publisher, ["m"], "snapshots");
  const published = publisher.publish(2.5);
  const [update, snapshot] = [await worker.receive(SOON), await other.receive(SOON)];
  assert.deepEqual((await published).workers, { "in-place": "applied", snapshots: "applied" });
  assert.deepEqual([...m.w.data, ...m.b.data], Array(7).fill(2.5));
  assert.equal(update?.tensors.get("w")?.data, m.w.data);
  assert.deepEqual(snapshot?.tensors.get("w"), { ...m.w, data: new Float32Array(6).fill(2.5) });
  assert.equal(update?.digest, snapshot?.digest);
  assert.deepEqual(worker.running("m"), {
    epoch: publisher.epoch,
    version: 1,
    digest: update?.digest,
    metadata: new Map(),
  });
  const again = publisher.publish(3);
  await Promise.all([worker.receive(SOON), other.receive(SOON)]);
  await again;
  assert.equal(snapshot?.tensors.get("b")?.data[0], 2.5, "a snapshot stays what it was");
});

test(
  "weights change only while somebody receives, and the newest is what comes",
  live,
  async () => {
    await using publisher = await Publisher.start();
    const m = memory();
    await using worker = await join(publisher, { m });
    for (let value = 1; value <= 200; value++) await publisher.publish(value, { wait: "none" });
    await publisher.publish(201, { wait: "staged" }); // it is here, whole
    assert.deepEqual([...m.w.data], Array(6).fill(0));
    assert.equal((await worker.receive(SOON))?.version, 201);
    assert.deepEqual([...m.w.data], Array(6).fill(201));
    assert.equal(await worker.receive({ timeout: 0 }), undefined);
  },
);

test("a loop ends with close(), and leaving it closes nothing", live, async () => {
  await using publisher = await Publisher.start();
  const worker = await join(publisher, ["m"]);
  await publisher.publish(1, { wait: "none" });
  for await (const { version } of worker) {
    assert.equal(version, 1);
    break;
  }
  assert.equal(worker.state, "joined");
  const loop = keepApplying(worker);
  await publisher.publish(2);
  await worker.close();
  await loop;
  await assert.rejects(worker.receive(), ClosedError);
  while ("n" in (await publisher.ask({ do: "workers" }))); // it sent goodbye
});

test("whoever blocks the event loop for long is found again", live, async () => {
  await using publisher = await Publisher.start();
  await using worker = await join(publisher, ["m"]);
  await publisher.publish(1, { wait: "none" });
  assert.equal((await worker.receive(SOON))?.version, 1);
  // Longer than either side waits for signs of life.
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 3000);
  await publisher.publish(2, { require: 0, wait: "none" });
  assert.equal((await worker.receive(SOON))?.version, 2);
  await publisher.workers(1);
  const published = publisher.publish(3);
  assert.equal((await worker.receive(SOON))?.version, 3);
  assert.deepEqual((await published).workers, { n: "applied" });
});

test("a publisher that restarts is followed, and what runs stays", live, async () => {
  const first = await Publisher.start("lasting"); // connections are given none of its ports
  await using worker = await join(first, { m: memory() });
  const loop = keepApplying(worker);
  await first.publish(1);
  await first.kill();
  const joined = once(worker, "joined", { signal: AbortSignal.timeout(60_000) });
  await using second = await Publisher.start(first.address);
  assert.deepEqual(await joined, [second.epoch]);
  assert.equal(worker.running("m")?.epoch, first.epoch);
  await second.workers(1);
  await second.publish(2);
  assert.deepEqual(
    { ...worker.running("m"), digest: "" },
    { epoch: second.epoch, version: 1, digest: "", metadata: new Map() },
  );
  await worker.close();
  await loop;
});

test("together means all or none, and some means some", live, async () => {
  await using publisher = await Publisher.start();
  await using one = await join(publisher, ["m"], "one");
  await using two = await join(publisher, ["m"], "two");
  const loops = [keepApplying(one), keepApplying(two)];
  const together = await publisher.publish(1, { commit: "together" });
  assert.deepEqual(together.workers, { one: "applied", two: "applied" });
  const some = await publisher.publish(2, { workers: ["two"] });
  assert.deepEqual(some.workers, { two: "applied" });
  assert.deepEqual([one.running("m")?.version, two.running("m")?.version], [1, 2]);
  await Promise.all([one.close(), two.close()]);
  await Promise.all(loops);
});

for (const sealed of [false, true]) {
  test(`what has changed is sent alone${sealed ? ", sealed" : ""}`, live, async () => {
    const home = mkdtempSync(`${tmpdir()}/patched-`);
    const keys = sealed ? { keys: `${home}/keys`, names: ["w", "s", "o"] } : {};
    const own = (name: string) => (sealed ? { keys: `${home}/keys/workers/${name}.json` } : {});
    await using publisher = await Publisher.start(undefined, { ...keys, chunk_bytes: 2048 });
    const data = new Uint16Array(300_000);
    const more = { ping: 200, lostAfter: 2000 };
    const m = { w: tensor(data, [300_000], "F16") };
    const to = (name: string, models: WorkerOptions["models"], how = {}) =>
      Worker.connect(publisher.address, { models, name, ...more, ...how, ...own(name) });
    await using inPlace = await to("w", { m });
    await using snapshots = await to("s", ["m"]);
    await using whole = await to("o", ["m"], { patches: false });
    const workers = [inPlace, snapshots, whole];
    const step = async (steps: number, w: string, s: string) => {
      const published = publisher.publishTrained(steps);
      const updates = await Promise.all(workers.map((worker) => worker.receive(SOON)));
      const encodings = updates.map((update) => update?.encoding);
      assert.deepEqual(encodings, [w, s, "raw"]);
      assert.deepEqual((await published).encodings, { w, s, o: "raw" });
      const seen = updates[1]?.tensors.get("w")?.data as Uint16Array;
      assert.deepEqual(seen, data);
      assert.deepEqual([data[0], data[99]], [steps > 0 ? 0x3c01 : 0x3c00, 0x3c00]);
      return seen;
    };
    await step(0, "raw", "raw");
    await step(1, "delta-1", "delta-1"); // it is fetched, and those after it are pushed
    const snapshot = await step(2, "delta-1", "delta-1");
    snapshot[5] = 99; // by its user, whose it is
    const told = once(snapshots, "notice", { signal: AbortSignal.timeout(60_000) });
    await step(3, "delta-1", "raw");
    assert.match(String(await told), /^unpatched,version 4 .* is for the base/);
    await step(4, "delta-1", "delta-1");
    rmSync(home, { recursive: true });
  });
}

test("a name is refused to a second worker, in words", live, async () => {
  await using publisher = await Publisher.start();
  await using _one = await join(publisher, ["m"]);
  await assert.rejects(join(publisher, ["m"]), (error) => {
    return error instanceof RefusedError && error.code === "name-taken";
  });
});

test(
  "a version that does not fit is thrown where nobody listens, and told where somebody does",
  live,
  async () => {
    await using publisher = await Publisher.start();
    const m = { ...memory(), mine: new Int8Array(1) };
    await using worker = await join(publisher, { m });
    await publisher.publish(1, { wait: "none" });
    await assert.rejects(worker.receive(SOON), (error) => {
      assert.ok(error instanceof ApplyError && error.code === "layout-mismatch", String(error));
      return error.reason === "mine: I8 [1] here, not published";
    });
    const failed = once(worker, "failed", { signal: AbortSignal.timeout(30_000) });
    await publisher.publish(2, { wait: "none" });
    assert.equal((await failed)[0].version, 2);
    assert.equal(await worker.receive({ timeout: 0 }), undefined);
  },
);

test("signals and timeouts end the waiting", live, async () => {
  await using publisher = await Publisher.start();
  await using worker = await join(publisher, ["m"]);
  assert.equal(await worker.receive({ timeout: 10 }), undefined);
  await assert.rejects(worker.receive({ signal: AbortSignal.timeout(10) }), {
    name: "TimeoutError",
  });
  const stop = new AbortController();
  const waiting = worker.receive({ signal: stop.signal });
  stop.abort(new Error("enough"));
  await assert.rejects(waiting, /enough/);
  await assert.rejects(worker.receive({ signal: stop.signal }), /enough/);
  await assert.rejects(worker.receive({ timeout: -1 }), RangeError);
  await publisher.publish(1, { wait: "none" });
  assert.equal((await worker.receive(SOON))?.version, 1, "nothing was lost to those who left");
});

test("where no publisher is, connecting ends in time", async () => {
  const nobody = "ipc:///nobody/is-here";
  const models = ["m"];
  await assert.rejects(Worker.connect(nobody, { models, timeout: 50 }), TimeoutError);
  const signal = AbortSignal.timeout(50);
  await assert.rejects(Worker.connect(nobody, { models, signal }), { name: "TimeoutError" });
});

test("what makes no sense is refused in words", () => {
  for (const address of ["localhost:5555", "tcp://h", "tcp://h:99999", "udp://h:1", "tcp://h:0"]) {
    assert.throws(() => new Worker(address, { models: ["m"] }), /write tcp:/);
  }
  assert.throws(() => new Worker("tcp://h:1", { models: [] }), /takes 1 to 64/);
  assert.throws(() => new Worker("tcp://h:1", { models: ["a/b"] }), /a name is/);
  assert.throws(
    () => new Worker("tcp://h:1", { models: ["m"], ping: 100, lostAfter: 150 }),
    /twice/,
  );
});
