/** A process with hardly any descriptors left: an error says so, and ZeroMQ ends nothing. */

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { test } from "node:test";

// Fills the table but for so many, makes a worker, and says what came of it.
const PROGRAM = `
  import { closeSync, openSync } from "node:fs";
  import { Worker } from ${JSON.stringify(new URL("../src/index.js", import.meta.url).href)};
  const held = [];
  try {
    for (;;) held.push(openSync("/dev/null", "r"));
  } catch {}
  for (const left of [...Array(17).keys()]) {
    for (const descriptor of held.slice(0, left)) closeSync(descriptor);
    let told = "made";
    try {
      const worker = new Worker("tcp://127.0.0.1:9", { models: { m: {} } });
      await worker.close();
    } catch (error) {
      told = error.message;
    }
    if (left < 16) for (let i = 0; i < left; i++) held[i] = openSync("/dev/null", "r");
    console.log(told);
  }
  process.exit(0);
`;

test(
  "what lacks descriptors is not made and says so",
  { skip: process.platform === "win32" },
  () => {
    const run = ["-c", 'ulimit -n 128; exec "$0" --input-type=module -e "$1"'];
    const done = spawnSync("sh", [...run, process.execPath, PROGRAM], {
      encoding: "utf8",
      timeout: 60_000,
    });
    assert.equal(done.status, 0, `${done.signal} ${done.stderr}`);
    const told = done.stdout.trim().split("\n");
    assert.equal(told.length, 17);
    for (const [left, text] of told.slice(0, 16).entries()) {
      assert.match(
        text,
        new RegExp(`: ${left} descriptors are left, and its sockets need 16: .*ulimit`),
      );
    }
    assert.equal(told.at(-1), "made");
  },
);
