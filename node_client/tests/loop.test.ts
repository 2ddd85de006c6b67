/** The worker's loop, where no publisher is: what takes long is done while the event loop turns. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import { Layout } from "../src/layout.js";
import { WorkerLoop } from "../src/loop.js";
import { Patching } from "../src/patching.js";
import { Bench } from "./bench.js";
import { Published, patchHead } from "./published.js";

const SIZE = 2 ** 26; // its pages alone take more than a slice
const BLOCKS = SIZE / 2 ** 18;

/** Return patches to be decoded, which change nothing. */
function jobs(count: number): Patching[] {
  const one = new Published(7, 1, new Uint8Array(SIZE), { chunkBytes: 2 ** 20 });
  const patch = Buffer.concat([patchHead(one, one), Buffer.alloc(BLOCKS)]); // each is unchanged
  const layout = Layout.parse(one.layout);
  const running = { epoch: 7, version: 1, digest: one.digest };
  const base = { running, layout, data: one.data, own: true };
  return Array.from({ length: count }, () => {
    return new Patching("m", base, patch, new Uint8Array(SIZE), one.digest);
  });
}

test("patches are decoded one after another, between turns, and no further once it closes", async () => {
  const { machine } = new Bench({ inside: false });
  const ended: [job: Patching, fault: string][] = [];
  machine.decoded = (job, fault) => {
    ended.push([job, fault]);
    return [];
  };
  const failures: unknown[] = [];
  const loop = new WorkerLoop("ipc:///nobody/is-here", machine, {
    told: () => {},
    ended: (reason) => failures.push(reason),
  });
  const [first, second, third] = jobs(3) as [Patching, Patching, Patching];
  loop.perform([first, second, third].map((job) => ({ do: "decode", job })));
  let turns = 0;
  for (; ended.length < 2; turns++) await turn();
  assert.ok(turns >= 4, `${turns}`);
  assert.ok(ended[0]?.[0] === first && ended[1]?.[0] === second);
  assert.deepEqual(
    ended.map(([, fault]) => fault),
    ["", ""],
  );
  loop.close();
  assert.ok(!third.live);
  for (let more = 0; more < 5; more++) await turn();
  assert.deepEqual([ended.length, failures], [2, []]);
});
