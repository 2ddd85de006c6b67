/** Workers with several addresses. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { mkdtempSync, rmSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { controlAddresses } from "../src/endpoints.js";
import { AddressError, KeysError, RefusedError, TimeoutError, Worker } from "../src/index.js";
import { keysOfEach } from "../src/keys.js";
import { answers } from "../src/probe.js";
import { asked, Bench, kinds, sent } from "./bench.js";
import { Hostile, Port } from "./hostile.js";
import { bytesOf, Published, welcome } from "./published.js";
import { NO_PUBLISHER, Publisher } from "./publisher.js";

const live = { skip: NO_PUBLISHER, timeout: 120_000 };
const timed = { timeout: 60_000 };
const SOON = { timeout: 30_000 };
const QUICK = { ping: 100, lostAfter: 1_000 };
const DEAD = "ipc:///nobody/is-here";

/** The texts of the notices `moved`. */
function moves(worker: Worker): string[] {
  const texts: string[] = [];
  worker.on("notice", (code, text) => code === "moved" && texts.push(text));
  return texts;
}

test("after a change of address, the session is new and the chunks that are here stay", () => {
  const bench = new Bench();
  const one = new Published(7, 1, bytesOf(12, 1));
  bench.publish(one.announce());
  bench.publish(one.chunk(0));
  bench.machine.moved();
  assert.ok(!bench.machine.inSession);
  assert.deepEqual(bench.publish(one.chunk(1)), [], "it is of the connection that was left");
  assert.deepEqual(kinds(bench.machine.helloIfOutside(bench.now)), ["hello"], "without a pause");
  const effects = bench.control(welcome(7, { m: 1 }));
  assert.ok(kinds(effects).includes("connect"), "an equal endpoint is on another host");
  assert.deepEqual(asked([...effects, ...bench.wait(300)]), [1, 2]);
  for (const index of [1, 2]) bench.control(one.chunk(index));
  bench.control(one.say("end"));
  assert.equal(sent(bench.apply(), "applied")[0]?.version, 1);
});

test(
  "a connection that closes, or cannot be opened, is changed for the next address",
  timed,
  async () => {
    const [first, last] = [await Hostile.start(), await Hostile.start()];
    await using worker = new Worker([first.address, DEAD, last.address], { models: ["m"] });
    const texts = moves(worker);
    await first.welcome();
    await once(worker, "joined");
    assert.equal(worker.address, first.address);
    await first[Symbol.asyncDispose]();
    await last.welcome();
    await once(worker, "joined");
    assert.deepEqual([worker.address, worker.state], [last.address, "joined"]);
    assert.equal(texts.length, 2);
    assert.ok(
      texts[0]?.includes(`from ${first.address} to ${DEAD}: the publisher closed`),
      texts[0],
    );
    assert.ok(texts[1]?.includes(`from ${DEAD} to ${last.address}: connect ENOENT`), texts[1]);
    last.control.heard.length = 0;
    await worker.close();
    await last.control.hears('"type":"bye"');
    await last[Symbol.asyncDispose]();
  },
);

test("dead addresses are tried in rounds, and named", timed, async () => {
  await using worker = new Worker([DEAD, `${DEAD}-2`], { models: ["m"] });
  const texts = moves(worker);
  await assert.rejects(worker.joined({ timeout: 700 }), (error) => {
    assert.ok(error instanceof TimeoutError);
    return error.message.includes(`${DEAD}, ${DEAD}-2`);
  });
  // A round takes 250 ms or more, so at most three have begun.
  assert.ok(texts.length >= 3 && texts.length <= 6, texts.join("\n"));
});

test(
  "a silent publisher is left for the next address, and the worker returns to the first",
  timed,
  async () => {
    await using silent = await Port.open(Buffer.alloc(0)); // it accepts, and does not greet
    await using other = await Hostile.start();
    await using worker = new Worker([silent.address, other.address], { models: ["m"], ...QUICK });
    const texts = moves(worker);
    await other.welcome();
    await once(worker, "joined");
    assert.match(texts[0] ?? "", /silent/);
    const pongs = setInterval(() => other.say({ type: "pong", epoch: 7 }), 100); // the session goes on
    await silent.hears("\x7f"); // of the worker, when it dialled
    await silent.hears("\x7f"); // of a probe, which gets no answer
    assert.equal(worker.address, other.address);
    silent.greets = Buffer.from("ff00000000000000017f", "hex");
    await other.control.hears('"type":"bye"');
    clearInterval(pongs);
    assert.deepEqual([worker.address, worker.state], [silent.address, "joining"]);
    assert.match(texts[1] ?? "", /the first address answers again/);
  },
);

test("a refusal sends the worker on, and is an error after a round", timed, async () => {
  await using first = await Hostile.start();
  await using last = await Hostile.start();
  const both = [first.address, last.address];
  await using worker = new Worker(both, { models: ["m"] });
  const refusal = async (by: Hostile) => {
    await by.control.hears('"type":"hello"');
    by.say({ type: "refuse", code: "name-taken", text: "another lives" });
  };
  const joined = worker.joined(SOON);
  await refusal(first);
  await last.welcome();
  await joined;
  await assert.doesNotReject(worker.receive({ timeout: 1 }), "the next address has accepted it");
  const again = new Worker(both, { models: ["m"] });
  const rejected = assert.rejects(again.joined(SOON), (error) => {
    assert.ok(error instanceof RefusedError && error.code === "name-taken");
    return error.message.includes(both.join(", "));
  });
  await refusal(first);
  await refusal(last);
  await rejected;
  await assert.rejects(again.receive(SOON), RefusedError);
  await again.close();
});

test("a probe asks for the greeting alone", timed, async () => {
  const greets = { "\xff": true, "HTTP/1.1": false, "": false };
  for (const [text, expected] of Object.entries(greets)) {
    await using port = await Port.open(Buffer.from(text, "latin1"));
    const host = port.address.slice("tcp://".length).split(":");
    const destination = { host: host[0] ?? "", port: Number(host[1]) };
    assert.equal(await answers(destination, new AbortController().signal), expected, text);
  }
  const server = createServer();
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as { port: number };
  const end = new AbortController();
  const begun = performance.now();
  const found = answers({ host: "127.0.0.1", port }, end.signal);
  const [socket] = await once(server, "connection");
  assert.deepEqual(await once(socket, "data"), [Buffer.from("ff00000000000000007f", "hex")]);
  end.abort();
  assert.equal(await found, false);
  assert.ok(performance.now() < begun + 900, "it does not wait for its own deadline");
  server.close();
});

test("each address is checked, and has keys if one has", () => {
  const models = { models: ["m"] };
  assert.throws(() => new Worker([], models), AddressError);
  assert.deepEqual(controlAddresses("tcp://a:1, ipc:///b,c,tcp://[::1]:2"), [
    "tcp://a:1",
    "ipc:///b,c",
    "tcp://[::1]:2",
  ]);
  assert.throws(() => controlAddresses("tcp://a:1,"), AddressError);
  assert.throws(() => new Worker(["tcp://a:1", "tcp://b"], models), /"tcp:\/\/b"/);
  assert.throws(() => keysOfEach(["w.json"], ["tcp://a:1", "tcp://b:2"]), /1 keys for 2 addresses/);
  assert.throws(() => keysOfEach([""], ["tcp://a:1"]), KeysError);
  assert.deepEqual(keysOfEach("", ["tcp://a:1", "tcp://b:2"]), [null, null]);
});

test("versions come from the other relay, and the worker returns to the first", live, async () => {
  await using publisher = await Publisher.relays();
  const relays = publisher.address.split(",");
  const w = new Float32Array(2 ** 20);
  await using worker = await Worker.connect(relays, { models: { m: { w } }, ...QUICK });
  const comes = async (value: number, from = "") => {
    await publisher.ask({ do: "publish", value, size: w.length });
    assert.equal((await worker.receive(SOON))?.version, value);
    assert.deepEqual([w.at(-1), worker.address], [value, from]);
  };
  await comes(1, relays[0]);
  for (const [command, from] of [
    ["close", relays[1]],
    ["start", relays[0]],
  ]) {
    const joined = once(worker, "joined");
    await publisher.ask({ do: command, relay: 0 });
    await joined;
    await comes((worker.running("m")?.version ?? 0) + 1, from);
  }
});

test("each address has its own keys, and a wrong one sends the worker on", live, async () => {
  const home = mkdtempSync(join(tmpdir(), "failover-"));
  const folders = ["a", "b"].map((name) => join(home, name));
  const start = (keys = "") => Publisher.start(undefined, { keys, names: ["w"] });
  await using first = await start(folders[0]);
  await using last = await start(folders[1]);
  const addresses = [first.address, last.address];
  const [a = "", b = ""] = folders.map((folder) => join(folder, "workers", "w.json"));
  const wrong = await Worker.connect(addresses, { models: ["m"], keys: b, ...QUICK });
  assert.equal(wrong.address, last.address);
  await wrong.close();
  await using worker = await Worker.connect(addresses, { models: ["m"], keys: [a, b], ...QUICK });
  assert.equal(worker.address, first.address);
  await first.kill();
  await last.workers(1);
  await last.publish(5, { require: 0, wait: "none" });
  assert.equal((await worker.receive(SOON))?.version, 1);
  assert.equal(worker.address, last.address);
  rmSync(home, { recursive: true });
});
