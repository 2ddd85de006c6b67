/** What the fuzzer starts from: the golden vectors, and ways to damage them. */

import { readFileSync } from "node:fs";
import { join } from "node:path";
import fc from "fast-check";

const FOLDER = new URL("../../../tests/vectors/", import.meta.url).pathname;

type Blob = { text?: string; hex?: string; file?: string };
interface Case {
  readonly direction?: string;
  readonly frames?: readonly Blob[];
  readonly header?: Blob;
  readonly layout?: Blob;
  readonly base?: readonly [hex: string, times: number][];
  readonly patch?: Blob;
  readonly steps?: readonly {
    readonly control?: Blob[];
    readonly data?: Blob[];
    wait_ms?: number;
  }[];
}

function table(file: string, list = "cases"): Case[] {
  return JSON.parse(readFileSync(join(FOLDER, file), "utf8"))[list];
}

function bytesOf({ text, hex, file }: Blob): Buffer {
  if (file !== undefined) return readFileSync(join(FOLDER, file));
  return text !== undefined ? Buffer.from(text) : Buffer.from(hex ?? "", "hex");
}

/** Of moderate size: what is long is slow, and breaks in the same ways. */
function short(bytes: Uint8Array): boolean {
  return bytes.length < 5000;
}

const ofFeatures = ["sealing.json", "patching.json"].flatMap((file) => table(file, "headers"));
export const headers = [...table("messages.json"), ...ofFeatures]
  .filter((c) => c.direction === "from_publisher")
  .map((c) => (c.frames ?? []).map(bytesOf))
  .flatMap(([header]) => (header !== undefined && short(header) ? [header] : []));
export const layouts = table("layouts.json")
  .map((c) => bytesOf(c.header ?? {}))
  .filter(short);

/** Patches, with what they are for. */
export const patches = table("deltas.json").flatMap(({ layout = {}, base = [], patch = {} }) => {
  const digits = base.map(([hex, times]) => hex.repeat(times)).join("");
  const data = Buffer.from(digits, "hex");
  return short(data) ? [{ layout: bytesOf(layout), base: data, patch: bytesOf(patch) }] : [];
});

/** One thing that happens to a worker. */
export type Step =
  | { readonly wait: number }
  | { readonly pushed: boolean; readonly frames: readonly Uint8Array[] };

/** Conversations that make sense. */
export const conversations: Step[][] = table("sequences.json").map((c) =>
  (c.steps ?? []).map(({ wait_ms, control, data }) =>
    wait_ms === undefined
      ? { pushed: data !== undefined, frames: (data ?? control ?? []).map(bytesOf) }
      : { wait: wait_ms },
  ),
);

/** A change of some bytes: what is cut out, and what stands there then. */
interface Change {
  readonly at: number;
  readonly cut: number;
  readonly put: Uint8Array;
}
const TOKENS = [
  '"',
  "{",
  "}",
  "[",
  "]",
  ":",
  ",",
  "0",
  "-",
  "1e9",
  "9007199254740992",
  "null",
  "\\u0000",
];
const piece = fc.oneof(
  fc.uint8Array({ maxLength: 4 }),
  fc.constantFrom(...TOKENS).map((token) => new Uint8Array(Buffer.from(token))),
  fc.constantFrom(...headers).map((header) => new Uint8Array(header.subarray(0, 40))),
);
const change: fc.Arbitrary<Change> = fc.record({
  at: fc.nat(2 ** 16),
  cut: fc.oneof(fc.constantFrom(0, 1), fc.nat(30)),
  put: piece,
});

function changed(bytes: Uint8Array, changes: readonly Change[]): Uint8Array {
  return changes.reduce<Uint8Array>((now, { at, cut, put }) => {
    const where = at % (now.length + 1);
    return Buffer.concat([now.subarray(0, where), put, now.subarray(where + cut)]);
  }, bytes);
}

/** Some of these bytes, damaged in a few places, or as they are. */
export function damaged(seeds: readonly Uint8Array[]): fc.Arbitrary<Uint8Array> {
  const changes = fc.array(change, { maxLength: 3 });
  return fc.tuple(fc.constantFrom(...seeds), changes).map(([seed, all]) => changed(seed, all));
}
