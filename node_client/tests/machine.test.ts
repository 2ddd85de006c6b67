/** What a worker does beyond the sequences of the golden vectors: memory, leases, and rare turns. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { asked, Bench, kinds, sent } from "./bench.js";
import { bytesOf, header, Published, welcome } from "./published.js";

function version(number: number, chunks = 3, options = {}): Published {
  return new Published(7, number, bytesOf(4 * chunks, number), options);
}

test("a pushed version is ready, applied, and reported", () => {
  const bench = new Bench();
  assert.ok(kinds(bench.push(version(1))).includes("ready"));
  assert.deepEqual(bench.ready?.data, version(1).data);
  assert.equal(bench.machine.running("m"), null, "nobody has applied it yet");
  const [applied] = sent(bench.apply(), "applied");
  assert.equal(applied?.digest, version(1).digest);
  assert.equal(bench.machine.running("m")?.version, 1);
});

test("a version that nobody applies is replaced by a newer one", () => {
  const bench = new Bench();
  for (let number = 1; number <= 20; number++) bench.push(version(number));
  assert.deepEqual(bench.ready?.data, version(20).data);
  assert.equal(sent(bench.apply(), "applied")[0]?.version, 20);
  assert.deepEqual(bench.apply(), [], "there is nothing more");
});

test("buffers are used again", () => {
  const bench = new Bench();
  const seen = new Set<ArrayBufferLike | undefined>();
  for (let number = 1; number <= 20; number++) {
    bench.push(version(number));
    seen.add(bench.ready?.data.buffer);
    if (number % 3) bench.apply();
  }
  assert.equal(seen.size, 2);
});

test("memory that a user keeps is not used again", () => {
  const bench = new Bench();
  bench.push(version(1));
  const data = bench.machine.takeReady("m")?.data;
  bench.machine.applied("m", bench.now, true);
  for (let number = 2; number <= 9; number++) {
    bench.push(version(number));
    assert.notEqual(bench.ready?.data.buffer, data?.buffer);
    bench.apply();
  }
  assert.deepEqual(data, version(1).data);
});

test("a third version waits for a buffer", () => {
  const bench = new Bench();
  bench.push(version(1));
  bench.push(version(2, 3, { commit: "together" }));
  bench.publish(version(3).announce());
  assert.deepEqual(asked(bench.control(version(3).announce())), [], "both buffers are in use");
  const versions = bench.machine.followers.get("m")?.versions;
  assert.equal(versions?.inPhase("announced")?.lacks, "buffer");
  bench.control(version(2).say("commit"));
  assert.equal(bench.ready?.version, 2);
  assert.deepEqual(asked(bench.wait(500)), [0, 1, 2]);
  assert.equal(versions?.inPhase("arriving")?.lacks, "memory", "which it has now");
});

test("an older announcement does not replace a newer one", () => {
  const bench = new Bench();
  bench.publish(version(2).announce(false)); // it waits for its layout
  assert.deepEqual(kinds(bench.publish(version(1).announce())), []);
  const [announce = header("announce")] = version(1).announce(false);
  assert.deepEqual(sent(bench.publish([announce, Buffer.from("no layout")]), "failed"), []);
  const waiting = bench.machine.followers.get("m")?.versions.inPhase("announced");
  assert.equal(waiting?.version, 2);
});

test("a payload is received in its place, and the place is given back", () => {
  const bench = new Bench();
  const one = version(1);
  bench.publish(one.announce());
  const [head = new Uint8Array()] = one.chunk(0);
  const lease = bench.machine.place([Buffer.from("m/dat"), head], 4);
  assert.ok(lease?.live);
  bench.publish(version(2).announce()); // replaces it
  assert.ok(!lease.live, "nobody may write there any more");
  const other = bench.machine.place([Buffer.from("m/dat"), version(2).chunk(0)[0] ?? head], 4);
  assert.ok(other?.live);
  assert.notEqual(
    other.bytes.buffer,
    lease.bytes.buffer,
    "the kernel may still write into the first",
  );
});

test("what belongs nowhere has no place", () => {
  const bench = new Bench();
  const one = version(1);
  const place = (frames: Uint8Array[], size: number) =>
    bench.machine.place([Buffer.from("m/x"), frames[0] ?? new Uint8Array()], size);
  assert.equal(place(one.chunk(0), 4), null, "not announced");
  bench.publish(one.announce());
  assert.equal(place(one.chunk(0), 5), null, "of another size");
  assert.equal(place(one.chunk(7), 4), null, "no such chunk");
  assert.equal(place(new Published(8, 1, one.data).chunk(0), 4), null, "of another epoch");
  assert.equal(place([header("ping")], 4), null, "no payload at all");
  assert.equal(place(version(2).announce(), 9), null, "no layout of that size");
  assert.equal(place(version(2).announce(), one.layout.length)?.bytes.length, one.layout.length);
});

test("a whole version has a place if its length is right", () => {
  const bench = new Bench();
  const one = version(1, 1);
  const [head = new Uint8Array()] = one.whole();
  const topic = Buffer.from("m/ctl");
  assert.equal(bench.machine.place([topic, head], 5), null);
  assert.equal(bench.machine.place([topic, head], 4)?.bytes.length, 4);
});

test("no memory is a refusal, and not the end", () => {
  const bench = new Bench({ bytesMax: 2 ** 53 });
  const nbytes = 2 ** 46; // more than an array can have
  const layout = { w: { dtype: "U8", shape: [nbytes], data_offsets: [0, nbytes] } };
  const huge = new Published(7, 1, new Uint8Array(0), { chunkBytes: 2 ** 26 });
  Object.assign(huge, {
    layout: Buffer.concat([Buffer.alloc(8), Buffer.from(JSON.stringify(layout))]),
  });
  Buffer.from(huge.layout.buffer).writeBigUInt64LE(
    BigInt(huge.layout.length - 8),
    huge.layout.byteOffset,
  );
  const [failed] = sent(bench.publish(huge.announce(true, { nbytes })), "failed");
  assert.equal(failed?.code, "no-memory");
  bench.push(version(2));
  assert.equal(bench.ready?.version, 2);
});

test("what failed to be applied is not tried again, and its report is repeated", () => {
  const bench = new Bench();
  bench.push(version(1));
  bench.apply();
  bench.push(version(2));
  bench.machine.takeReady("m");
  const [failed] = sent(bench.machine.failed("m", "it hurts", bench.now), "failed");
  assert.equal(failed?.text, "it hurts");
  bench.push(version(2));
  assert.equal(bench.ready, null);
  assert.equal(sent(bench.wait(1000), "failed").length, 1);
  assert.equal(bench.machine.running("m")?.version, 1);
  bench.push(version(3));
  assert.equal(sent(bench.wait(1000), "failed").length, 0, "it is out of date");
});

test("silence is loss", () => {
  const bench = new Bench();
  bench.machine.tick(bench.now + 4900);
  assert.ok(bench.machine.inSession);
  assert.deepEqual(kinds(bench.machine.tick(bench.now + 5000)), ["lost", "redial"]);
  assert.ok(!bench.machine.inSession);
  assert.deepEqual(
    kinds(bench.machine.helloIfOutside(bench.now + 5000)),
    ["hello"],
    "it joins again",
  );
});

test("who hears nothing published is told so, once in a session", () => {
  for (const published of [false, true]) {
    const bench = new Bench();
    if (published) bench.publish([header("beacon", { model: "m", epoch: 7, version: 0 })]);
    const notices: string[] = [];
    for (let second = 0; second < 20; second++) {
      bench.control([header("pong", { epoch: 7 })]);
      notices.push(...bench.wait(1000).flatMap((e) => (e.do === "notice" ? [e.code] : [])));
    }
    assert.deepEqual(notices, published ? [] : ["nothing-published"]);
  }
});

test("whoever gets no answer calls again on new connections", () => {
  const bench = new Bench({ inside: false });
  const { machine } = bench;
  assert.deepEqual(machine.tick(200_000), [], "nobody was there to say hello to");
  machine.helloIfOutside(200_000);
  machine.helloIfOutside(204_000); // said again, on the same connection
  assert.deepEqual(machine.tick(204_900), []);
  assert.deepEqual(kinds(machine.tick(205_000)), ["redial"]);
  assert.deepEqual(machine.tick(211_000), [], "the new connection is not there yet");
  machine.helloIfOutside(212_000);
  bench.control([header("refuse", { code: "name-taken", text: "why" })]);
  assert.deepEqual(machine.tick(217_000), [], "it is refused, which is an answer");
});

test("a connection that was given up is made anew though no hello could be said", () => {
  const { machine } = new Bench({ inside: false });
  assert.deepEqual(machine.tick(200_000), [], "a name is being looked up");
  machine.changed(200_000);
  machine.changed(203_000);
  assert.deepEqual(machine.tick(207_900), [], "ZeroMQ is trying");
  assert.deepEqual(kinds(machine.tick(208_000)), ["redial"]);
  assert.deepEqual(machine.tick(300_000), [], "the new connection has not been tried yet");
  machine.changed(300_000);
  assert.deepEqual(kinds(machine.tick(305_000)), ["redial"]);
});

test("a control connection that broke ends the session if nothing comes of it", () => {
  const bench = new Bench();
  const { machine } = bench;
  machine.changed(bench.now);
  for (let second = 0; second < 5; second++) {
    assert.ok(!kinds(machine.tick(bench.now)).includes("redial"));
    bench.now += 1_000;
    bench.publish([header("beacon", { model: "m", epoch: machine.epoch, version: 0 })]);
  }
  assert.deepEqual(kinds(machine.tick(bench.now)), ["lost", "redial"]);
});

test("after a long silence of everybody it greets again and goes on where it was", () => {
  const bench = new Bench();
  const one = version(1);
  bench.publish(one.announce());
  bench.publish(one.chunk(0));
  bench.now += 60_000; // somebody blocked the event loop
  assert.ok(kinds(bench.wait(100)).includes("lost"));
  assert.ok(kinds(bench.wait(300)).includes("hello"));
  assert.deepEqual(asked(bench.control(welcome(7, { m: 1 }))), []);
  assert.deepEqual(asked(bench.wait(100)), [1, 2], "chunk 0 has been here");
});

test("what was applied late, of a later publisher, is told until that is settled", () => {
  const bench = new Bench();
  bench.push(version(1));
  bench.machine.takeReady("m");
  bench.control(welcome(6));
  assert.equal(bench.machine.epoch, 6);
  bench.machine.applied("m", bench.now);
  for (let n = 0; n < 3; n++) assert.ok(kinds(bench.wait(300)).includes("hello")); // one may be lost
  bench.control(welcome(8));
  assert.ok(!kinds(bench.wait(300)).includes("hello"));
});

test("a message of a stranger's frames changes nothing", () => {
  const bench = new Bench();
  for (const frames of [
    [],
    [new Uint8Array()],
    [header("welcome")],
    [header("chunk"), new Uint8Array()],
  ]) {
    assert.deepEqual(bench.control(frames), []);
  }
  assert.equal(bench.machine.malformed, 4);
});
