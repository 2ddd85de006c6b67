/** What no sequence can show of the tables: every pair, and the memory of a version on its way. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { decode } from "../src/headers.js";
import { timing } from "../src/limits.js";
import type { Announce } from "../src/messages.js";
import { VERSION_ARROWS, type VersionEvent, type VersionState } from "../src/phases.js";
import { Transfer } from "../src/transfer.js";
import { type VersionEntry, VersionStore } from "../src/version_store.js";
import { bytesOf, Published } from "./published.js";

const PHASES = Object.keys(VERSION_ARROWS) as VersionState[];
const EVENTS = [
  ...new Set(PHASES.flatMap((phase) => Object.keys(VERSION_ARROWS[phase]) as VersionEvent[])),
];
const WAYS: Record<VersionState, readonly VersionEvent[]> = {
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
function at(versions: VersionStore, phase: VersionState): VersionEntry {
  const one = new Published(7, 1, bytesOf(12, 1));
  const announce = decode(one.announce(true)).message as Announce;
  const entry = versions.expect(announce);
  for (const event of WAYS[phase]) {
    if (event === "begun") assert.ok(versions.takeMemory(entry));
    const buffer = entry.buffer as Uint8Array;
    const begun = event === "begun";
    const by = begun ? { transfer: new Transfer(announce, buffer, 0, timing()) } : {};
    assert.ok(versions.move(entry, event, by));
  }
  assert.equal(entry.phase, phase);
  return entry;
}

for (const phase of PHASES) {
  test(`an event has an arrow from ${phase}, or changes nothing`, () => {
    for (const event of EVENTS) {
      const versions = new VersionStore();
      const entry = at(versions, phase);
      const { buffer } = entry;
      const after = VERSION_ARROWS[phase][event];
      assert.equal(versions.move(entry, event), after !== undefined);
      assert.equal(entry.phase, after ?? phase);
      const ends = entry.phase === "dropped" || entry.phase === "rejected";
      assert.deepEqual(versions.inPhases(...PHASES), ends ? [] : [entry]);
      assert.equal(versions.isRejected(entry), entry.phase === "rejected");
      const used = ["arriving", "staged", "ready", "applying"].includes(entry.phase);
      assert.equal(entry.buffer, used ? buffer : null);
      const others = [
        versions.buffers.take(12),
        versions.buffers.take(12),
        versions.buffers.take(12),
      ];
      assert.equal(
        others.filter(Boolean).length,
        entry.buffer === null ? 2 : 1,
        "given back, once",
      );
    }
  });
}
