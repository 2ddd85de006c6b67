/** Sound messages that no publisher sends: they end nothing, and an honest version is applied afterwards. */

import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { INTEGER_MAX } from "../src/limits.js";
import { Bench } from "./bench.js";
import { header, layoutOf, Published, welcome } from "./published.js";

const NAMES = ["m", "m", "m", "x", "__proto__", "constructor", "toString", "a".repeat(128)];
const EPOCHS = [7, 7, 7, 6, 8, 0, INTEGER_MAX];
const honest = new Published(7, 1000, Buffer.from("0123456789"), { chunkBytes: 3 });
const other = new Published(7, 3, Buffer.from("012345"), { chunkBytes: 3 });

const name = fc.constantFrom(...NAMES);
const epoch = fc.constantFrom(...EPOCHS);
const version = fc.constantFrom(0, 1, 2, 3, 999, INTEGER_MAX);
const count = fc.constantFrom(0, 1, 2, 10, 2 ** 20, 2 ** 26, INTEGER_MAX);
const hex = fc.constantFrom(honest.id, other.id, honest.digest, other.digest, "0".repeat(64));
const text = fc.constantFrom(
  "",
  "\x1b",
  "tcp://127.0.0.1:9",
  "ipc:///x",
  "\ud800",
  "a".repeat(4096),
);
const key = fc.constantFrom("0".repeat(16), "f".repeat(16));
const tag = fc.constantFrom("0".repeat(32), "f".repeat(32));
const patch = fc.record({ encoding: fc.constantFrom("delta-1", "x"), epoch, version });
const offer = fc.record({
  encoding: fc.constant("delta-1"),
  epoch,
  version,
  digest: hex,
  nbytes: count,
});
const texts = fc.dictionary(fc.constantFrom("a", "__proto__", "\n"), text);
const versions = fc.dictionary(name, version);
const shared = fc.record({ path: text, token: tag });

const FIELDS = fc.record({
  ...{ model: name, epoch, version, layout: hex, digest: hex, crc: count, index: count },
  ...{ layout_bytes: fc.constantFrom(honest.layout.length, 10, 100, 2 ** 20), nbytes: count },
  ...{ chunk_bytes: count, commit: fc.constantFrom("auto", "together"), token: count, text },
  ...{ acknowledge: fc.constantFrom("applied", "staged"), encoding: fc.constantFrom("raw", "x") },
  ...{
    encryption: fc.constantFrom(null, "aes-256-gcm", "x"),
    key: fc.oneof(fc.constant(null), key),
  },
  ...{ tag: fc.oneof(fc.constant(null), tag), shared: fc.oneof(fc.constant(null), shared) },
  ...{ whole: fc.oneof(fc.constant(null), fc.record({ crc: count, digest: hex })) },
  ...{ keep: fc.boolean(), patches: fc.array(offer, { maxLength: 8 }), metadata: texts },
  ...{
    patch: fc.oneof(fc.constant(null), patch),
    was: fc.record({ epoch, version, digest: hex }),
  },
  ...{ code: fc.constantFrom("gone", "range", "no-patch", "unknown-worker", "limit", "x") },
  ...{ data: text, ping_ms: count, lost_ms: count, models: fc.oneof(versions), age_ms: count },
  ...{ features: fc.array(fc.constantFrom("ticket.0", `ticket.${"0".repeat(32)}`, "x")) },
  ...{
    keys: fc.array(hex, { maxLength: 2 }),
    count,
    sealed: fc.constantFrom("", "AAAA", "AA=="),
  },
});
const TYPES = [
  ...["welcome", "rekey", "announce", "chunk", "sealed_chunk", "sealed_message", "end", "commit"],
  ...["abort", "rename", "beacon", "refuse", "ping", "pong", "prepare"],
];
const PAYLOADS = [
  new Uint8Array(),
  honest.layout,
  other.layout,
  layoutOf("{}"),
  honest.bytes(0),
  new Uint8Array(100),
];
const said = fc.record({
  ...{ type: fc.constantFrom(...TYPES), fields: FIELDS, pushed: fc.boolean() },
  payloads: fc.array(fc.constantFrom(...PAYLOADS), { maxLength: 2 }),
  ...{ wait: fc.constantFrom(0, 0, 100, 3000), user: fc.constantFrom("", "apply", "fail", "tear") },
});

type Said = typeof said extends fc.Arbitrary<infer T> ? T : never;

function say(bench: Bench, { type, fields, pushed, payloads }: Said): void {
  const frames = [header(type, fields), ...payloads.map((one) => Uint8Array.from(one))];
  const size = payloads[0]?.length ?? 0;
  if (pushed) bench.machine.place([Buffer.from("m/ctl"), ...frames], size);
  else bench.machine.placeControl(frames[0] ?? new Uint8Array(), size);
  bench.decode(pushed ? bench.publish(frames) : bench.control(frames));
}

function use({ machine, now }: Bench, how: string): void {
  if (how !== "") machine.takeReady("m");
  if (how === "apply") machine.applied("m", now);
  else if (how !== "") machine.failed("m", "no", now, how === "fail");
}

test("sound messages that are odd end nothing", () => {
  fc.assert(
    fc.property(fc.array(said, { maxLength: 40 }), (all) => {
      const bench = new Bench({ bytesMax: 10_000 });
      for (const one of all) {
        say(bench, one);
        bench.wait(one.wait);
        use(bench, one.user);
      }
      const last = new Published(INTEGER_MAX, INTEGER_MAX, honest.data, { chunkBytes: 3 });
      for (let times = 0; times < 3 && bench.ready === null; times++) {
        bench.wait(60_000); // whatever was claimed is doubted by then, and the session ends
        bench.control(welcome(INTEGER_MAX));
        bench.push(last);
      }
      const runs = bench.machine.running("m");
      assert.ok(bench.ready !== null || runs?.version === INTEGER_MAX, JSON.stringify(runs));
    }),
    { numRuns: 300 },
  );
});
