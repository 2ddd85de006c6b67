/** With which of its addresses a worker is: the order, rounds, pauses and returns. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { Route } from "../src/route.js";

const RETRY = 250;

function route(count: number): Route {
  return new Route(count, RETRY, 5_000);
}

test("it goes round in order, with a pause after each round", () => {
  const went: number[][] = [];
  const r = route(3);
  for (let now = 0; went.length < 6; ) {
    const wait = r.failed(now);
    now += wait;
    went.push([r.present, wait]);
    assert.equal(r.movedAt, now);
  }
  const round = [
    [1, 0],
    [2, 0],
    [0, RETRY],
  ];
  assert.deepEqual(went, [...round, ...round]);
});

test("a round begins where a session has ended, unless that ended at once", () => {
  for (const [lasted, waits] of [
    [1_000, [0, 0, RETRY]],
    [0, [0, RETRY, 0]],
  ] as const) {
    const r = route(3);
    r.failed(10_000);
    r.joined(10_000);
    const now = 10_000 + lasted;
    assert.deepEqual([r.failed(now), r.failed(now), r.failed(now)], waits);
  }
});

test("the first address is probed in a session with another, one probe at a time", () => {
  const r = route(2);
  r.joined(0);
  assert.ok(!r.startProbe(100_000), "it is with the first address");
  r.failed(100_000);
  assert.ok(!r.startProbe(200_000), "no session has begun");
  r.joined(200_000);
  assert.deepEqual(
    [204_999, 205_000, 206_000].map((now) => r.startProbe(now)),
    [false, true, false],
  );
  assert.ok(!r.probed(false, 206_000));
  assert.deepEqual(
    [210_999, 211_000].map((now) => r.startProbe(now)),
    [false, true],
  );
  assert.ok(r.probed(true, 212_000));
  assert.equal(r.present, 0);
  assert.ok(!r.startProbe(300_000) && !r.probed(true, 300_000), "it is there");
  const late = route(2);
  late.failed(0);
  assert.ok(!late.probed(true, 1_000), "it goes round anyway");
});

test("returns in vain are rarer each time, until a session lasts", () => {
  const r = route(2);
  let now = 0;
  const pause = (session: number): number => {
    if (session > 0) r.joined(now);
    now += session;
    r.failed(now);
    r.joined(++now);
    const begun = now;
    while (!r.startProbe(now)) assert.ok(++now < begun + 100_000, "it is never probed");
    assert.ok(r.probed(true, now));
    return now - begun;
  };
  assert.deepEqual(
    [1_000, 0, 4_999, 0, 0, 0, 5_000, 0].map(pause),
    [5_000, 10_000, 20_000, 40_000, 60_000, 60_000, 5_000, 10_000],
  );
});
