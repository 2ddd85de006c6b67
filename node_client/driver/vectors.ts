/** Reads the golden vectors, and yields this client's result for each case. */

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { convert, elements } from "../src/casts.js";
import { crc32c, digest, digestOf } from "../src/checksum.js";
import { ChunkPlan } from "../src/chunks.js";
import { arrayType, type Dtype } from "../src/dtypes.js";
import { LayoutError, PatchError, ProtocolError } from "../src/errors.js";
import { decode, encode } from "../src/headers.js";
import { Keyring } from "../src/keyring.js";
import { Layout } from "../src/layout.js";
import type { Running, WorkerMessage } from "../src/messages.js";
import { Patch } from "../src/patch.js";
import {
  associatedOf,
  GroupKey,
  namesOf,
  nonceOf,
  Opening,
  type Purpose,
  type Subject,
} from "../src/sealing.js";
import { play, type Sequence } from "./sequences.js";
import { TABLES } from "./tables.js";

export type Row = Record<string, unknown>;
export type Blob = { text?: string; hex?: string; file?: string };

/** The fields of the cases of all tables: each case has some of these. */
interface Case extends Blob {
  name?: string;
  direction: string;
  frames: Blob[];
  header: Blob;
  expect: { ok?: { models?: Record<string, Running | null> } };
  nbytes: number;
  chunk_bytes: number;
  crcs: number[];
  layout: string;
  layout_bytes: number;
  of: string;
  state: string;
  event: string;
  from: Dtype;
  to: Dtype;
  in: string;
  group: string;
  version: Subject;
  purpose: Purpose;
  index: number;
  sealed: string;
  tag: string;
  keys: string[];
  messages: { header: string }[];
  base: [hex: string, times: number][];
  patch: Blob;
}

const SEGMENTS = "Node has no flock, so this client never uses shared memory";

/** Yield a row for every case of every table in a folder, in their order. */
export function* vectors(folder: string): Generator<Row> {
  yield* rows(folder, "messages.json", "cases", (c) => message(folder, c));
  yield* rows(folder, "layouts.json", "cases", (c) => layout(bytesOf(folder, c.header)));
  yield* rows(folder, "chunks.json", "cases", chunks);
  yield* rows(folder, "checksums.json", "crc32c", (c) => ({
    crc: crc32c(bytesOf(folder, c)),
  }));
  yield* rows(folder, "checksums.json", "digests", (c) => ({
    digest: digest(c.layout, c.chunk_bytes, c.crcs),
  }));
  yield* rows(folder, "versions.json", "cases", (c) => version(folder, c));
  yield* rows(folder, "segments.json", "cases", () => ({ unsupported: SEGMENTS }));
  yield* rows(folder, "phases.json", "cases", ({ of, state, event }) => ({
    next: TABLES[of]?.[state]?.[event] ?? null,
  }));
  for (const file of ["applying.json", "renaming.json"]) {
    yield* rows(folder, file, "messages", (c) => message(folder, c));
    yield* rows(folder, file, "sequences", (c) => sequence(folder, c));
  }
  yield* rows(folder, "companions.json", "sequences", (c) => sequence(folder, c));
  yield* rows(folder, "casts.json", "cases", (c) => ({ out: cast(c) }));
  yield* rows(folder, "deltas.json", "cases", (c) => delta(folder, c));
  yield* rows(folder, "sequences.json", "cases", (c) => sequence(folder, c));
  yield* rows(folder, "sealing.json", "keys", groupKey);
  yield* rows(folder, "sealing.json", "versions", versionKey);
  yield* rows(folder, "sealing.json", "payloads", payload);
  yield* rows(folder, "sealing.json", "messages", published);
  yield* rows(folder, "sealing.json", "headers", (c) => message(folder, c));
  yield* rows(folder, "patching.json", "headers", (c) => message(folder, c));
  yield* rows(folder, "metadata.json", "messages", (c) => message(folder, c));
}

function* rows(
  folder: string,
  file: string,
  list: string,
  result: (c: Case) => Row | null,
): Generator<Row> {
  const table = JSON.parse(readFileSync(join(folder, file), "utf8")) as Record<string, Case[]>;
  const several = Object.keys(table).length > 2; // lists of cases, besides the key `format`
  for (const [index, c] of (table[list] ?? []).entries()) {
    const name = c.name ?? String(index);
    const found = result(c);
    if (found !== null) yield { file, case: several ? `${list}/${name}` : name, ...found };
  }
}

function bytesOf(folder: string, { text, hex, file }: Blob): Buffer {
  if (file !== undefined) return readFileSync(join(folder, file));
  return text !== undefined ? Buffer.from(text) : Buffer.from(hex ?? "", "hex");
}

function message(folder: string, c: Case): Row | null {
  if (c.direction === "from_worker") {
    const fields = c.expect.ok;
    if (fields === undefined) return null;
    const models = fields.models && { models: new Map(Object.entries(fields.models)) };
    return { header: encode({ ...fields, ...models } as WorkerMessage) };
  }
  const frames = c.frames.map((blob) => bytesOf(folder, blob));
  return tried(() => {
    const decoded = decode(frames);
    return { ok: plain(decoded.message), payloads: decoded.payloads.length };
  });
}

/** Return a message with objects instead of maps, and base64 instead of bytes. */
function plain(fields: object): Row {
  return Object.fromEntries(Object.entries(fields).map(([key, value]) => [key, written(value)]));
}

function written(value: unknown): unknown {
  if (value instanceof Uint8Array) return Buffer.from(value).toString("base64");
  return value instanceof Map ? Object.fromEntries(value) : value;
}

function groupKey({ group }: Case): Row {
  const key = new GroupKey(group);
  return { ok: { id: key.id, messages: key.messageKey.toString("hex") } };
}

function versionKey({ group, version }: Case): Row {
  const names = namesOf(version);
  const key = new GroupKey(group).versionKey(names);
  return { ok: { names: names.toString("hex"), key: key.toString("hex") } };
}

function payload({ group, version, purpose, index, sealed, tag }: Case): Row {
  const bytes = Buffer.from(sealed, "hex");
  const nonce = nonceOf(purpose, index);
  const associated = associatedOf(version, purpose, index, bytes.length);
  const key = new GroupKey(group).versionKey(namesOf(version));
  const opening = new Opening(key, nonce, associated, Buffer.from(tag, "hex"));
  const crc = opening.decrypt(bytes, bytes);
  if (crc === null) return { error: "sealed" };
  const [text, ...bound] = [bytes, nonce, associated].map((some) => some.toString("hex"));
  return { ok: { plain: text, crc, nonce: bound[0], associated: bound[1] } };
}

/** Return the decrypted messages, for a worker that has the group keys; null for ignored ones. */
function published({ keys, messages }: Case): Row {
  const keyring = new Keyring();
  keyring.begin(keys);
  const counts = messages.map(({ header }) => {
    const decoded = keyring.published(decode([Buffer.from(header)]));
    return decoded && plain(decoded.message);
  });
  return { counts };
}

function sequence(folder: string, c: Case): Row {
  return { steps: play(c as unknown as Sequence, (blob) => bytesOf(folder, blob)) };
}

function layout(bytes: Uint8Array): Row {
  return tried(() => {
    const { id, nbytes, tensors, aliases, metadata, byName } = Layout.parse(bytes);
    const order = [...byName.keys()].filter((name) => !aliases.has(name));
    const texts = { aliases: written(aliases), metadata: written(metadata) };
    return { ok: { id, nbytes, tensors, ...texts, order } };
  });
}

function chunks(c: Case): Row {
  return tried(() => {
    const plan = new ChunkPlan(c.nbytes, c.chunk_bytes);
    const spans = Array.from({ length: plan.count }, (_, index) => plan.span(index));
    return { ok: { count: plan.count, spans } };
  });
}

/** Return the values of a case, converted to another dtype, in hexadecimal digits. */
function cast({ from, to, in: bytes }: Case): string {
  const values = elements(Buffer.from(bytes, "hex"), from);
  const target = new (arrayType(to))(values.length);
  convert(values, from, target, to);
  return Buffer.from(target.buffer).toString("hex");
}

function delta(folder: string, c: Case): Row {
  const layout = Layout.parse(bytesOf(folder, c.layout as unknown as Blob));
  const base = Buffer.from(c.base.map(([hex, times]) => hex.repeat(times)).join(""), "hex");
  const data = Uint8Array.from(base);
  const answer = tried(() => {
    new Patch(layout, bytesOf(folder, c.patch)).apply(data);
    return { ok: { digest: digestOf(layout.id, 2 ** 12, data) } };
  });
  const late = c.name === "another target"; // detected only after the bytes have changed
  if ("error" in answer && !late && !base.equals(data)) return { error: "bytes have changed" };
  return answer;
}

function version(folder: string, c: Case): Row {
  const bytes = bytesOf(folder, c);
  const head = bytes.subarray(0, c.layout_bytes);
  const data = bytes.subarray(c.layout_bytes);
  const plan = new ChunkPlan(data.length, c.chunk_bytes);
  const crcs = Array.from({ length: plan.count }, (_, i) => crc32c(data.subarray(...plan.span(i))));
  return { digest: digest(Layout.parse(head).id, plan.chunkBytes, crcs) };
}

function tried(result: () => Row): Row {
  try {
    return result();
  } catch (error) {
    return { error: codeOf(error) };
  }
}

function codeOf(error: unknown): string {
  if (error instanceof ProtocolError) return error.code;
  if (error instanceof LayoutError) return "layout-invalid";
  if (error instanceof PatchError) return "patch";
  if (error instanceof RangeError) return "chunk-bytes";
  throw error;
}
