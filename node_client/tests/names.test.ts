/** A publisher's host that is not found is told of. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { test } from "node:test";
import { setImmediate } from "node:timers/promises";
import { Worker } from "../src/index.js";
import { Names } from "../src/names.js";

const unknown = () => Promise.reject(new Error("no such host"));

test("a host that is not found is told of once in a while", async () => {
  const names = new Names("tcp://nowhere.invalid:5", unknown);
  assert.equal(names.poll(false, 1_000), null);
  assert.equal(names.poll(false, 2_999), null, "it may be about to connect");
  assert.equal(names.poll(false, 3_000), null, "it is asked for");
  await setImmediate();
  const told = names.poll(false, 3_100);
  assert.match(told ?? "", /host "nowhere.invalid" is found \(no such host\): check the name/);
  assert.equal(names.poll(false, 4_000), null, "it was told a moment ago");
  await setImmediate();
  assert.notEqual(names.poll(false, 63_100), null);
  assert.equal(names.poll(true, 64_000), null);
  assert.equal(names.poll(false, 130_000), null, "patience begins anew");
});

test("a host that is found is not told of, and one of a silent server is", async () => {
  const found = new Names("tcp://somewhere:5", () => Promise.resolve());
  const silent = new Names("tcp://somewhere:5", () => new Promise(() => {}));
  for (const names of [found, silent]) {
    for (const now of [0, 2_000]) assert.equal(names.poll(false, now), null);
  }
  await setImmediate();
  assert.equal(found.poll(false, 4_000), null);
  assert.match(silent.poll(false, 4_000) ?? "", /its name server does not answer/);
});

test("addresses that are numbers or paths are not looked up", async () => {
  for (const address of ["tcp://127.0.0.1:5", "tcp://[::1]:5", "ipc://x"]) {
    const names = new Names(address, unknown);
    for (const now of [0, 2_000]) assert.equal(names.poll(false, now), null);
    await setImmediate();
    assert.equal(names.poll(false, 10_000), null, address);
  }
});

test("a worker says that its publisher's host is not found", async () => {
  const worker = new Worker("tcp://nowhere.invalid:5", { models: { m: {} } });
  try {
    const signal = AbortSignal.timeout(30_000);
    const [code, text] = await once(worker, "notice", { signal });
    assert.equal(code, "unknown-host");
    assert.match(text, /nowhere.invalid/);
  } finally {
    await worker.close();
  }
});
