/** Registered memory, snapshots, and what must fit. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import type { Dtype } from "../src/dtypes.js";
import { type Registered, type Tensor, tensor, toFloat32 } from "../src/index.js";
import { Layout } from "../src/layout.js";
import type { StagedVersion } from "../src/staging.js";
import { RegisteredTarget, SnapshotTarget, type Target } from "../src/target.js";
import { bytesOf, layoutOf } from "./published.js";

type Rows = Record<string, [dtype: string, shape: number[], begin: number, end: number]>;

function layout(rows: Rows, metadata?: object): Layout {
  const entries = Object.entries(rows).map(([name, [dtype, shape, begin, end]]) => {
    return [name, { dtype, shape, data_offsets: [begin, end] }];
  });
  const texts = metadata === undefined ? [] : [["__metadata__", metadata]];
  return Layout.parse(layoutOf(Object.fromEntries([...texts, ...entries])));
}

function staged(of: Layout, data = bytesOf(of.nbytes, 3)) {
  const key = { model: "m", epoch: 1, version: 1, digest: "" };
  return {
    ...key,
    layout: of,
    data,
    reportStaged: false,
    patch: null,
    decodeUs: 0,
    metadata: new Map(),
  };
}

/** Write all of a version, and return what a user sees of it. */
function applied(target: Target, version: StagedVersion): ReadonlyMap<string, Tensor> {
  const { tensors, pieces } = target.begin(version);
  for (const _ of pieces);
  return tensors;
}

test("a version is copied into registered memory, and stays there", () => {
  const all = new Float32Array(8);
  const w = tensor(all.subarray(1, 7), [2, 3]);
  const target = new RegisteredTarget({ w, b: new Uint8Array(2) });
  const of = layout({ w: ["F32", [2, 3], 0, 24], b: ["U8", [2], 24, 26] });
  assert.equal(target.fault(of), "");
  const { data } = staged(of);
  const tensors = applied(target, staged(of));
  assert.deepEqual(new Uint8Array(all.buffer, 4, 24), data.slice(0, 24));
  assert.equal(all[0], 0, "nothing before it");
  assert.equal(all[7], 0, "nor behind it");
  assert.equal(tensors.get("w")?.data, w.data);
});

test("a layout that does not fit is told by name", () => {
  const target = new RegisteredTarget({
    "head.weight": tensor(new Float32Array(6), [2, 3]),
    bias: new Float64Array(1),
    mine: new Int8Array(1),
  });
  const of = layout({
    "head.weight": ["F32", [3, 2], 0, 24],
    bias: ["I64", [1], 24, 32],
    theirs: ["U8", [], 32, 33],
  });
  assert.deepEqual(target.fault(of).split("\n"), [
    "bias: dtype I64 published, F64 here",
    "head.weight: shape [3, 2] published, [2, 3] here",
    "mine: I8 [1] here, not published",
    "theirs: published as U8 [], not here",
  ]);
});

test("at most 20 lines are told", () => {
  const names = Array.from({ length: 30 }, (_, i) => [`x${i}`, new Int8Array(1)]);
  const lines = new RegisteredTarget(Object.fromEntries(names)).fault(layout({})).split("\n");
  assert.equal(lines.length, 20);
  assert.equal(lines.at(-1), "... and 11 more");
});

test("memory may be shared with other threads", () => {
  const w = new Float32Array(new SharedArrayBuffer(8));
  const of = layout({ w: ["F32", [2], 0, 8] });
  applied(new RegisteredTarget({ w }), staged(of, new Uint8Array(Float32Array.of(1, 2).buffer)));
  assert.deepEqual([...w], [1, 2]);
});

test("of what is published, a part may be registered", () => {
  const tolerance = { strict: false, cast: false };
  const of = layout({ critic: ["U8", [2], 0, 2], actor: ["U8", [3], 2, 5] });
  const actor = new Uint8Array(3);
  const target = new RegisteredTarget({ actor }, tolerance);
  assert.equal(target.fault(of), "");
  applied(target, staged(of, Uint8Array.of(1, 2, 3, 4, 5)));
  assert.deepEqual([...actor], [3, 4, 5]);
  const other = new RegisteredTarget({ actor: new Uint8Array(4), mine: actor }, tolerance);
  assert.equal(
    other.fault(of),
    "actor: shape [3] published, [4] here\nmine: U8 [3] here, not published",
  );
});

test("floats may be registered as others, and nothing else", () => {
  const tolerance = { strict: true, cast: true };
  const of = layout({
    a: ["F32", [2], 0, 8],
    b: ["BF16", [1], 8, 10],
    c: ["F64", [1], 10, 18], // not aligned
    d: ["I32", [1], 18, 22],
  });
  const [a, b, c] = [new Uint16Array(2), new Float64Array(1), new Float32Array(1)];
  const memory = { a: tensor(a, [2], "F16"), b, c };
  const refused = new RegisteredTarget({ ...memory, d: new Float32Array(1) }, tolerance);
  assert.equal(refused.fault(of), "d: dtype I32 published, F32 here");
  assert.match(
    new RegisteredTarget({ ...memory, d: new Int32Array(1) }).fault(of),
    /^a: dtype F32/,
  );
  const target = new RegisteredTarget({ ...memory, d: new Int32Array(1) }, tolerance);
  assert.equal(target.fault(of), "");
  const data = new DataView(new ArrayBuffer(22));
  data.setFloat32(0, 1.5, true);
  data.setFloat32(4, 1e9, true);
  data.setUint16(8, 0xc049, true);
  data.setFloat64(10, 1 / 3, true);
  applied(target, staged(of, new Uint8Array(data.buffer)));
  assert.deepEqual([...a, ...b, ...c], [0x3e00, 0x7c00, -3.140625, Math.fround(1 / 3)]);
});

test("a large tensor is converted piece by piece, to its last element", () => {
  const values = Float32Array.from({ length: 2 ** 20 + 3 }, (_, i) => i % 251);
  const of = layout({ a: ["F32", [values.length], 0, values.byteLength] });
  const a = new Float64Array(values.length);
  const target = new RegisteredTarget({ a }, { strict: true, cast: true });
  const { large, pieces } = target.begin(staged(of, new Uint8Array(values.buffer)));
  assert.ok(large && [...pieces].length > 10);
  assert.deepEqual(a, Float64Array.from(values));
});

test("finite values that become infinite are counted", () => {
  const values = Float32Array.of(
    65504,
    65519.9,
    65520,
    -1e30,
    Infinity,
    NaN,
    3.4028234663852886e38,
  );
  const rows: Rows = {};
  const all: Record<string, Tensor> = {};
  const bits = (dtype: Dtype) => tensor(new Uint16Array(7), [7], dtype);
  for (const [i, name] of [..."abcdef"].entries()) {
    rows[name] = ["F32", [7], 28 * i, 28 * (i + 1)];
    all[name] = bits("F16");
  }
  const of = layout(rows);
  const data = Buffer.concat(Array(6).fill(new Uint8Array(values.buffer)));
  const wide = { c: new Float64Array(7), d: new Float64Array(7), e: new Float64Array(7) };
  const one = { ...wide, a: bits("F16"), b: bits("BF16"), f: new Float64Array(7) };
  const told = (own: Registered) => {
    const writing = new RegisteredTarget(own, { strict: true, cast: true }).begin(staged(of, data));
    for (const _ of writing.pieces);
    return writing.note();
  };
  const [most, brains] = ["(at most 65504)", "(at most 3.38953e+38)"];
  assert.equal(
    told(one),
    `a: 3 finite values are beyond F16 ${most}; b: 1 finite value is beyond BF16 ${brains}`,
  );
  assert.ok(
    told(all).endsWith(`d: 3 finite values are beyond F16 ${most}; and likewise in 2 more tensors`),
  );
  assert.equal(told({ ...wide, a: new Float32Array(7), b: new Float32Array(7), f: values }), "");
});

test("another name of a tensor may be registered, and need not be", () => {
  const of = layout({ w: ["U8", [2], 0, 2] }, { tied: "w" });
  assert.equal(new RegisteredTarget({ w: new Uint8Array(2) }).fault(of), "");
  const [w, tied] = [new Uint8Array(2), new Uint8Array(2)];
  const target = new RegisteredTarget({ w, tied });
  assert.equal(target.fault(of), "");
  applied(target, staged(of, Uint8Array.of(4, 5)));
  assert.deepEqual([...w, ...tied], [4, 5, 4, 5]);
});

test("memory of two names is filled by either, or by both with equal bytes", () => {
  const memory = new Uint8Array(4);
  const [embed, head] = [memory.subarray(1, 3), memory.subarray(1, 3)];
  for (const strict of [true, false]) {
    const target = new RegisteredTarget({ embed, head }, { strict, cast: false });
    const layouts = [
      layout({ embed: ["U8", [2], 0, 2] }),
      layout({ head: ["U8", [2], 0, 2] }),
      layout({ head: ["U8", [2], 0, 2] }, { embed: "head" }),
      layout({ embed: ["U8", [2], 0, 2], head: ["U8", [2], 2, 4] }),
    ];
    for (const [value, of] of layouts.entries()) {
      assert.equal(target.fault(of), "");
      const tensors = applied(
        target,
        staged(of, Uint8Array.of(value, 7, value, 7).subarray(0, of.nbytes)),
      );
      assert.deepEqual([...memory], [0, value, 7, 0]);
      assert.deepEqual([...(tensors.get("head") as Tensor).data], [value, 7]);
    }
    const two = layouts[3] as Layout;
    assert.throws(
      () => applied(target, staged(two, Uint8Array.of(1, 2, 1, 3))),
      /embed and head are one tensor here/,
    );
    assert.deepEqual([...memory], [0, 3, 7, 0]);
  }
  const apart = new RegisteredTarget({ embed, head: new Uint8Array(2) });
  assert.match(
    apart.fault(layout({ embed: ["U8", [2], 0, 2] })),
    /^head: U8 \[2\] here, not published$/,
  );
  const alone = new RegisteredTarget({ head });
  assert.equal(alone.fault(layout({ embed: ["U8", [2], 0, 2] }, { head: "embed" })), "");
});

interface Case {
  name: string;
  layout: string;
  data: string;
  partial: boolean;
  memory: number;
  target: Record<string, { dtype: "U8" | "I8"; shape: number[]; at: number }>;
  expect: { ok?: string; error?: string };
}

/** Apply a version to memory that lies as a case says; return what is wrong with it. */
function kindOf(given: Case, memory: Uint8Array<ArrayBuffer>): string | undefined {
  const tensors = Object.entries(given.target).map(([name, { dtype, shape, at }]) => {
    const count = shape.reduce((product, size) => product * size, 1);
    const array = dtype === "U8" ? Uint8Array : Int8Array;
    return [name, tensor(new array(memory.buffer, at, count), shape, dtype)];
  });
  const tolerance = { strict: !given.partial, cast: false };
  let target: RegisteredTarget;
  try {
    target = new RegisteredTarget(Object.fromEntries(tensors), tolerance);
  } catch (error) {
    assert.match(String(error), /share a part of their memory/);
    return "memory";
  }
  const of = Layout.parse(layoutOf(given.layout));
  if (target.fault(of) !== "") return "layout";
  try {
    applied(target, staged(of, Buffer.from(given.data, "hex")));
  } catch (error) {
    assert.match(String(error), /are one tensor here/);
    return "differ";
  }
  return undefined;
}

test("what is one tensor, in the vectors that all clients share", () => {
  const file = new URL("../../../tests/vectors/ties.json", import.meta.url);
  const { cases } = JSON.parse(readFileSync(file, "utf8")) as { cases: Case[] };
  assert.notEqual(cases.length, 0);
  for (const each of cases) {
    const memory = new Uint8Array(each.memory);
    assert.equal(kindOf(each, memory), each.expect.error, each.name);
    const entry = Buffer.from(memory).toString("hex");
    assert.equal(entry, each.expect.ok ?? "00".repeat(each.memory), each.name);
  }
});

test("tensors that share a part of their memory are named", () => {
  const f = new Uint8Array(8);
  const overlapping = {
    parts: { a: f.subarray(0, 6), b: f.subarray(2) },
    inside: { a: f, b: f.subarray(2, 3) },
    "another shape": { a: f, b: tensor(f, [2, 4], "U8") },
    "another dtype": { a: f, b: new Int8Array(f.buffer) },
    "behind one of two names": { a: f, same: f, b: f.subarray(7) },
  };
  for (const [what, memory] of Object.entries(overlapping)) {
    assert.throws(() => new RegisteredTarget(memory), /a and b share a part of their memory/, what);
  }
  const apart = { a: f.subarray(0, 4), b: f.subarray(4), none: f.subarray(3, 3) };
  assert.equal(new RegisteredTarget(apart).nbytes, 8);
});

test("memory that was transferred fails before anything is written", () => {
  const [a, b] = [new Uint8Array(2), new Uint8Array(2)];
  const target = new RegisteredTarget({ a, b });
  const of = layout({ a: ["U8", [2], 0, 2], b: ["U8", [2], 2, 4] });
  structuredClone(b.buffer, { transfer: [b.buffer] });
  assert.throws(() => applied(target, staged(of)), /memory of b has 0 bytes/);
  assert.deepEqual([...a], [0, 0]);
});

test("a snapshot has every tensor in an array of its dtype, aligned or not", () => {
  const of = layout(
    {
      a: ["U8", [1], 0, 1],
      b: ["F64", [1], 1, 9],
      c: ["BF16", [2], 9, 13],
      d: ["I64", [0], 13, 13],
    },
    { tied: "b", format: "pt" },
  );
  const data = bytesOf(of.nbytes, 3);
  const tensors = applied(new SnapshotTarget(), staged(of, data));
  assert.deepEqual([...tensors.keys()], ["a", "b", "c", "d", "tied"]);
  assert.equal(tensors.get("b")?.data[0], new DataView(data.buffer).getFloat64(1, true));
  assert.ok(tensors.get("c")?.data instanceof Uint16Array);
  assert.ok(tensors.get("d")?.data instanceof BigInt64Array);
  assert.equal(tensors.get("tied"), tensors.get("b"));
});

test("a tensor says what does not fit", () => {
  assert.throws(
    () => tensor(new Float32Array(5), [2, 3]),
    /F32 \[2,3\] has 24 bytes, the array 20/,
  );
  assert.throws(() => tensor(new Float32Array(2), [2], "BF16"), /BF16 is held by Uint16Array/);
  assert.throws(() => tensor(new Float32Array(2), [-1, -2]), /not negative/);
  assert.throws(
    () => tensor(new DataView(new ArrayBuffer(1)) as never),
    /neither a typed array nor a dtype/,
  );
  assert.throws(() => new RegisteredTarget({ w: {} as Tensor }), /tensor "w"/);
  assert.deepEqual(tensor(new Float32Array(1), []).shape, []);
});

// From the definitions: OCP's 8-bit floats, IEEE 754, and bfloat16.
const FLOATS: [string, number[], number[]][] = [
  [
    "F8_E4M3",
    [0x00, 0x80, 0x38, 0xb8, 0x7e, 0x01, 0x7f, 0xff],
    [0, -0, 1, -1, 448, 2 ** -9, Number.NaN, Number.NaN],
  ],
  [
    "F8_E5M2",
    [0x3c, 0x7b, 0x01, 0x7c, 0xfc, 0x7d],
    [1, 57344, 2 ** -16, Infinity, -Infinity, Number.NaN],
  ],
  ["F8_E4M3FNUZ", [0x40, 0x7f, 0x80, 0x01], [1, 240, Number.NaN, 2 ** -10]],
  ["F8_E5M2FNUZ", [0x40, 0x7f, 0x80, 0x01], [1, 57344, Number.NaN, 2 ** -17]],
  ["F8_E8M0", [127, 0, 254, 255], [1, 2 ** -127, 2 ** 127, Number.NaN]],
  [
    "F16",
    [0x3c00, 0x7bff, 0x0001, 0xfc00, 0x7e00, 0x3555],
    [1, 65504, 2 ** -24, -Infinity, Number.NaN, 0.333251953125],
  ],
  ["BF16", [0x3f80, 0x7f80, 0xc049, 0x0001], [1, Infinity, -3.140625, 2 ** -133]],
];
for (const [dtype, bits, values] of FLOATS) {
  test(`${dtype} becomes float32`, () => {
    const data = dtype.endsWith("16") ? Uint16Array.from(bits) : Uint8Array.from(bits);
    const of = tensor(data, [bits.length], dtype as never);
    assert.deepEqual([...toFloat32(of)], values);
  });
}

test("float32 and float64 come as they are, others not at all", () => {
  assert.deepEqual([...toFloat32(tensor(new Float64Array([0.5, -2])))], [0.5, -2]);
  assert.throws(() => toFloat32(tensor(new Int32Array(1))), TypeError);
});
