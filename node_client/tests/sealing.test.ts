/** What a worker with keys takes, and what it does not; and one without. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { decode } from "../src/headers.js";
import { Keyring } from "../src/keyring.js";
import { asked, Bench, kinds, sent } from "./bench.js";
import { bytesOf, type Frames, header, Published } from "./published.js";
import { Sealer } from "./sealed.js";

const DATA = Buffer.from("m/dat");

function version(number: number, chunks = 3, options = {}): Published {
  return new Published(7, number, bytesOf(4 * chunks, number), options);
}

/** A worker with keys, in a session in which it was told a group key. */
class Keyed extends Bench {
  readonly sealer = new Sealer();

  constructor() {
    super({ inside: false, keyring: new Keyring() });
    this.machine.helloIfOutside(this.now);
    this.control(this.sealer.welcome(7));
  }

  /** Receive a published payload as the stream does, some bytes at a time. */
  receive(frames: Frames, piece = 3): ReturnType<Bench["publish"]> {
    const [head = new Uint8Array(), payload = new Uint8Array()] = frames;
    const lease = this.machine.place([DATA, head], payload.length);
    for (let at = 0; lease?.live && at < payload.length; at += piece) {
      const bytes = payload.subarray(at, at + piece);
      lease.room(piece).set(bytes);
      lease.received(bytes.length);
    }
    return this.publish([head, lease?.live ? lease.bytes : new Uint8Array()]);
  }
}

function assertNone(bench: Bench): void {
  assert.equal(bench.ready, null);
}

function damaged([head = new Uint8Array(), payload = new Uint8Array()]: Frames): Frames {
  return [head, payload.map((byte, index) => (index === 1 ? byte ^ 1 : byte))];
}

test("what is pushed sealed is opened in its place, and reported with its digest", () => {
  const bench = new Keyed();
  const [one, two] = [version(1), version(2)];
  const [announce = [], ...rest] = bench.sealer.all(one);
  bench.receive(announce);
  for (const frames of rest) frames.length > 1 ? bench.receive(frames) : bench.publish(frames);
  assert.deepEqual(bench.ready?.data, one.data);
  assert.equal(sent(bench.apply(), "applied")[0]?.digest, one.digest);
  for (const frames of bench.sealer.all(two)) bench.publish(frames); // not in their place
  assert.deepEqual(bench.ready?.data, two.data);
});

test("so is what is fetched, and a version in one message", () => {
  const bench = new Keyed();
  const [one, two] = [version(1), version(2, 1)];
  const fetched = bench.control(bench.sealer.announce(one));
  assert.deepEqual(asked(fetched), [0, 1, 2]);
  for (const index of [2, 0, 1]) bench.control(bench.sealer.chunk(one, index));
  bench.control(one.say("end")); // in the clear, on a connection that is not
  assert.deepEqual(bench.ready?.data, one.data);
  bench.publish(bench.sealer.message(bench.sealer.announce(two))); // its layout is known then
  bench.apply();
  const three = new Published(
    7,
    3,
    two.data.map((byte) => byte ^ 255),
  );
  bench.receive(bench.sealer.whole(three));
  assert.deepEqual(bench.ready?.data, three.data);
});

test("a chunk that is forged is dropped and fetched, however it comes", () => {
  const bench = new Keyed();
  const one = version(1);
  bench.publish(bench.sealer.message(bench.sealer.announce(one)));
  const effects = bench.receive(damaged(bench.sealer.chunk(one, 0)));
  effects.push(...bench.publish(damaged(bench.sealer.chunk(one, 1))));
  const moved = [bench.sealer.chunk(one, 2)[0], bench.sealer.chunk(one, 1)[1]] as Frames;
  effects.push(...bench.receive(moved));
  const other = new Sealer("cd".repeat(32)).chunk(one, 2);
  effects.push(...bench.receive([bench.sealer.chunk(one, 2)[0], other[1]] as Frames));
  effects.push(...bench.publish(bench.sealer.message(one.say("end"))));
  assertNone(bench);
  assert.deepEqual(new Set(asked(effects)), new Set([0, 1, 2]));
  for (const index of [0, 1, 2]) bench.control(bench.sealer.chunk(one, index));
  assert.deepEqual(bench.ready?.data, one.data);
});

test("a version in one message that is forged is fetched, and a layout asked for again", () => {
  const bench = new Keyed();
  const [one, two] = [version(1, 1), version(2, 1)];
  for (const frames of bench.sealer.all(one)) bench.publish(frames);
  bench.apply();
  assert.deepEqual(asked(bench.receive(damaged(bench.sealer.whole(two)))), [0]);
  bench.control(bench.sealer.chunk(two, 0));
  assert.deepEqual(bench.ready?.data, two.data);
  const three = version(3, 2); // of another layout
  assert.deepEqual(bench.control(damaged(bench.sealer.announce(three))), []);
  bench.publish(bench.sealer.message(bench.sealer.announce(three, false)));
  const [ping] = sent(bench.wait(1100), "ping").slice(-1);
  bench.control([header("pong", { token: ping?.token, epoch: 7, models: {} })]);
  assert.equal(
    sent(bench.wait(100), "fetch").some(({ layout }) => layout),
    true,
  );
  bench.control(bench.sealer.announce(three));
  bench.control(three.say("end"));
  for (const index of [0, 1]) bench.control(bench.sealer.chunk(three, index));
  assert.deepEqual(bench.ready?.data, three.data);
});

test("nothing counts that is not sealed, and a version in the clear is declined", () => {
  const bench = new Keyed();
  const one = version(1);
  bench.push(one);
  bench.publish([header("refuse", { code: "revoked", text: "" })]);
  bench.publish([header("ping", {})]);
  assertNone(bench);
  assert.ok(bench.machine.inSession);
  for (const withLayout of [true, false]) {
    const [failed] = sent(bench.control(one.announce(withLayout)), "failed");
    assert.equal(failed?.code, "unsupported");
  }
  bench.control(bench.sealer.announce(one));
  for (const index of [0, 1, 2]) assert.deepEqual(bench.control(one.chunk(index)), []);
  bench.control(one.say("end"));
  assertNone(bench); // chunks in the clear are none
});

test("a replay is none, in a later session neither, and what is forged does not count up", () => {
  const bench = new Keyed();
  const { sealer } = bench;
  const beacon = (number: number, count?: number) =>
    sealer.message(version(number).say("beacon"), count);
  bench.publish(beacon(1, 5));
  const asks = (frames: Frames) => {
    bench.now += 1000;
    return sent(bench.publish(frames), "fetch").length;
  };
  assert.equal(asks(beacon(2, 5)), 0);
  assert.equal(asks(beacon(2, 4)), 0);
  const [forged = new Uint8Array()] = beacon(2, 9);
  const text = Buffer.from(forged).toString().replace('"count":9', '"count":900');
  assert.equal(asks([Buffer.from(text)]), 0);
  assert.equal(asks(beacon(2, 6)), 1);
  bench.control([header("refuse", { code: "unknown-worker", text: "" })]);
  bench.control(sealer.welcome(7));
  assert.equal(asks(beacon(3, 6)), 0);
  assert.equal(asks(beacon(3, 7)), 1);
});

test("two keys are held while one takes the place of another, then one alone", () => {
  const bench = new Keyed();
  const [old, fresh] = [bench.sealer, new Sealer("cd".repeat(32))];
  bench.control([header("rekey", { epoch: 7, keys: [fresh.hex] })]);
  for (const frames of old.all(version(1))) bench.publish(frames);
  assert.equal(bench.ready?.version, 1);
  for (const frames of fresh.all(version(2))) bench.publish(frames);
  assert.equal(bench.ready?.version, 2);
  for (let at = 0; at < 5; at++) {
    bench.control([header("rekey", { epoch: 7, keys: [fresh.hex] })]); // again: no other end
    bench.wait(1000);
  }
  for (const frames of old.all(version(3))) bench.publish(frames);
  assert.equal(bench.ready?.version, 2, "the old key is forgotten");
});

test("a key that is told before one that is here is older, and does not come back", () => {
  const bench = new Keyed();
  const [old, fresh] = [bench.sealer, new Sealer("cd".repeat(32))];
  const both = [old.hex, fresh.hex];
  const asks = (from: Sealer, number: number, count: number) => {
    bench.now += 300;
    return sent(bench.publish(from.message(version(number).say("beacon"), count)), "fetch").length;
  };
  const pass = () => {
    for (let at = 0; at < 6; at++) {
      bench.control([header("pong", { epoch: 7, models: {} })]);
      bench.wait(1000);
    }
  };
  bench.control([header("rekey", { epoch: 7, keys: both })]);
  assert.equal(asks(fresh, 1, 7), 1);
  for (const number of [2, 3]) {
    pass();
    bench.control(fresh.welcome(7, both));
    assert.equal(asks(old, number, number), 0);
    assert.equal(asks(fresh, number, 7), 0, "a replay");
  }
  assert.equal(asks(fresh, 2, 8), 1);
});

test("of two keys of a welcome the older one counts for a while", () => {
  const keyring = new Keyring();
  const [old, fresh] = [new Sealer(), new Sealer("cd".repeat(32))];
  const opens = (from: Sealer) =>
    keyring.published(decode(from.message(version(1).say("beacon")))) !== null;
  keyring.begin([old.hex, fresh.hex], 5000);
  assert.ok(opens(old) && opens(fresh));
  keyring.lacks(5000);
  assert.ok(!opens(old) && opens(fresh));
});

test("the older key ends outside of a session, too", () => {
  const bench = new Keyed();
  const [old, fresh] = [bench.sealer, new Sealer("cd".repeat(32))];
  bench.control([header("rekey", { epoch: 7, keys: [fresh.hex] })]);
  bench.control([header("refuse", { code: "revoked", text: "" })]);
  bench.now += 5000;
  const said = decode(old.message(version(1).say("beacon")));
  assert.notEqual(bench.machine.keyring?.published(said, false), null);
  bench.machine.tick(bench.now);
  assert.ok(!bench.machine.inSession);
  assert.equal(bench.machine.keyring?.published(said, false), null);
});

test("a pushed chunk of what does not arrive is neither news nor a sign of life", () => {
  for (const keyed of [true, false]) {
    const bench = keyed ? new Keyed() : new Bench();
    const sealer = new Sealer();
    bench.publish(keyed ? sealer.message(version(0).say("beacon")) : version(0).say("beacon"));
    const forged = sealer.chunk(version(2 ** 53 - 1), 0);
    for (const waited of [1000, 3900]) {
      bench.now += waited;
      assert.deepEqual(bench.publish(forged), []);
      assert.ok(bench.machine.inSession);
    }
    bench.now += 100;
    bench.machine.tick(bench.now);
    assert.ok(!bench.machine.inSession);
  }
  const bench = new Keyed();
  assert.equal(sent(bench.control(bench.sealer.chunk(version(3), 0)), "fetch").length, 1);
});

test("whoever lacks a key says hello, now and then, and fetches what it has missed", () => {
  const bench = new Keyed();
  const fresh = new Sealer("cd".repeat(32));
  for (const frames of fresh.all(version(1))) bench.publish(frames);
  assertNone(bench);
  assert.equal(sent(bench.wait(200), "hello").length, 0, "the last one was a moment ago");
  assert.equal(sent(bench.wait(200), "hello").length, 1);
  assert.equal(sent(bench.wait(1000), "hello").length, 0, "nothing more came");
  const [head = new Uint8Array()] = fresh.welcome(7);
  const fields = { ...JSON.parse(Buffer.from(head).toString()), models: { m: 1 } };
  assert.equal(sent(bench.control([header("welcome", fields)]), "fetch").length, 1);
  bench.control(fresh.announce(version(1)));
  bench.control(version(1).say("end"));
  for (const index of [0, 1, 2]) bench.control(fresh.chunk(version(1), index));
  assert.equal(bench.ready?.version, 1);
});

test("a worker without keys passes over what is sealed", () => {
  const bench = new Bench();
  const sealer = new Sealer();
  for (const frames of sealer.all(version(1))) bench.publish(frames);
  bench.control([header("rekey", { epoch: 7, keys: [sealer.hex] })]);
  assert.deepEqual(asked(bench.control(sealer.chunk(version(1), 0))), []);
  assertNone(bench);
  assert.equal(bench.machine.malformed, 0);
  const [failed] = sent(bench.control(sealer.announce(version(1), false)), "failed");
  assert.equal(failed?.code, "unsupported");
  bench.push(version(2));
  assert.equal(bench.ready?.version, 2);
});

test("a ticket is for one connection, and whoever has none says hello for another", () => {
  const bench = new Keyed();
  const [one, two] = ["1", "2"].map((digit) => `ticket.${digit.repeat(32)}`);
  const connect = (features: string[]) => {
    const effects = bench.control(bench.sealer.welcome(7, [bench.sealer.hex], features));
    return effects.flatMap((effect) => (effect.do === "connect" ? [effect.ticket] : []));
  };
  assert.deepEqual(connect([one ?? ""]), ["1".repeat(32)]);
  assert.deepEqual(connect(["upstream.0", two ?? ""]), ["2".repeat(32)]);
  assert.deepEqual(connect(["ticket.nonsense"]), []);
  bench.now += 1000;
  assert.deepEqual(kinds(bench.machine.withoutTicket(bench.now)), ["hello"]);
  assert.deepEqual(kinds(bench.machine.withoutTicket(bench.now)), [], "not all the time");
});

test("whoever is shut out tells it, and dials anew, and again", () => {
  const bench = new Keyed();
  for (const time of [0, 1]) {
    bench.now += time;
    const effects = bench.machine.shutOut("no key", bench.now);
    assert.deepEqual(effects, [{ do: "refused", code: "keys", text: "no key" }]);
    assert.deepEqual(bench.machine.shutOut("no key", bench.now), []);
    assert.ok(!bench.machine.inSession);
    const dialled = () => kinds(bench.wait(500)).filter((kind) => kind === "redial").length;
    assert.deepEqual([dialled(), dialled(), dialled()], [0, 1, 0]);
  }
  bench.machine.shutOut("no key", bench.now);
  bench.control(bench.sealer.welcome(7)); // the connection was good after all
  assert.ok(!kinds(bench.wait(2000)).includes("redial"));
});

test("refusals for want of rights end the session, and it goes on asking", () => {
  for (const code of ["revoked", "wrong-name", "not-allowed"]) {
    const bench = new Keyed();
    const effects = bench.control([header("refuse", { code, text: "no" })]);
    assert.deepEqual(effects, [{ do: "refused", code, text: "no" }]);
    assert.ok(!bench.machine.inSession);
    assert.ok(kinds(bench.wait(1000)).includes("hello"));
  }
});
