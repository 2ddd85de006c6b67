/** Layouts: what is one, what is none, and that nothing else can come of any bytes. */

import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { BITS, type Dtype, tensorBytes } from "../src/dtypes.js";
import { LayoutError } from "../src/errors.js";
import { Layout } from "../src/layout.js";
import { layoutOf } from "./published.js";

const BYTE = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}';

interface Entry {
  readonly name: string;
  readonly dtype: Dtype;
  readonly shape: number[];
}

const entry: fc.Arbitrary<Entry> = fc.record(
  {
    name: fc.string({ unit: "grapheme", minLength: 1, maxLength: 20 }),
    dtype: fc.constantFrom(...(Object.keys(BITS) as Dtype[])),
    shape: fc.array(fc.integer({ min: 0, max: 9 }), { maxLength: 4 }),
  },
  { noNullPrototype: true },
);
const entries = fc
  .uniqueArray(entry, { selector: ({ name }) => name, maxLength: 8 })
  .map((all) => all.filter((e) => e.name !== "__metadata__"))
  .map((all) => all.filter((e) => Number.isInteger(tensorBytes(e.dtype, e.shape))));

/** Write a layout by hand, so that names such as `__proto__` stay what they are. */
function written(all: readonly Entry[], space = ""): string {
  let at = 0;
  const rows = all.map(({ name, dtype, shape }) => {
    const begin = at;
    at += tensorBytes(dtype, shape);
    const offsets = `"data_offsets":[${begin},${at}]`;
    return `${JSON.stringify(name)}:${space}{"shape":[${shape}],${offsets},${space}"dtype":"${dtype}"}`;
  });
  return `{${rows.join(`,${space}`)}}${space}`;
}

test("what is written is read", () => {
  const spaces = fc.constantFrom("", " ", "\n\t ");
  fc.assert(
    fc.property(entries, spaces, (all, space) => {
      const layout = Layout.parse(layoutOf(written(all, space)));
      assert.deepEqual(
        new Map(layout.tensors.map(({ name, dtype, shape }) => [name, { name, dtype, shape }])),
        new Map(all.map((e) => [e.name, e])),
      );
      assert.equal(
        layout.nbytes,
        all.reduce((sum, e) => sum + tensorBytes(e.dtype, e.shape), 0),
      );
    }),
  );
});

test("names that objects have of their own are names like others", () => {
  for (const name of ["__proto__", "constructor", "toString", "hasOwnProperty"]) {
    const layout = Layout.parse(
      layoutOf(`{"__metadata__":{"${name}2":"${name}"},"${name}":${BYTE}}`),
    );
    assert.deepEqual([...layout.byName.keys()], [name, `${name}2`]);
    assert.deepEqual([...layout.aliases], [[`${name}2`, name]]);
  }
});

const WRONG = {
  "a key twice": `{"x":${BYTE},"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`,
  "a key twice, by an escape": `{"x":${BYTE},"\\u0078":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`,
  "a fraction of zero": '{"x":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}',
  "an exponent": '{"x":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}}',
  "minus zero": '{"x":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}',
  "a plus": '{"x":{"dtype":"U8","shape":[+1],"data_offsets":[0,1]}}',
  "a zero before a number": '{"x":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}}',
  "2^53": '{"x":{"dtype":"U8","shape":[9007199254740992],"data_offsets":[0,9007199254740992]}}',
  "a half surrogate": `{"\\ud800":${BYTE}}`,
  "an escape that is none": `{"\\x78":${BYTE}}`,
  "a control character": `{"a\nb":${BYTE}}`,
  "a string without an end": '{"x',
  "an escape without an end": '{"x\\',
  "metadata twice": '{"__metadata__":{},"__metadata__":{}}',
  "a field twice": '{"x":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
  "a comma too many": `{"x":${BYTE},}`,
};
for (const [what, json] of Object.entries(WRONG)) {
  test(`no layout: ${what}`, () => assert.throws(() => Layout.parse(layoutOf(json)), LayoutError));
}

test("depth costs nothing", () => {
  const deep = 10_000_000;
  for (const open of ["[", '{"a":', '{"__metadata__":{"a":']) {
    const json = open.repeat(Math.floor(deep / open.length));
    assert.throws(() => Layout.parse(layoutOf(json)), LayoutError);
  }
});

test("reading takes time in proportion to the bytes", () => {
  const tensor = (i: number) =>
    `"${"n".repeat(50)}${i}":{"dtype":"U8","shape":[1],"data_offsets":[${i},${i + 1}]}`;
  const seconds = (count: number) => {
    const bytes = layoutOf(`{${Array.from({ length: count }, (_, i) => tensor(i)).join(",")}}`);
    const before = process.cpuUsage();
    assert.equal(Layout.parse(bytes).tensors.length, count);
    return process.cpuUsage(before).user / 1e6;
  };
  seconds(1000); // once, to warm up
  const [small, large] = [seconds(5_000), seconds(50_000)];
  assert.ok(large < 40 * small + 1, `${small} s for 5000 tensors, ${large} s for 50000`);
});

test("any bytes are a layout, or a LayoutError", () => {
  fc.assert(
    fc.property(fc.uint8Array({ maxLength: 60 }), fc.boolean(), (bytes, framed) => {
      try {
        Layout.parse(framed ? layoutOf(`{${Buffer.from(bytes).toString("latin1")}`) : bytes);
      } catch (error) {
        assert.ok(error instanceof LayoutError, String(error));
      }
    }),
  );
});

/** Return the processor's milliseconds that some work takes, the least of three times. */
function cost(work: () => void): number {
  const times = [1, 2, 3].map(() => {
    const begun = process.cpuUsage();
    work();
    const { user, system } = process.cpuUsage(begun);
    return (user + system) / 1000;
  });
  return Math.min(...times);
}

const GROWING: Record<string, (count: number) => string> = {
  "of tensors": (count) =>
    `{${Array.from({ length: count }, (_, i) => `"t${i}":${EMPTY_TENSOR}`).join()}}`,
  "of metadata": (count) =>
    `{"__metadata__":{${Array.from({ length: 4 * count }, (_, i) => `"${i}":"${i}"`).join()}}}`,
  "of aliases": (count) =>
    `{"__metadata__":{${Array.from({ length: 4 * count }, (_, i) => `"${i}":"t"`).join()}},` +
    `"t":${EMPTY_TENSOR}}`,
  "with a long name": (count) => `{"${"a".repeat(100 * count)}":${EMPTY_TENSOR}}`,
  "with escapes": (count) => `{"${"\\\\u0041".repeat(20 * count)}":${EMPTY_TENSOR}}`,
  "of spaces": (count) => `{${" ".repeat(100 * count)}}`,
  "with a key twice at its end": (count) =>
    `{"a":${EMPTY_TENSOR},${Array.from({ length: count }, (_, i) => `"t${i}":${EMPTY_TENSOR}`).join()},` +
    `"a":${EMPTY_TENSOR}}`,
};
const EMPTY_TENSOR = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}';
for (const [what, json] of Object.entries(GROWING)) {
  test(`the time for a layout ${what} does not grow with the square`, () => {
    const [short, long] = [2_000, 16_000].map((count) => {
      const bytes = layoutOf(json(count));
      return cost(() => {
        try {
          Layout.parse(bytes);
        } catch (error) {
          assert.ok(error instanceof LayoutError, String(error));
        }
      });
    }) as [number, number];
    assert.ok(long < 8 * 3 * (short + 3), `${short} ms, and ${long} for eight times as much`);
  });
}
