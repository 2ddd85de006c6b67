/** What must hold of any bytes, as properties; each is one claim. */

import assert from "node:assert/strict";
import fc from "fast-check";
import { LayoutError, PatchError, ProtocolError } from "../src/errors.js";
import { decode } from "../src/headers.js";
import { Layout } from "../src/layout.js";
import { Patch } from "../src/patch.js";
import { Lease } from "../src/transfer.js";
import { Stream, ZmtpError } from "../src/zmtp.js";
import { layoutOf } from "../tests/published.js";
import { GREETING, message, READY } from "../tests/streams.js";
import { damaged, headers, layouts, patches } from "./cases.js";
import { keyed } from "./keyed.js";
import { machine } from "./machine.js";

type Kind = abstract new (...args: never[]) => Error;

/** Return the result; undefined if it threw the one kind of error that it may throw. */
function allowed<T>(kind: Kind, result: () => T): T | undefined {
  try {
    return result();
  } catch (error) {
    if (error instanceof kind) return undefined;
    throw error;
  }
}

/** A header is a message or a ProtocolError. */
const header = fc.property(damaged(headers), fc.nat(2), (bytes, payloads) => {
  const frames = Array.from({ length: payloads }, () => new Uint8Array(1));
  const decoded = allowed(ProtocolError, () => decode([bytes, ...frames]));
  if (decoded !== undefined) assert.equal(decoded.payloads.length, payloads);
});

/** Bytes are a layout or a LayoutError; a layout is what JSON.parse makes of it, and has no gaps. */
const layout = fc.property(damaged(layouts), fc.boolean(), (bytes, framed) => {
  const whole = framed ? layoutOf(Buffer.from(bytes.subarray(8)).toString()) : bytes;
  const parsed = allowed(LayoutError, () => Layout.parse(whole));
  if (parsed === undefined) return;
  const text = Buffer.from(whole.subarray(8)).toString();
  const json = JSON.parse(text);
  const { __metadata__: metadata = {}, ...tensors } = json;
  assert.equal(parsed.tensors.length, Object.keys(tensors).length);
  assert.deepEqual(new Map(parsed.metadata), new Map(Object.entries(metadata)));
  let at = 0;
  for (const { name, dtype, shape, begin, end } of parsed.tensors) {
    assert.deepEqual({ dtype, shape, data_offsets: [begin, end] }, { ...tensors[name] });
    assert.equal(begin, at);
    at = end;
  }
  assert.equal(parsed.nbytes, at);
  // Outside of strings there is one colon for each key, and so many keys are known.
  const bare = text.replace(/"(?:[^"\\]|\\.)*"/gs, "");
  const keys = 4 * parsed.tensors.length + parsed.metadata.size + ("__metadata__" in json ? 1 : 0);
  assert.equal(bare.split(":").length - 1, keys);
  assert.doesNotMatch(bare, /[-+.eE]/);
});

const patched = fc
  .tuple(fc.constantFrom(...patches), fc.boolean())
  .chain(([{ layout, base, patch }, whole]) => {
    const [head, body] = [patch.subarray(0, 120), patch.subarray(120)]; // digests; few may change
    const spoilt = whole ? damaged([patch]) : damaged([body]).map((b) => Buffer.concat([head, b]));
    return spoilt.map((bytes) => ({ layout, base, bytes }));
  });

/** A patch is refused, and then not a byte has changed, or all of it can be read. */
const patch = fc.property(patched, ({ layout, base, bytes }) => {
  const parsed = allowed(PatchError, () => new Patch(Layout.parse(layout), bytes));
  const data = Uint8Array.from(base);
  const put = parsed && allowed(PatchError, () => parsed.put(data) ?? true);
  if (put === undefined) assert.ok(base.equals(data));
});

/** Feed a stream in pieces; return what came of it: messages, and whether it broke. */
function streamed(bytes: Uint8Array, pieces: Iterator<number>): unknown[] {
  const messages: unknown[] = [];
  const stream = new Stream({
    send: () => {},
    place: (_, size) => (size < 2 ** 20 ? new Lease(new Uint8Array(size)) : null),
    message: (frames) => messages.push(frames.map((frame) => Buffer.from(frame).toString("hex"))),
  });
  const whole = allowed(ZmtpError, () => {
    for (let at = 0; at < bytes.length; ) {
      const room = stream.room();
      assert.ok(room.length > 0, "there is always room");
      const piece = bytes.subarray(at, at + Math.min(room.length, pieces.next().value ?? 2 ** 20));
      room.set(piece);
      stream.received(piece.length);
      at += piece.length;
    }
    return "whole";
  });
  return [...messages, whole];
}

const PAYLOAD = Buffer.alloc(600, 1);
const dialogue = Buffer.concat([
  GREETING,
  READY,
  message(Buffer.from("m/ctl"), headers[0] ?? PAYLOAD),
  message(Buffer.from("m/dat"), headers[1] ?? PAYLOAD, PAYLOAD),
  message(Buffer.from("m/dat"), PAYLOAD, PAYLOAD, PAYLOAD),
]);
const sizes = fc.infiniteStream(
  fc.oneof(fc.integer({ min: 1, max: 9 }), fc.integer({ min: 1, max: 700 })),
);

/** A stream gives the same messages however it is cut, and breaks in the same place. */
const stream = fc.property(damaged([dialogue]), sizes, (bytes, pieces) => {
  assert.deepEqual(streamed(bytes, pieces), streamed(bytes, [].values()));
});

export const targets = { header, layout, patch, stream, machine, keyed };
