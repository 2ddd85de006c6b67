/** Every case of the golden vectors, which belong to all languages. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { type Row, vectors } from "../driver/vectors.js";
import { convert, elements } from "../src/casts.js";
import type { Dtype } from "../src/dtypes.js";

const FOLDER = new URL("../../../tests/vectors/", import.meta.url).pathname;

type Expect = { ok?: Row; error?: string; payloads?: number } & Record<string, unknown>;
interface Case extends Record<string, unknown> {
  name?: string;
  expect: Expect;
  steps: { expect: StepExpect }[];
}
interface StepExpect {
  sends?: Row[];
  silent?: string[];
  asks?: number[];
  runs?: Row;
}

interface Schema {
  $ref?: string;
  anyOf?: Schema[];
  items?: Schema;
  properties?: Record<string, Schema & { default?: unknown }>;
  additionalProperties?: Schema;
}

/** The messages and objects, with the defaults of their fields. */
const { $defs } = JSON.parse(
  readFileSync(`${FOLDER}../../docs/protocol/messages.schema.json`, "utf8"),
) as { $defs: Record<string, Schema> };

/** Return a message with the fields that it leaves out; a value that is not a message as it is. */
function filled(message: Row | undefined): Row | undefined {
  return message && (fill($defs[String(message.type)], message) as Row);
}

function fill(schema: Schema | undefined, value: unknown): unknown {
  if (schema?.$ref !== undefined) return fill($defs[schema.$ref.replace("#/$defs/", "")], value);
  if (schema?.anyOf !== undefined) return fill(schema.anyOf[0], value); // the other one is null
  if (Array.isArray(value)) return value.map((item) => fill(schema?.items, item));
  if (typeof value !== "object" || value === null) return value;
  const { properties = {}, additionalProperties } = schema ?? {};
  const defaults = Object.entries(properties).filter(([, field]) => "default" in field);
  const fields = { ...Object.fromEntries(defaults.map(([key, f]) => [key, f.default])), ...value };
  return Object.fromEntries(
    Object.entries(fields).map(([key, v]) => [
      key,
      fill(properties[key] ?? additionalProperties, v),
    ]),
  );
}

const results = new Map<string, Row>();
for (const row of vectors(FOLDER)) results.set(`${row.file} ${row.case}`, row);

function* cases(file: string, list = "cases"): Generator<[name: string, c: Case, result: Row]> {
  const table = JSON.parse(readFileSync(`${FOLDER}${file}`, "utf8"));
  for (const [index, c] of (table[list] as Case[]).entries()) {
    const name = `${Object.keys(table).length > 2 ? `${list}/` : ""}${c.name ?? index}`;
    yield [name, c, results.get(`${file} ${name}`) ?? {}];
  }
}

/** Where a case allows both a reading and an error, either is right. */
function agree(name: string, expected: Expect, result: Row): void {
  if (expected.error !== undefined && "error" in result) {
    assert.equal(result.error, expected.error, name);
  } else {
    const ok = result.ok as Row | undefined;
    assert.deepEqual(filled(ok), filled(expected.ok), `${name}: ${JSON.stringify(result)}`);
  }
}

/** The cases of all lists of messages, or of sequences. */
function* all(list: "messages" | "sequences"): ReturnType<typeof cases> {
  yield* cases(`${list}.json`);
  if (list === "messages") yield* cases("patching.json", "headers");
  yield* cases("applying.json", list);
  yield* cases("renaming.json", list);
  if (list === "sequences") yield* cases("companions.json", list);
}

test("messages of a publisher", () => {
  for (const [name, c, result] of all("messages")) {
    if (c.direction !== "from_publisher") continue;
    agree(name, c.expect, result);
    if ("ok" in result) assert.equal(result.payloads, c.expect.payloads, name);
  }
});

test("messages of a worker", () => {
  for (const [name, c, result] of all("messages")) {
    if (c.direction !== "from_worker" || c.expect.ok === undefined) continue;
    const header = JSON.parse(String(result.header));
    assert.deepEqual(filled(header), filled({ wbp: 1, ...c.expect.ok }), name);
  }
});

for (const file of ["layouts.json", "chunks.json", "deltas.json"]) {
  test(file, () => {
    for (const [name, c, result] of cases(file)) agree(name, c.expect, result);
  });
}

/** Return the numbers that digits stand for: any NaN is as good as another. */
function numbers(hex: unknown, dtype: Dtype): number[] {
  const values = elements(Buffer.from(String(hex), "hex"), dtype);
  const found = new Float64Array(values.length);
  convert(values, dtype, found, "F64");
  return [...found];
}

test("casts.json", () => {
  for (const [name, c, row] of cases("casts.json")) {
    const { to, out } = c as unknown as { to: Dtype; out: string };
    assert.deepEqual(numbers(row.out, to), numbers(out, to), name);
  }
});

test("phases.json", () => {
  for (const [name, c, row] of cases("phases.json")) assert.equal(row.next, c.next, name);
});

test("checksums, digests, and whole versions", () => {
  for (const [name, c, row] of cases("checksums.json", "crc32c"))
    assert.equal(row.crc, c.crc, name);
  for (const [name, c, row] of cases("checksums.json", "digests")) {
    assert.equal(row.digest, c.digest, name);
  }
  for (const [name, c, row] of cases("versions.json")) assert.equal(row.digest, c.digest, name);
});

test("sealing.json", () => {
  for (const list of ["keys", "versions", "payloads", "headers"]) {
    for (const [name, c, result] of cases("sealing.json", list)) {
      agree(name, c.expect, result);
      if (list === "headers" && "ok" in result) assert.equal(result.payloads, c.expect.payloads);
    }
  }
  for (const [name, c, { counts }] of cases("sealing.json", "messages")) {
    const expected = (c.messages as { counts: Row | null }[]).map(({ counts: row }) => {
      const { wbp: _, ...fields } = row ?? {};
      return row && fields;
    });
    for (const [index, fields] of expected.entries()) {
      const found = (counts as (Row | null)[])[index];
      if (fields === null) assert.equal(found, null, name);
      else assert.ok(found && has(found, fields), `${name}: ${JSON.stringify(found)}`);
    }
  }
});

function has(message: Row, fields: Row): boolean {
  const same = (key: string) => JSON.stringify(message[key]) === JSON.stringify(fields[key]);
  return Object.keys(fields).every(same);
}

function checkStep(name: string, expected: StepExpect, sent: Row[], runs: Row, asks: number[]) {
  for (const fields of expected.sends ?? []) {
    const found = sent.some((message) => has(filled(message) ?? {}, fields));
    assert.ok(found, `${name}: ${JSON.stringify(fields)} was not sent: ${JSON.stringify(sent)}`);
  }
  for (const type of expected.silent ?? []) {
    assert.ok(!sent.some((message) => message.type === type), `${name}: ${type} was sent`);
  }
  if (expected.asks !== undefined)
    assert.deepEqual([...new Set(asks)].sort(), [...expected.asks].sort(), name);
  for (const [model, version] of Object.entries(expected.runs ?? {})) {
    assert.equal(runs[model] ?? 0, version, `${name}: ${model} runs another version`);
  }
}

test("sequences", () => {
  let count = 0;
  for (const [name, c, result] of all("sequences")) {
    let asks: number[] = [];
    const steps = result.steps as { sent: Row[]; runs: Row }[];
    for (const [index, { expect = {} }] of c.steps.entries()) {
      const { sent, runs } = steps[index] ?? { sent: [], runs: {} };
      for (const message of sent.filter((m) => m.type === "fetch")) {
        const { first = 0, count = 0 } = message as { first?: number; count?: number };
        asks.push(...Array.from({ length: count }, (_, i) => first + i));
      }
      checkStep(`${name}, step ${index}`, expect, sent, runs, asks);
      if (expect.asks !== undefined) asks = [];
    }
    count += 1;
  }
  assert.ok(count >= 80);
});
