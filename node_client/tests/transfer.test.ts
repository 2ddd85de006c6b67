/** A version arrives whole whatever the network does, and nothing is asked for that need not be. */

import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { decode } from "../src/headers.js";
import { timing, WINDOW_CHUNKS } from "../src/limits.js";
import type { Announce } from "../src/messages.js";
import { Transfer } from "../src/transfer.js";
import { bytesOf, Published } from "./published.js";

const TIMING = timing();

class Line {
  now = 0;
  readonly version: Published;
  readonly memory: Uint8Array;
  readonly transfer: Transfer;

  constructor(chunks: number) {
    this.version = new Published(7, 1, bytesOf(4 * chunks, 1));
    const announce = decode(this.version.announce()).message as Announce;
    this.memory = new Uint8Array(this.version.data.length);
    this.transfer = new Transfer(announce, this.memory, this.now, TIMING);
  }

  add(index: number, pushed = true, bytes = this.version.bytes(index)): boolean {
    const crc = this.version.crcs[index] ?? 0;
    return this.transfer.add(index, crc, bytes, this.now, pushed);
  }

  /** Return the chunks that are asked for now; -1 stands for the announcement and the end. */
  wants(after = 0, answered = true): number[] {
    this.now += after;
    if (answered) this.transfer.answered(this.now - 1); // as if nothing were on its way
    return this.transfer
      .wants(this.now)
      .flatMap(({ first, count }) =>
        count ? Array.from({ length: count }, (_, i) => first + i) : [-1],
      );
  }
}

test("pushed in order, nothing is fetched", () => {
  const line = new Line(40);
  for (let i = 0; i < 40; i++) {
    assert.ok(line.add(i));
    assert.deepEqual(line.wants(), []);
  }
  line.transfer.end(line.version.digest);
  assert.ok(line.transfer.complete && line.transfer.verify());
  assert.deepEqual(line.memory, line.version.data);
});

test("a gap in what was pushed is fetched at once, what may come is not", () => {
  const line = new Line(10);
  for (const index of [0, 1, 2, 5]) line.add(index);
  assert.deepEqual(line.wants(), [3, 4]);
  assert.deepEqual(line.wants(TIMING.quiet - 1), []);
  assert.deepEqual(line.wants(1), [-1, 6, 7, 8, 9]);
});

test("at most a window is outstanding", () => {
  const line = new Line(100);
  line.transfer.end(line.version.digest);
  const outstanding = new Set(line.wants());
  assert.equal(outstanding.size, WINDOW_CHUNKS);
  while (outstanding.size > 0) {
    const [index] = outstanding;
    outstanding.delete(index ?? -1);
    line.add(index ?? -1, false);
    for (const more of line.wants()) outstanding.add(more);
    assert.ok(outstanding.size <= WINDOW_CHUNKS);
  }
  assert.ok(line.transfer.complete);
});

test("silence repeats the question, and patience doubles", () => {
  const line = new Line(2);
  line.transfer.pull();
  assert.deepEqual(line.wants(), [-1, 0, 1]);
  for (const seconds of [1, 2, 4, 8, 16, 16]) {
    assert.deepEqual(line.wants(1000 * seconds - 1), []);
    assert.deepEqual(line.wants(1), [-1, 0, 1]);
  }
});

test("what is still on its way is not asked for again", () => {
  const line = new Line(2);
  line.now = 5000;
  line.transfer.pull();
  assert.deepEqual(line.wants(0, false), [-1, 0, 1]);
  line.transfer.answered(4900);
  assert.deepEqual(line.wants(3000, false), [], "that ping was sent before");
  line.transfer.answered(5900);
  assert.deepEqual(line.wants(0, false), [-1, 0, 1]);
  assert.deepEqual(line.wants(TIMING.patienceMax - 1, false), []);
  assert.deepEqual(line.wants(1, false), [-1, 0, 1], "pongs get lost");
});

test("a damaged chunk is fetched again, at once for the first few", () => {
  const line = new Line(3);
  line.transfer.pull();
  assert.deepEqual(line.wants(), [-1, 0, 1, 2]);
  for (let times = 0; times < 16; times++) {
    assert.ok(!line.add(1, false, new Uint8Array(4)));
    assert.deepEqual(line.wants(), [1]);
  }
  assert.ok(!line.add(1, false, new Uint8Array(4)));
  assert.deepEqual(line.wants(), [], "the storm has an end");
  assert.deepEqual(line.wants(TIMING.patience), [-1, 0, 1, 2]);
});

test("a later copy cannot change a chunk that is here", () => {
  const line = new Line(1);
  assert.ok(line.add(0));
  assert.ok(!line.add(0, true, new Uint8Array(4)));
  assert.ok(!line.add(1), "and there is no chunk 1");
  assert.deepEqual(line.memory, line.version.data);
});

test("a wrong digest starts over", () => {
  const line = new Line(2);
  line.add(0);
  line.add(1);
  line.transfer.end("0".repeat(64));
  assert.ok(line.transfer.complete && !line.transfer.verify());
  assert.equal(line.transfer.here, 0);
  assert.deepEqual(line.wants(), [-1, 0, 1]);
});

test("a lent chunk is taken where it lies", () => {
  const line = new Line(2);
  const lease = line.transfer.lend(1, 4);
  assert.ok(lease !== null && line.transfer.lend(1, 4) === null, "only once");
  assert.ok(!line.add(1, false), "what comes of it meanwhile is ignored");
  for (const byte of line.version.bytes(1)) {
    lease.room(1)[0] = byte;
    lease.received(1);
  }
  assert.ok(line.add(1, true, lease.bytes));
  line.add(0);
  line.transfer.end(line.version.digest);
  assert.ok(line.transfer.complete && line.transfer.verify());
});

test("a lent chunk that is cut off or damaged is fetched", () => {
  for (const end of ["cut", "damaged", "short"]) {
    const line = new Line(2);
    const lease = line.transfer.lend(0, 4);
    lease?.received(end === "short" ? 3 : 4);
    if (end === "cut") lease?.cancel();
    else assert.ok(!line.add(0, true, lease?.bytes));
    line.transfer.pull();
    assert.deepEqual(line.wants(), [-1, 0, 1], end);
    assert.ok(!line.transfer.revoke(), "nobody writes there any more");
  }
});

test("bytes that are trickling in are not silence", () => {
  const line = new Line(2);
  const lease = line.transfer.lend(0, 4);
  for (let i = 0; i < 3; i++) {
    lease?.received(1);
    assert.deepEqual(line.wants(TIMING.quiet - 1), []);
  }
});

test("any order and any loss end whole", () => {
  const chunks = fc.integer({ min: 0, max: 60 });
  fc.assert(
    fc.property(
      chunks,
      fc.double({ min: 0, max: 0.7, noNaN: true }), // bad luck alone cannot take all turns then
      fc.infiniteStream(fc.nat(999)),
      (count, loss, dice) => {
        const line = new Line(count);
        const roll = () => (dice.next().value ?? 0) / 1000;
        const lost = () => roll() < loss;
        let underway = Array.from({ length: count }, (_, i) => i).filter(() => !lost());
        for (let turns = 0; !(line.transfer.complete && line.transfer.verify()); turns++) {
          assert.ok(turns < 3000, "it never ended");
          const [index] = underway.splice(Math.floor(roll() * underway.length), 1);
          if (index === -1) line.transfer.end(line.version.digest);
          else if (index !== undefined) line.add(index, roll() < 0.5);
          underway = [
            ...underway,
            ...line.wants(index === undefined ? 500 : 1).filter(() => !lost()),
          ];
        }
        assert.deepEqual(line.memory, line.version.data);
      },
    ),
    { numRuns: 200 },
  );
});
