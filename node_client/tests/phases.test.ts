/** What no sequence can show of the tables: every pair, and the memory of a version on its way. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { type Held, Holdings } from "../src/holdings.js";
import { timing } from "../src/limits.js";
import { type Announce, decode } from "../src/messages.js";
import { ARROWS, type Event, type Phase } from "../src/phases.js";
import { Transfer } from "../src/transfer.js";
import { bytesOf, Published } from "./published.js";

const PHASES = Object.keys(ARROWS) as Phase[];
const EVENTS = [...new Set(PHASES.flatMap((phase) => Object.keys(ARROWS[phase]) as Event[]))];
const WAYS: Record<Phase, readonly Event[]> = {
  announced: [],
  arriving: ["begun"],
  staged: ["begun", "whole"],
  ready: ["begun", "whole", "committed"],
  applying: ["begun", "whole", "committed", "taken"],
  running: ["begun", "whole", "committed", "taken", "applied"],
  dropped: ["newer"],
  rejected: ["declined"],
};

/** Return a version that has come to a phase. */
function at(holds: Holdings, phase: Phase): Held {
  const one = new Published(7, 1, bytesOf(12, 1));
  const announce = decode(one.announce(true)).message as Announce;
  const held = holds.expect(announce);
  for (const event of WAYS[phase]) {
    if (event === "begun") assert.ok(holds.takeMemory(held));
    const buffer = held.buffer as Uint8Array;
    const begun = event === "begun";
    const by = begun ? { transfer: new Transfer(announce, buffer, 0, timing()) } : {};
    assert.ok(holds.move(held, event, by));
  }
  assert.equal(held.phase, phase);
  return held;
}

for (const phase of PHASES) {
  test(`an event has an arrow from ${phase}, or changes nothing`, () => {
    for (const event of EVENTS) {
      const holds = new Holdings();
      const held = at(holds, phase);
      const { buffer } = held;
      const after = ARROWS[phase][event];
      assert.equal(holds.move(held, event), after !== undefined);
      assert.equal(held.phase, after ?? phase);
      const ends = held.phase === "dropped" || held.phase === "rejected";
      assert.deepEqual(holds.all(...PHASES), ends ? [] : [held]);
      assert.equal(holds.isRejected(held), held.phase === "rejected");
      const used = ["arriving", "staged", "ready", "applying"].includes(held.phase);
      assert.equal(held.buffer, used ? buffer : null);
      const others = [holds.buffers.take(12), holds.buffers.take(12), holds.buffers.take(12)];
      assert.equal(others.filter(Boolean).length, held.buffer === null ? 2 : 1, "given back, once");
    }
  });
}
