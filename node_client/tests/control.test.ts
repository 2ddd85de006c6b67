/** The control channel with keys: what becomes of its connection is told, however early that is. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { test } from "node:test";
import { Worker } from "node:worker_threads";
import { curveKeyPair, Dealer, Socket } from "zeromq";
import { Handshakes } from "../src/handshakes.js";
import { KeyedControl } from "../src/keyed_control.js";
import { GREETING } from "./streams.js";

const HUNG_UP = 1;
const ANSWER = Buffer.concat([GREETING, Buffer.from("\x04\x05\x04READ", "latin1")]); // ZeroMQ gives up

/** A listener in a thread of its own, which goes on while ours is blocked. */
const LISTENER = `
const { createServer } = require("node:net");
const { parentPort, workerData } = require("node:worker_threads");
const server = createServer((socket) => {
  socket.on("error", () => {});
  socket.on("data", () => {});
  socket.on("close", () => {
    Atomics.store(workerData.state, 0, ${HUNG_UP});
    Atomics.notify(workerData.state, 0);
  });
  socket.write(workerData.answer);
});
server.listen(0, "127.0.0.1", () => parentPort.postMessage(server.address().port));
`;

test("an attempt that is over before anybody could look is told", { timeout: 60_000 }, async () => {
  const state = new Int32Array(new SharedArrayBuffer(4));
  const listener = new Worker(LISTENER, { eval: true, workerData: { state, answer: ANSWER } });
  const [port] = await once(listener, "message");
  Object.defineProperty(Dealer.prototype, "connect", {
    configurable: true,
    value(this: Dealer, address: string) {
      Socket.prototype.connect.call(this, address);
      Atomics.wait(state, 0, 0); // until ZeroMQ has given the connection up
    },
  });
  let told: () => void = () => {};
  const changed = new Promise<void>((resolve) => {
    told = resolve;
  });
  const { publicKey, secretKey } = curveKeyPair();
  const keys = { name: "w", public: publicKey, secret: secretKey, publisher: publicKey };
  const control = new KeyedControl(`tcp://127.0.0.1:${port}`, keys, 1_000, new Handshakes(1_000), {
    place: () => null,
    ended: () => {},
    message: () => {},
    connected: () => {},
    changed: () => told(),
    shutOut: () => {},
    broke: () => {},
  });
  await changed;
  control.close();
  await listener.terminate();
  assert.equal(state[0], HUNG_UP);
});
