/** Work in slices: the event loop turns meanwhile, and nobody is disturbed. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import { inSlices, prefault } from "../src/slices.js";
import { Buffers } from "../src/staging.js";

const PAGE = 4096;

test("long work lets the event loop turn, short work is done at once", async (t) => {
  let clock = 0;
  t.mock.method(performance, "now", () => clock);
  function* work(steps: number, milliseconds: number): Generator<void> {
    for (let step = 0; step < steps; step++) {
      clock += milliseconds;
      done += 1;
      yield;
    }
  }
  let done = 0;
  const long = inSlices(work(10, 1));
  const first = done;
  assert.ok(first >= 1 && first < 10);
  await turn();
  assert.ok(done < 10);
  await long;
  assert.equal(done, 10);
  done = 0;
  void inSlices(work(10, 0));
  assert.equal(done, 10);
});

test("fresh memory is prefault, until a version takes it", () => {
  const buffers = new Buffers();
  const memory = buffers.preallocate(2 ** 21 + 1);
  assert.ok(memory !== null && buffers.unused(memory));
  const touching = prefault(memory, () => buffers.unused(memory));
  touching.next();
  assert.deepEqual([memory[0], memory[2 ** 20 - PAGE], memory[2 ** 20]], [1, 1, 0]);
  assert.equal(buffers.take(memory.length), memory);
  assert.deepEqual([...touching], []);
  assert.equal(memory.at(-1), 0, "it is the version's now");
  assert.equal(buffers.preallocate(5), null, "there is one");
  for (const _ of prefault(memory, () => true));
  assert.equal(memory.at(-1), 1);
});
