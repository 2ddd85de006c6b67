/** The worker's loop, where no publisher is: what takes long is done while the event loop turns. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import { Layout } from "../src/layout.js";
import { type Reported, WorkerLoop } from "../src/loop.js";
import { Patching } from "../src/patching.js";
import { Bench } from "./bench.js";
import { Hostile } from "./hostile.js";
import { Published, patchHead } from "./published.js";

const SIZE = 2 ** 26; // its pages alone take more than a slice
const BLOCKS = SIZE / 2 ** 18;
const NOWHERE = [{ address: "ipc:///nobody/is-here", keys: null }];

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
  const loop = new WorkerLoop(NOWHERE, machine, {
    reported: () => {},
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

test("a message that the machine fails on is reported, once in a while, and ends nothing", async () => {
  await using hostile = await Hostile.start();
  const { machine } = new Bench({ inside: false });
  const receive = machine.receive.bind(machine);
  machine.receive = (frames, now) => {
    if (frames.length > 1) throw new Error("a defect\x1b");
    return receive(frames, now);
  };
  const reported: Reported[] = [];
  const loop = new WorkerLoop([{ address: hostile.address, keys: null }], machine, {
    reported: (effect) => reported.push(effect),
    ended: (reason) => assert.fail(String(reason)),
  });
  await hostile.welcome();
  for (let count = 0; count < 100; count++) hostile.say({ type: "pong" }, Buffer.from("payload"));
  hostile.say({ type: "ping", token: 9876543277 });
  await hostile.control.hears('"token":9876543277');
  loop.close();
  const notices = reported.flatMap((effect) => (effect.do === "notice" ? [effect] : []));
  assert.equal(notices.length, 1);
  assert.equal(notices[0]?.code, "failed-inside");
  assert.match(notices[0]?.text ?? "", /failed on one message, and goes on.*a defect\\x1b/);
});

test("a patch that fails in no known way is fetched as a whole", async () => {
  const { machine } = new Bench({ inside: false });
  const faults: string[] = [];
  machine.decoded = (_, fault) => {
    faults.push(fault);
    return [];
  };
  const loop = new WorkerLoop(NOWHERE, machine, {
    reported: () => {},
    ended: (reason) => assert.fail(String(reason)),
  });
  const [job] = jobs(1) as [Patching];
  const broken = Object.defineProperty(job, "patch", {
    get: () => {
      throw new TypeError("a defect");
    },
  });
  loop.perform([{ do: "decode", job: broken }]);
  for (let turns = 0; faults.length === 0 && turns < 1000; turns++) await turn();
  loop.close();
  assert.match(faults[0] ?? "", /a defect/);
});
