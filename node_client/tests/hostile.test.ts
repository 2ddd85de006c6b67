/**
 * A publisher that means harm, without keys: it takes neither memory nor time beyond bounds, has the
 * worker connect nowhere else, shows no words of its own, and ends nothing.
 */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { once } from "node:events";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { Worker } from "../src/index.js";
import { LAYOUT_BYTES_GUARANTEED, NAMES_GUARANTEED } from "../src/limits.js";
import { EPOCH, endless, Hostile, Port, pings } from "./hostile.js";
import { layoutOf, Published } from "./published.js";
import { frame, GREETING, message, READY } from "./streams.js";
import { Victim } from "./victims.js";

const deadline = { timeout: 120_000 };
// Memory is measured on Linux alone.
const measured = { ...deadline, skip: process.platform !== "linux" };
const MB = 1e6;
const BYTES_MAX = 1_000_000;
const ROOM = 24 * MB; // twice `bytesMax`, what is free of a layout and its names, and the heap's own ups and downs
const STOOD_MS = 1_000; // far less than `lostAfter`, on a busy machine
const RAW = "\x1b[2J\r\nFAKE\u202e\u200b\x07\x9b\u2028\x7f";

/** A folder for sockets. */
function folder() {
  const home = mkdtempSync(join(tmpdir(), "hostile-"));
  return { home, [Symbol.dispose]: () => rmSync(home, { recursive: true }) };
}

/** Start both, and have the worker join. */
async function joined(path?: string, options: object = { bytesMax: BYTES_MAX }) {
  const hostile = await Hostile.start(path);
  // Nobody answers its pings, and machines may be busy.
  const victim = new Victim(hostile.address, { lostAfter: 60_000, ...options });
  await hostile.welcome();
  await victim.tells("joined");
  const calm = await victim.memory();
  return {
    ...{ hostile, victim, calm },
    async [Symbol.asyncDispose]() {
      victim[Symbol.dispose]();
      await hostile[Symbol.asyncDispose]();
    },
  };
}

/** Say that a version of no bytes has a layout. */
function announce(layout: Uint8Array, nbytes = 0) {
  const id = createHash("sha256").update(layout).digest("hex");
  const of = { model: "m", epoch: EPOCH, version: 1, layout: id, layout_bytes: layout.length };
  const how = { nbytes, chunk_bytes: 1024, commit: "auto", acknowledge: "applied" };
  return { type: "announce", ...of, ...how, encoding: "raw" };
}

for (const transport of ["tcp", "ipc"]) {
  test(`a message without an end is hung up on, over ${transport}`, measured, async () => {
    using place = folder();
    const path = transport === "ipc" ? join(place.home, "s") : undefined;
    await using both = await joined(path);
    const { hostile, victim, calm } = both;
    const peers = hostile.control.peers.length;
    const said = await hostile.control.flood(endless(16, 60_000), 300 * MB);
    assert.ok(said < 100 * MB, `${said} bytes were taken`);
    const took = (await victim.memory()) - calm;
    assert.ok(took < ROOM, `${took} bytes more`);
    await hostile.welcomeBack();
    assert.ok(hostile.control.peers.length > peers && victim.alive);
  });
}

test("what nobody asked for is not kept, on either channel", measured, async () => {
  await using both = await joined();
  const { hostile, victim, calm } = both;
  const chunk = { type: "chunk", model: "m", epoch: EPOCH, version: 9, index: 0, crc: 0 };
  const payload = Buffer.alloc(64 * MB);
  hostile.say(chunk, payload);
  hostile.say({ ...announce(payload), whole: { crc: 0, digest: "0".repeat(64) } }, payload);
  await hostile.data.hears("m/ctl");
  hostile.publish("m/dat", chunk, payload);
  hostile.publish("m/ctl", announce(payload), payload);
  hostile.say({ type: "ping", token: 987654327 });
  await hostile.control.hears('"token":987654327');
  await victim.tells("failed"); // the layout is too large
  const took = (await victim.memory()) - calm;
  assert.ok(took < ROOM, `${took} bytes more`);
});

const EMPTY = (name: string) => `"${name}":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}`;

/** Return the JSON of so many names. */
function named(count: number, entry: (index: number) => string): string {
  return Array.from({ length: count }, (_, index) => entry(index)).join(",");
}

const tensors = (count: number) => `{${named(count, (i) => EMPTY(`t${i}`))}}`;
const texts = (count: number) => `{"__metadata__":{${named(count, (i) => `"${i}":""`)}}}`;

const LAYOUTS: [what: string, layout: Uint8Array, options: object, words: RegExp][] = [
  [
    "of 50 MB",
    layoutOf(tensors(840_000)),
    { bytesMax: BYTES_MAX },
    /a layout of \d+ bytes; this worker accepts at most 1048576: raise its bytesMax/,
  ],
  [
    "of many names of metadata",
    layoutOf(texts(90_000)),
    { bytesMax: BYTES_MAX },
    new RegExp(`a layout of more than ${NAMES_GUARANTEED} names .*raise its bytesMax`),
  ],
  [
    "of 50 MB, for memory of 16 bytes",
    layoutOf(tensors(840_000)),
    { small: true },
    /a layout of \d+ bytes; layouts of this worker's model have at most \d+: do the names of its tensors differ/,
  ],
];
for (const [what, layout, options, words] of LAYOUTS) {
  test(`a layout ${what} is declined before it is understood`, measured, async () => {
    await using both = await joined(undefined, options);
    const { hostile, victim, calm } = both;
    hostile.say(announce(layout), layout);
    assert.match(await victim.tells("failed"), words);
    const took = (await victim.memory()) - calm;
    assert.ok(took < ROOM, `${took} bytes more`);
    assert.ok(victim.stood < STOOD_MS, `it stood for ${victim.stood} ms`);
  });
}

test("a layout that is free is taken, however little a version may be", measured, async () => {
  await using both = await joined(undefined, { bytesMax: 0 });
  const layout = layoutOf(tensors(NAMES_GUARANTEED));
  assert.ok(layout.length < LAYOUT_BYTES_GUARANTEED);
  const { hostile, victim } = both;
  hostile.say(announce(layout), layout);
  await hostile.control.hears('"type":"fetch"');
  const end = { type: "end", model: "m", epoch: EPOCH, version: 1 };
  hostile.say({ ...end, digest: new Published(EPOCH, 1, new Uint8Array()).digest });
  hostile.say({ type: "ping", token: 987654329 });
  await hostile.control.hears('"token":987654329');
  assert.ok(victim.events.every(([event]) => event !== "failed"));
});

test("pongs that nobody reads are bounded, and so are pings", measured, async () => {
  await using both = await joined();
  const { hostile, victim, calm } = both;
  await hostile.data.hears("m/ctl");
  hostile.data.peers.at(-1)?.pause();
  const said = await hostile.data.flood(pings(2000), 100 * MB);
  assert.ok(said < 20 * MB, `${said} bytes were taken`);
  const took = (await victim.memory()) - calm;
  assert.ok(took < ROOM, `${took} bytes more`);
});

test("data elsewhere is not connected to, and that is told", deadline, async () => {
  using place = folder();
  await using hostile = await Hostile.start();
  await using secret = await Port.open(Buffer.concat([GREETING, READY]), join(place.home, "s"));
  const worker = new Worker(hostile.address, { models: ["m"] });
  const notice = once(worker, "notice");
  await hostile.welcome({ data: secret.address });
  const [code, text] = await notice;
  assert.equal(code, "no-data");
  assert.match(text, /is not on the host of its control address .*`anyDataHost: true`/);
  hostile.say({ type: "ping", token: 987654328 });
  await hostile.control.hears('"token":987654328');
  assert.equal(secret.peers.length, 0);
  await worker.close();
  const trusting = new Worker(hostile.address, { models: ["m"], anyDataHost: true });
  await hostile.welcome({ data: secret.address });
  await secret.hears("m/ctl");
  await trusting.close();
});

/** Return what a worker says of a publisher's words: errors and notices. */
async function told(talk: (hostile: Hostile) => Promise<void> | void, data?: string) {
  await using hostile = await Hostile.start();
  await using worker = new Worker(hostile.address, { models: { m: { w: new Float32Array(1) } } });
  const said = Promise.race([
    once(worker, "refused").then(([error]) => error),
    once(worker, "failed").then(([error]) => error),
    once(worker, "notice").then(([, text]) => new Error(text)),
  ]);
  await hostile.welcome(data === undefined ? {} : { data });
  await talk(hostile);
  const { message, reason = message } = (await said) as Error & { reason?: string };
  return [message, reason];
}

const bad = JSON.stringify(RAW).slice(1, -1);
const WORDS: Record<string, [(hostile: Hostile) => Promise<void> | void, data?: string]> = {
  "a refusal": [(hostile) => hostile.say({ type: "refuse", code: "limit", text: RAW })],
  "a refusal of one message": [(hostile) => hostile.say({ type: "refuse", code: "x", text: RAW })],
  "what is gone": [(hostile) => hostile.say({ type: "refuse", code: "gone", text: RAW })],
  "a tensor's name": [(hostile) => sayLayout(hostile, `{${EMPTY(bad)}}`)],
  "a name that occurs twice": [(hostile) => sayLayout(hostile, `{${EMPTY(bad)},${EMPTY(bad)}}`)],
  "a field": [(hostile) => sayLayout(hostile, `{"t":{"${bad}":1}}`)],
  "a dtype": [(hostile) => sayLayout(hostile, `{${EMPTY("t").replace("F32", bad)}}`)],
  "a name of no data": [(hostile) => sayLayout(hostile, `{${EMPTY(bad).replace("0,0]", "0,1]")}}`)],
  "a name in the wrong place": [
    (hostile) => sayLayout(hostile, `{${EMPTY(bad).replace("0,0]", "1,1]")}}`),
  ],
  "the address of the data": [() => {}, `ipc://${RAW.replace(/\s/g, "")}`],
  "no address of the data": [() => {}, RAW],
};
function sayLayout(hostile: Hostile, json: string): void {
  const layout = layoutOf(json);
  hostile.say(announce(layout), layout);
}

for (const [what, [talk, data]] of Object.entries(WORDS)) {
  test(`words of the publisher's are printable: ${what}`, deadline, async () => {
    for (const text of await told(talk, data)) {
      const lines = text.split("\n"); // ours, one for each difference
      assert.ok(
        lines.every((line) => !/[^\p{L}\p{M}\p{N}\p{P}\p{S} ]/u.test(line)),
        text,
      );
      assert.ok(!lines.some((line) => line.startsWith("FAKE")), text);
      assert.ok(text.includes("1b[2J"), text); // escaped, and not left out
    }
  });
}

test(
  "so is what an ERROR says on the data connection, and another security",
  deadline,
  async () => {
    const greeting = Buffer.from(GREETING);
    greeting.write(RAW.slice(0, 8), 12, "latin1");
    const error = frame(Buffer.from(`\x05ERROR\x08${RAW.slice(0, 8)}`, "latin1"), 4);
    for (const greets of [greeting, Buffer.concat([GREETING, READY, error])]) {
      await using data = await Port.open(greets);
      const [text = ""] = await told(() => {}, data.address);
      assert.match(text, /^no pushed data, all is fetched: the other side [^\p{C}]*\\x1b\[2J/u);
    }
  },
);

test("a version that is honest is applied after all that", measured, async () => {
  await using both = await joined();
  const { hostile, victim } = both;
  const version = new Published(EPOCH, 3, Buffer.from("honest bytes"), { chunkBytes: 5 });
  await hostile.control.flood(endless(16, 60_000), 100 * MB);
  await hostile.welcomeBack();
  for (const odd of ["", "{", "[]", '{"wbp":1}', '{"wbp":2,"type":"welcome"}', "null", "\xff"]) {
    hostile.control.say(message(Buffer.from(odd, "latin1"), Buffer.from("payload")));
  }
  const chunks = version.crcs.map((_, index) => version.chunk(index));
  for (const frames of [version.announce(), ...chunks, version.say("end")]) {
    hostile.control.say(message(...frames));
  }
  assert.equal(await victim.tells("applied"), "3");
});
