/**
 * A process with hardly any descriptors left: with keys an error says so, and ZeroMQ ends nothing;
 * without keys the worker dials until there are some.
 */

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { test } from "node:test";
import { curveKeyPair } from "zeromq";

const { publicKey, secretKey } = curveKeyPair();
const KEYS = { name: "w", public: publicKey, secret: secretKey, publisher: publicKey };

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
      const worker = new Worker("tcp://127.0.0.1:9", { models: { m: {} }, keys: ${JSON.stringify(KEYS)} });
      await worker.close();
    } catch (error) {
      told = error.message;
    }
    if (left < 16) for (let i = 0; i < left; i++) held[i] = openSync("/dev/null", "r");
    console.log(told);
  }
  process.exit(0);
`;

// Has a worker dial while there are no descriptors, and says when it has connected.
const LATER = `
  import { once } from "node:events";
  import { closeSync, openSync } from "node:fs";
  import { createServer } from "node:net";
  import { Worker } from ${JSON.stringify(new URL("../src/index.js", import.meta.url).href)};
  const server = createServer();
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const held = [];
  try {
    for (;;) held.push(openSync("/dev/null", "r"));
  } catch {}
  const worker = new Worker(\`tcp://127.0.0.1:\${server.address().port}\`, { models: { m: {} } });
  setTimeout(() => held.forEach((descriptor) => closeSync(descriptor)), 200); // after some attempts
  await once(server, "connection");
  console.log(worker.state);
  process.exit(0);
`;

/** Run a program that may have so few descriptors. */
function run(program: string) {
  const shell = ["-c", 'ulimit -n 128; exec "$0" --input-type=module -e "$1"'];
  return spawnSync("sh", [...shell, process.execPath, program], {
    encoding: "utf8",
    timeout: 60_000,
  });
}

const skip = process.platform === "win32";

test("without keys a worker dials until there are descriptors", { skip }, () => {
  const done = run(LATER);
  assert.equal(done.status, 0, `${done.signal} ${done.stderr}`);
  assert.equal(done.stdout, "joining\n");
});

test("what lacks descriptors is not made and says so", { skip }, () => {
  const done = run(PROGRAM);
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
});
