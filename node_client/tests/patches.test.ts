/** Patches at a worker, message by message: taken or given up, and nothing in between. */

import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import type { Effect } from "../src/effects.js";
import { Keyring } from "../src/keyring.js";
import { BUFFERS_MAX } from "../src/limits.js";
import type { Patch } from "../src/messages.js";
import { type Patching, patching } from "../src/patching.js";
import { asked, Bench, DECODE_MS, kinds, sent } from "./bench.js";
import { bytesOf, type Frames, header, Published, PublishedPatch, welcome } from "./published.js";
import { Sealer } from "./sealed.js";

const SIZE = 1000;
const CHUNK_BYTES = 16;

/** A version: few bytes differ from one to the next. */
function version(number: number, options = {}): Published {
  const data = bytesOf(SIZE, 1).map((byte, at) =>
    at < 40 * number && at % 40 === 0 ? ~byte : byte,
  );
  return new Published(7, number, data, { chunkBytes: CHUNK_BYTES, ...options });
}

const [ONE, TWO, THREE, FOUR] = [version(1), version(2), version(3), version(4)];

/** A worker that takes patches, and runs version 1, whose bytes it has kept. */
class Patched extends Bench {
  constructor({ snapshots = false, ...options }: { snapshots?: boolean; patches?: boolean } = {}) {
    super({ bytesMax: 10_000, ...options });
    this.come(ONE);
    this.apply(snapshots);
  }

  /** Publish that there is a version, and perhaps patches to it. */
  tell(of: Published, patches: readonly Patch[] = [], keep = true): Effect[] {
    return this.publish(of.announce(true, { keep, patches }));
  }

  /** Publish all of a version, or of a patch. */
  feed(of: Published | PublishedPatch): Effect[] {
    const end = of instanceof PublishedPatch ? of.end() : of.say("end");
    const chunks = of.crcs.map((_, index) => of.chunk(index));
    return [...chunks, end].flatMap((frames) => this.publish(frames));
  }

  come(of: Published, keep = true): void {
    this.tell(of, [], keep);
    this.feed(of);
  }

  /** Have a version come by a patch; return what is to be decoded. */
  begin(patch: PublishedPatch): Patching {
    this.tell(patch.target, [patch.offered]);
    return jobOf(this.feed(patch));
  }

  /** Have a version come by a patch, and apply it. */
  patch(patch: PublishedPatch): void {
    this.tell(patch.target, [patch.offered]);
    this.decode(this.feed(patch));
    assert.deepEqual(this.ready?.data, patch.target.data);
    this.apply();
  }

  get follower() {
    const follower = this.machine.followers.get("m");
    assert.ok(follower);
    return follower;
  }

  get base(): Uint8Array {
    const { base } = this.follower.versions;
    assert.ok(base);
    return base.data;
  }

  get arriving() {
    const entry = this.follower.versions.inPhase("arriving");
    assert.ok(entry);
    return entry.transfer;
  }

  /** A version comes as a whole, and that works. */
  comesWhole(of: Published): void {
    assert.equal(this.arriving.patch, null);
    this.feed(of);
    assert.deepEqual(this.ready?.data, of.data);
    this.apply();
    assert.equal(this.machine.running("m")?.digest, of.digest);
  }
}

function jobOf(effects: readonly Effect[]): Patching {
  const jobs = effects.flatMap((effect) => (effect.do === "decode" ? [effect.job] : []));
  assert.equal(jobs.length, 1);
  return jobs[0] as Patching;
}

function notices(effects: readonly Effect[]): string[] {
  return effects.flatMap((e) => (e.do === "notice" && e.code === "unpatched" ? [e.text] : []));
}

function topics(effects: readonly Effect[]): string[] {
  return effects.flatMap((e) =>
    e.do === "subscribe" ? [`${e.topic} ${e.on ? "on" : "off"}`] : [],
  );
}

function noPatch(number: number): Frames {
  const about = { model: "m", epoch: 7, version: number };
  return [header("refuse", { code: "no-patch", text: "", ...about })];
}

test("a patch leads to the version, and says so", () => {
  const bench = new Patched();
  const patch = new PublishedPatch(ONE, TWO);
  assert.ok(patch.plan.count < TWO.plan.count / 2);
  const told = bench.tell(TWO, [patch.offered]);
  assert.deepEqual(topics(told), ["m/dat off", "m/dlt on"]);
  const fetches = sent(told, "fetch");
  assert.ok(fetches.length >= 2, "it did not listen, so it fetches");
  for (const fetch of fetches) assert.deepEqual(fetch.patch, patch.id);
  const fed = bench.feed(patch);
  const waited = bench.wait(200);
  assert.deepEqual(
    kinds(waited).filter((kind) => ["fetch", "decode"].includes(kind)),
    [],
    "once",
  );
  bench.decode(fed);
  assert.deepEqual(bench.ready?.data, TWO.data);
  const [applied] = sent(bench.apply(), "applied");
  assert.deepEqual([applied?.digest, applied?.patch], [TWO.digest, patch.id]);
  assert.equal(applied?.decode_us, DECODE_MS * 1000);
  assert.deepEqual(sent(bench.wait(1000), "applied")[0], applied, "it is said again");
});

test("hello names the feature, unless it is turned off: then nothing is kept or taken", () => {
  for (const patches of [true, false]) {
    const bench = new Bench({ inside: false, patches });
    const [hello] = sent(bench.machine.helloIfOutside(bench.now), "hello");
    assert.equal(hello?.features?.includes("delta-1"), patches);
  }
  const bench = new Patched({ patches: false });
  assert.equal(bench.follower.versions.base, null);
  assert.deepEqual(bench.tell(TWO, [new PublishedPatch(ONE, TWO).offered]), []);
  assert.equal(bench.arriving.unpatched, "");
  bench.comesWhole(TWO);
});

test("after the first the next are pushed; and what comes in the other way is fetched", () => {
  const bench = new Patched();
  bench.patch(new PublishedPatch(ONE, TWO));
  assert.deepEqual(bench.tell(THREE, [new PublishedPatch(TWO, THREE).offered]), [], "it listens");
  bench.decode(bench.feed(new PublishedPatch(TWO, THREE)));
  bench.apply();
  const told = bench.tell(FOUR);
  assert.deepEqual(topics(told), ["m/dlt off", "m/dat on"]);
  assert.ok(asked(told).length > 0);
  bench.comesWhole(FOUR);
});

test("a new session asks for the topic that is listened to", () => {
  const bench = new Patched();
  bench.patch(new PublishedPatch(ONE, TWO));
  bench.control([header("refuse", { code: "unknown-worker", text: "" })]);
  assert.deepEqual(topics(bench.control(welcome(7))), ["m/ctl on", "m/dlt on"]);
});

test("a patch that is not the first is fetched", () => {
  const bench = new Patched();
  bench.patch(new PublishedPatch(ONE, TWO));
  const [other, mine] = [new PublishedPatch(ONE, THREE), new PublishedPatch(TWO, THREE)];
  const told = bench.tell(THREE, [other.offered, mine.offered]);
  assert.deepEqual(new Set(sent(told, "fetch").map(({ patch }) => patch?.version)), new Set([2]));
  assert.ok(asked(told).length > 0);
});

test("a patch on anything but what runs is not taken, and why is said", () => {
  const changes = [{ epoch: 6 }, { version: 2 }, { digest: "0".repeat(64) }, { encoding: "x" }];
  for (const change of [...changes, { nbytes: SIZE + 1 }]) {
    const bench = new Patched();
    bench.tell(TWO, [{ ...new PublishedPatch(ONE, TWO).offered, ...change }]);
    assert.match(bench.arriving.unpatched, /^version 1 of epoch 7 runs here; there are patches on/);
    const [end] = sent(bench.wait(300), "fetch").filter(({ count }) => count === 0);
    assert.equal(end?.unpatched, bench.arriving.unpatched);
    assert.equal(end?.patch, undefined);
    bench.comesWhole(TWO);
  }
  const pushed = new Patched();
  pushed.tell(TWO, [{ ...new PublishedPatch(ONE, TWO).offered, version: 2 }]);
  pushed.publish(TWO.chunk(0));
  const [gap] = sent(pushed.publish(TWO.chunk(2)), "fetch");
  assert.equal(gap?.count, 1);
  assert.equal(gap.unpatched, pushed.arriving.unpatched, "no other may be needed");
  const bench = new Patched();
  const layout = { layout: "1".repeat(64) };
  bench.publish(
    TWO.announce(false, { ...layout, patches: [new PublishedPatch(ONE, TWO).offered] }),
  );
  assert.equal(
    bench.follower.versions.inPhase("arriving"),
    null,
    "another layout has to come first",
  );
});

test("what was not kept is not built on", () => {
  const bench = new Patched();
  bench.come(TWO, false);
  bench.apply();
  assert.equal(bench.follower.versions.base, null);
  bench.tell(THREE, [new PublishedPatch(TWO, THREE).offered]);
  assert.match(bench.arriving.unpatched, /its bytes were not kept/);
  bench.comesWhole(THREE);
});

test("a base that was changed is found out, and what ran runs on", () => {
  const bench = new Patched({ snapshots: true });
  assert.equal(
    bench.base.buffer,
    bench.follower.versions.inPhase("running")?.staged.data.buffer,
    "no copy",
  );
  bench.base[7] = 99;
  bench.tell(TWO, [new PublishedPatch(ONE, TWO).offered]);
  const effects = bench.decode(bench.feed(new PublishedPatch(ONE, TWO)));
  assert.match(notices(effects).join(), /version 2 of m .* the patch is for the base/);
  const [end, ...chunks] = sent(effects, "fetch");
  assert.match(end?.unpatched ?? "", /is for the base/);
  assert.deepEqual([end?.count, end?.patch, chunks[0]?.patch], [0, undefined, undefined]);
  assert.equal(chunks[0]?.unpatched, end?.unpatched, "either may get lost");
  assert.equal(bench.machine.running("m")?.version, 1);
  bench.comesWhole(TWO);
});

test("a snapshot that was given to another thread is nothing to build on", () => {
  for (const late of [false, true]) {
    const bench = new Patched({ snapshots: true });
    const job = bench.begin(new PublishedPatch(ONE, TWO));
    const steps = patching(job);
    if (late) steps.next();
    (bench.base.buffer as ArrayBuffer).transfer();
    let step = steps.next();
    while (!step.done) step = steps.next();
    assert.notEqual(step.value, "");
    bench.machine.decoded(job, step.value, DECODE_MS, bench.now);
    bench.comesWhole(TWO);
  }
});

test("a patch that leads elsewhere, or is none, is given up", () => {
  const good = new PublishedPatch(ONE, TWO);
  const spoilt = Buffer.from(good.data);
  spoilt[spoilt.length - 1] = (spoilt.at(-1) ?? 0) ^ 1;
  const faults: [RegExp, PublishedPatch, string][] = [
    [/it leads to/, good, "0".repeat(64)],
    [/the patch leads to/, new PublishedPatch(ONE, TWO, spoilt), TWO.digest],
    [/are not a patch/, new PublishedPatch(ONE, TWO, Buffer.from("no patch")), TWO.digest],
    [
      /follow behind/,
      new PublishedPatch(ONE, TWO, Buffer.concat([good.data, Buffer.from("x")])),
      TWO.digest,
    ],
  ];
  for (const [why, patch, digest] of faults) {
    const bench = new Patched();
    bench.tell(TWO, [patch.offered]);
    for (const index of patch.crcs.keys()) bench.publish(patch.chunk(index));
    const [text = ""] = notices(bench.decode(bench.publish(patch.end(digest))));
    assert.match(text, why);
    assert.deepEqual(bench.base, ONE.data, "what ran is what it was");
    bench.comesWhole(TWO);
    assert.deepEqual(bench.base, TWO.data);
  }
});

test("a patch of which nothing comes is given up after half a minute", () => {
  const bench = new Patched();
  bench.tell(TWO, [new PublishedPatch(ONE, TWO).offered]);
  const begun = bench.now;
  while (bench.arriving.patch !== null && bench.now < begun + 60_000) {
    bench.control([header("pong", { epoch: 7, token: bench.now })]);
    bench.wait(100);
  }
  const seconds = (bench.now - begun) / 1000;
  assert.ok(seconds > 31 && seconds < 34, `${seconds}: ever more patiently, 1, 2, 4, 8 and 16 s`);
  bench.comesWhole(TWO);
});

test("a patch of which something comes now and then is waited for", () => {
  const bench = new Patched();
  const patch = new PublishedPatch(ONE, TWO);
  bench.tell(TWO, [patch.offered]);
  for (let second = 0; second < 100; second++) {
    bench.control([header("pong", { epoch: 7 })]);
    bench.wait(1000);
    if (second % 20 === 0) bench.control(patch.chunk(second / 20));
  }
  assert.deepEqual(bench.arriving.patch, patch.id);
});

test("a patch that the publisher has no more is given up, once", () => {
  const bench = new Patched();
  bench.tell(TWO, [new PublishedPatch(ONE, TWO).offered]);
  assert.deepEqual(bench.control(noPatch(1)), [], "it speaks of another version");
  const refused = bench.control(noPatch(2));
  assert.equal(notices(refused).length, 1);
  assert.equal(asked(refused)[0], 0);
  assert.deepEqual(bench.control(noPatch(2)), [], "it said so of each window that was asked for");
  bench.comesWhole(TWO);
});

test("chunks of the version are none of the patch, and the other way round", () => {
  const bench = new Patched();
  const patch = new PublishedPatch(ONE, TWO);
  bench.tell(TWO, [patch.offered]);
  const [head = new Uint8Array()] = TWO.chunk(0);
  assert.equal(bench.machine.place([Buffer.from("m/dat"), head], CHUNK_BYTES), null);
  assert.deepEqual(bench.feed(TWO), []);
  assert.deepEqual(bench.feed(new PublishedPatch(THREE, TWO, patch.data)), [], "of another base");
  assert.deepEqual([bench.arriving.here, bench.arriving.digest], [0, null]);
  bench.decode(bench.feed(patch));
  bench.apply();
  bench.tell(THREE);
  bench.feed(new PublishedPatch(TWO, THREE));
  assert.deepEqual([bench.arriving.here, bench.arriving.digest], [0, null]);
  bench.comesWhole(THREE);
});

test("a chunk of a patch is received in its place", () => {
  const bench = new Patched();
  const patch = new PublishedPatch(ONE, TWO);
  bench.tell(TWO, [patch.offered]);
  const [head = new Uint8Array()] = patch.chunk(0);
  const lease = bench.machine.place([Buffer.from("m/dlt"), head], CHUNK_BYTES);
  assert.ok(lease);
  lease.room(CHUNK_BYTES).set(patch.bytes(0));
  lease.received(CHUNK_BYTES);
  bench.publish([head, lease.bytes]);
  assert.equal(bench.arriving.here, 1);
  const { buffer } = bench.follower.versions.inPhase("arriving") ?? {};
  const [next = new Uint8Array()] = patch.chunk(1);
  assert.ok(bench.machine.place([Buffer.from("m/dlt"), next], CHUNK_BYTES)?.live);
  bench.tell(THREE, [new PublishedPatch(ONE, THREE).offered]);
  assert.equal(
    bench.follower.versions.inPhase("arriving")?.buffer,
    buffer,
    "nobody may write there yet",
  );
});

test("reports name the patch", () => {
  const bench = new Patched();
  const two = version(2, { commit: "together" });
  const patch = new PublishedPatch(ONE, two);
  bench.tell(two, [patch.offered]);
  bench.publish(patch.chunk(0));
  const [progress] = sent(bench.wait(1000), "progress");
  assert.deepEqual([progress?.chunks, progress?.patch], [1, patch.id]);
  const effects = bench.decode(bench.feed(patch));
  assert.deepEqual(sent(effects, "staged")[0]?.patch, patch.id);
  bench.control(two.say("commit"));
  assert.deepEqual(sent(bench.apply(), "applied")[0]?.patch, patch.id);
});

test("another end that comes while it is decoded changes nothing", () => {
  const bench = new Patched();
  const patch = new PublishedPatch(ONE, TWO);
  const job = bench.begin(patch);
  bench.publish(patch.end("0".repeat(64)));
  bench.decode([{ do: "decode", job }]);
  assert.equal(sent(bench.apply(), "applied")[0]?.digest, TWO.digest);
});

test("a newer version overtakes one that is being decoded", () => {
  const bench = new Patched();
  const job = bench.begin(new PublishedPatch(ONE, TWO));
  const steps = patching(job);
  steps.next();
  const patch = new PublishedPatch(ONE, THREE);
  bench.tell(THREE, [patch.offered]);
  const last = steps.next();
  assert.ok(last.done && last.value !== "", "it ends before it writes another byte");
  assert.deepEqual(bench.machine.decoded(job, last.value, DECODE_MS, bench.now), []);
  bench.decode(bench.feed(patch));
  assert.deepEqual(bench.ready?.data, THREE.data);
});

test("what is aborted, or of another epoch, is decoded no further", () => {
  for (const end of [TWO.say("abort"), welcome(8)]) {
    const bench = new Patched();
    const job = bench.begin(new PublishedPatch(ONE, TWO));
    bench.control(end);
    assert.ok(!job.live);
    assert.equal(bench.ready, null);
  }
});

test("what a patch builds on stays though another version runs meanwhile", () => {
  const bench = new Patched();
  bench.come(TWO);
  const patch = new PublishedPatch(ONE, THREE);
  bench.tell(THREE, [patch.offered]);
  bench.apply();
  assert.deepEqual(bench.base, ONE.data);
  bench.decode(bench.feed(patch));
  assert.deepEqual(bench.ready?.data, THREE.data);
  assert.equal(bench.follower.versions.base, null, "it runs no more, and nobody needs it");
  bench.apply();
  assert.deepEqual(bench.base, THREE.data);
});

test("what a patch built on that is given up is let go, if it runs no more", () => {
  const bench = new Patched();
  bench.come(TWO);
  bench.tell(THREE, [new PublishedPatch(ONE, THREE).offered]);
  bench.apply();
  assert.deepEqual(bench.base, ONE.data);
  bench.control(noPatch(3));
  assert.equal(bench.follower.versions.base, null);
  bench.comesWhole(THREE);
});

test("there are three buffers at most, and where no patches come one less", () => {
  const bench = new Patched();
  const seen = new Set<ArrayBufferLike>([bench.base.buffer]);
  for (let number = 2; number <= 20; number++) {
    const [base, target] = [version(number - 1), version(number)];
    if (number % 3) bench.patch(new PublishedPatch(base, target));
    else {
      bench.come(target);
      bench.apply();
    }
    seen.add(bench.base.buffer);
  }
  assert.ok(seen.size <= BUFFERS_MAX + 1, `${seen.size}`);
  const gone = bench.base.buffer;
  for (let number = 21; number <= 25; number++) {
    bench.come(version(number), false);
    assert.notEqual(bench.ready?.data.buffer, gone);
    bench.apply();
  }
  assert.equal(bench.follower.versions.base, null);
});

test("an apply that tears the model leaves nothing to build on", () => {
  const bench = new Patched();
  bench.tell(TWO, [new PublishedPatch(ONE, TWO).offered]);
  bench.decode(bench.feed(new PublishedPatch(ONE, TWO)));
  bench.machine.takeReady("m");
  bench.machine.failed("m", "no", bench.now, false);
  assert.equal(bench.follower.versions.base, null);
  bench.tell(THREE, [new PublishedPatch(TWO, THREE).offered]);
  assert.match(bench.arriving.unpatched, /^nothing runs here/);
  bench.comesWhole(THREE);
});

test("what runs is built on by its new name", () => {
  const bench = new Patched();
  bench.control(welcome(8));
  const was = { epoch: 7, version: 1, digest: ONE.digest };
  const metadata = { step: "by the new name" };
  bench.control([header("rename", { model: "m", epoch: 8, version: 1, was, metadata })]);
  assert.deepEqual(bench.machine.metadata("m"), new Map(Object.entries(metadata)));
  const one = new Published(8, 1, ONE.data, ONE.options);
  const two = new Published(8, 2, TWO.data, TWO.options);
  bench.patch(new PublishedPatch(one, two));
  assert.equal(bench.machine.running("m")?.epoch, 8);
});

test("a version in one message needs no patch, and changes nothing in how others come", () => {
  const bench = new Patched();
  bench.patch(new PublishedPatch(ONE, TWO));
  const whole = new Published(7, 3, THREE.data, { chunkBytes: SIZE });
  const [, payload = new Uint8Array()] = whole.whole();
  const fields = { patches: [new PublishedPatch(TWO, whole).offered] };
  const one = { crc: whole.crcs[0] ?? 0, digest: whole.digest };
  const told = bench.publish([...whole.announce(false, { ...fields, whole: one }), payload]);
  assert.deepEqual(kinds(told), ["ready"]);
  bench.apply();
  assert.deepEqual(topics(bench.tell(FOUR)), ["m/dlt off", "m/dat on"]);
});

test("memory of an old size is not kept for versions of another", () => {
  const bench = new Patched();
  const { buffers } = bench.follower.versions;
  const [one, larger] = [bench.base, new Published(7, 2, bytesOf(2 * SIZE, 3))];
  const other = new Published(7, 3, bytesOf(2 * SIZE, 5));
  bench.come(larger);
  bench.apply();
  assert.ok(!buffers.unused(one), "no version will be of its size");
  const two = bench.base;
  bench.come(other);
  bench.apply();
  assert.ok(buffers.unused(two), "the next one may be");
});

test("a memory that is short gives up what patches build on", () => {
  const bench = new Patched();
  const { buffers } = bench.follower.versions;
  const take = buffers.take.bind(buffers);
  let short = true;
  buffers.take = (nbytes) => {
    if (short) {
      short = false;
      throw new RangeError("no memory");
    }
    return take(nbytes);
  };
  bench.tell(TWO, [new PublishedPatch(ONE, TWO).offered]);
  assert.equal(bench.follower.versions.base, null);
  bench.comesWhole(TWO);
});

test("a sealed patch is opened, and one that is forged is none", () => {
  const sealer = new Sealer();
  const bench = new Bench({ inside: false, bytesMax: 10_000, keyring: new Keyring() });
  bench.machine.helloIfOutside(bench.now);
  bench.control(sealer.welcome(7));
  const tell = (of: Published, patches: readonly Patch[]) =>
    bench.publish(sealer.message(sealer.announce(of, true, { keep: true, patches })));
  tell(ONE, []);
  for (const index of ONE.crcs.keys()) bench.publish(sealer.chunk(ONE, index));
  bench.publish(sealer.message(ONE.say("end")));
  bench.apply();
  const patch = new PublishedPatch(ONE, TWO);
  const other = new PublishedPatch(THREE, TWO, patch.data); // sealed as a patch on another base
  tell(TWO, [patch.offered]);
  const [head = new Uint8Array()] = sealer.chunk(patch, 0);
  const [, forged = new Uint8Array()] = sealer.chunk(other, 0);
  bench.publish([head, forged]);
  const { versions } = bench.machine.followers.get("m") ?? assert.fail();
  assert.equal(versions.inPhase("arriving")?.transfer.here, 0);
  for (const index of patch.crcs.keys()) {
    const [first = head, payload = head] = sealer.chunk(patch, index);
    if (index % 2) bench.control([first, payload]);
    else {
      const lease = bench.machine.place([Buffer.from("m/dlt"), first], payload.length);
      assert.ok(lease);
      lease.room(payload.length).set(payload);
      lease.received(payload.length);
      bench.publish([first, lease.bytes]);
    }
  }
  bench.decode(bench.publish(sealer.message(patch.end())));
  assert.deepEqual(bench.ready?.data, TWO.data);
});

test("a step of decoding is a piece or a block, and there are many", () => {
  const bench = new Patched();
  const steps = [...patching(bench.begin(new PublishedPatch(ONE, TWO)))].length;
  assert.equal(steps, 2 * ONE.plan.count + 4); // each chunk hashed twice; read, decoded, copied, written
});

type Act = { readonly do: string; readonly number: number; readonly by: number };
const act: fc.Arbitrary<Act> = fc.oneof(
  fc.record({
    do: fc.constantFrom("tell", "feed", "tell", "feed", "apply", "decode"),
    number: fc.integer({ min: 2, max: 9 }),
    by: fc.nat(3),
  }),
  fc.record({
    do: fc.constantFrom("decode", "wait", "apply", "tear", "welcome", "spoil"),
    number: fc.nat(200),
    by: fc.nat(3),
  }),
);

/** A worker to which anything happens: versions and patches, of this or another base, in any order. */
class Play extends Patched {
  readonly #jobs: Effect[] = [];

  play({ do: what, number, by }: Act): void {
    const acts: Record<string, () => Effect[]> = {
      tell: () => this.tell(version(number), by ? [between(number, by).offered] : []),
      feed: () => this.feed(by ? between(number, by) : version(number)),
      decode: () => this.decode(this.#jobs.splice(0)),
      apply: () => this.apply(),
      wait: () => this.wait(10 * number),
      welcome: () => this.control(welcome(7)),
      tear: () => {
        this.machine.takeReady("m");
        return this.machine.failed("m", "no", this.now, by > 1);
      },
      spoil: () => {
        if (this.follower.versions.base !== null) this.base[number] = by;
        return [];
      },
    };
    this.#jobs.push(...(acts[what]?.() ?? []).filter((effect) => effect.do === "decode"));
  }

  check(before: number): void {
    const { versions, running } = this.follower;
    if (this.ready !== null) assert.deepEqual(this.ready.data, version(this.ready.version).data);
    assert.ok(running === null || running.version >= before);
    const entries = versions.inPhases("arriving", "staged", "ready", "applying");
    const buffers = [...entries.map(({ buffer }) => buffer), versions.base?.data];
    const here = buffers.flatMap((memory) => (memory ? [memory.buffer] : []));
    assert.equal(new Set(here).size, here.length, "each has memory of its own");
    assert.ok(here.length <= BUFFERS_MAX + 1);
  }

  /** Let all that is on its way come, without patches; and then another version. */
  finish(number: number): void {
    this.control(welcome(7)); // after long waits the publisher counts as lost
    for (let left = 20; left > 0 && this.follower.running?.version !== number; left--) {
      this.play({ do: "decode", number, by: 0 });
      const { version: arriving = number, transfer } =
        this.follower.versions.inPhase("arriving") ?? {};
      if (transfer?.patch) this.control(noPatch(arriving));
      else this.tell(version(arriving));
      this.feed(version(arriving));
      this.apply();
    }
    assert.equal(this.follower.running?.version, number, "in the end the newest runs");
  }
}

function between(number: number, by: number): PublishedPatch {
  return new PublishedPatch(version(Math.max(1, number - by)), version(number));
}

// The publisher is lost after 5 s without a message.
const LOST: Act[] = [117, 186, 197].map((number) => ({ do: "wait", number, by: 0 }));

test("whatever comes in whatever order, what is ready is what was published", () => {
  fc.assert(
    fc.property(fc.array(act, { maxLength: 60 }), (acts) => {
      const play = new Play();
      for (const one of acts) {
        const before = play.follower.running?.version ?? 0;
        play.play(one);
        play.check(before);
      }
      play.finish(10);
    }),
    { numRuns: 150, examples: [[LOST]] },
  );
});
