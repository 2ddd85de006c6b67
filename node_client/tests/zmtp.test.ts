/** The stream of a publisher: cut anywhere, broken anyhow. */

import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { Lease } from "../src/transfer.js";
import { type Handlers, Stream, ZmtpError } from "../src/zmtp.js";
import { frame, GREETING, message, READY } from "./streams.js";

/** A stream, what it sends, and the messages that come of it. */
class Peer {
  readonly sent: Buffer[] = [];
  readonly messages: string[][] = [];
  readonly stream: Stream;

  constructor(place: Handlers["place"] = (_, size) => new Lease(new Uint8Array(size))) {
    this.stream = new Stream({
      place,
      send: (bytes) => this.sent.push(Buffer.from(bytes)),
      message: (frames) => this.messages.push(frames.map((f) => Buffer.from(f).toString("hex"))),
    });
    this.stream.greet();
  }

  /** Let bytes arrive, as many at once as there is room and `sizes` says. */
  feed(bytes: Uint8Array, sizes: Iterator<number> = [].values()): void {
    for (let at = 0; at < bytes.length; ) {
      const room = this.stream.room();
      const piece = bytes.subarray(at, at + Math.min(room.length, sizes.next().value ?? 2 ** 20));
      room.set(piece);
      this.stream.received(piece.length);
      at += piece.length;
    }
  }
}

function hex(parts: readonly Uint8Array[]): string[] {
  return parts.map((part) => Buffer.from(part).toString("hex"));
}

const part = fc.oneof(
  fc.uint8Array({ maxLength: 300 }),
  fc.constant(new Uint8Array(100_000).fill(7)),
);
const parts = fc.tuple(fc.uint8Array({ maxLength: 300 }), fc.uint8Array({ maxLength: 300 }), part);
const cuts = fc.infiniteStream(
  fc.oneof(fc.integer({ min: 1, max: 20 }), fc.integer({ min: 1, max: 9999 })),
);

test("any cut of the stream gives the same messages", () => {
  fc.assert(
    fc.property(fc.array(parts, { maxLength: 4 }), cuts, (messages, sizes) => {
      const peer = new Peer();
      const bytes = Buffer.concat([GREETING, READY, ...messages.map((m) => message(...m))]);
      peer.feed(bytes, sizes);
      assert.deepEqual(peer.messages, messages.map(hex));
    }),
  );
});

test("any bytes are messages, or a ZmtpError", () => {
  fc.assert(
    fc.property(fc.uint8Array({ maxLength: 200 }), cuts, (bytes, sizes) => {
      const peer = new Peer();
      try {
        peer.feed(Buffer.concat([GREETING, READY, bytes]), sizes);
      } catch (error) {
        assert.ok(error instanceof ZmtpError, String(error));
      }
    }),
  );
});

test("topics are asked for once the publisher is ready, and each once", () => {
  const peer = new Peer();
  peer.stream.subscribe("m/ctl", true);
  peer.feed(GREETING);
  assert.equal(peer.sent.length, 3, "greeting, in two parts, and READY");
  peer.feed(READY);
  peer.stream.subscribe("m/dat", true);
  peer.stream.subscribe("m/dat", true);
  peer.stream.subscribe("m/dat", false);
  assert.deepEqual(hex(peer.sent.slice(3)), [
    "00066d".replace("6d", "01") + Buffer.from("m/ctl").toString("hex"),
    `000601${Buffer.from("m/dat").toString("hex")}`,
    `000600${Buffer.from("m/dat").toString("hex")}`,
  ]);
});

test("a ping is answered with its context", () => {
  const peer = new Peer();
  const ping = Buffer.from("\x04PING\0\x10context", "latin1");
  peer.feed(Buffer.concat([GREETING, READY, frame(ping, 4)]));
  assert.equal(peer.sent.at(-1)?.toString("latin1"), "\x04\x0c\x04PONGcontext");
});

const BROKEN: Record<string, Uint8Array> = {
  "another protocol": Buffer.alloc(64, "HTTP/1.1 400 Bad Request\r\n"),
  "ZMTP 2": Buffer.from(GREETING.toString("hex").replace("7f03", "7f01"), "hex"),
  "another security": Buffer.from(GREETING.toString("latin1").replace("NULL\0", "CURVE"), "latin1"),
  "a message before READY": Buffer.concat([GREETING, message(Buffer.from("m"))]),
  "flags that nobody knows": Buffer.concat([GREETING, READY, Buffer.from([8, 0])]),
  "a topic of 65537 bytes": Buffer.concat([GREETING, READY, frame(Buffer.alloc(65_537))]),
  "a payload of 2^60 bytes": Buffer.concat([
    GREETING,
    READY,
    Buffer.from("0100010002" + "1000000000000000", "hex"),
  ]),
  "nine frames": Buffer.concat([GREETING, READY, Buffer.from("0100".repeat(9), "hex")]),
  "an error": Buffer.concat([GREETING, READY, frame(Buffer.from("\x05ERROR\x02no", "latin1"), 4)]),
};
for (const [what, bytes] of Object.entries(BROKEN)) {
  test(`of no use: ${what}`, () => assert.throws(() => new Peer().feed(bytes), ZmtpError));
}

const OPEN = Buffer.concat([GREETING, READY]);
const PAYLOAD = Buffer.alloc(50_000, 5);
const MESSAGE = message(Buffer.from("t"), Buffer.from("h"), PAYLOAD);

test("no memory is taken for what nobody wants", () => {
  const peer = new Peer(() => null);
  peer.feed(Buffer.concat([OPEN, MESSAGE, MESSAGE]));
  assert.deepEqual(peer.messages, [
    ["74", "68", ""],
    ["74", "68", ""],
  ]);
});

test("a place is asked for after the messages before it were told, if all come in one read", () => {
  const known: number[] = [];
  const peer: Peer = new Peer((_, size) => {
    known.push(peer.messages.length);
    return new Lease(new Uint8Array(size));
  });
  const announce = message(Buffer.from("t"), Buffer.from("announce"));
  const bytes = Buffer.concat([OPEN, announce, MESSAGE]);
  assert.ok(peer.stream.room().length >= OPEN.length + announce.length + 100, "one read");
  peer.feed(bytes);
  assert.deepEqual(known, [1]);
});

test("a place that is taken away is not written to", () => {
  const lease = new Lease(new Uint8Array(PAYLOAD.length));
  const peer = new Peer(() => lease);
  peer.feed(Buffer.concat([OPEN, MESSAGE.subarray(0, 40_000)]));
  lease.end();
  const before = lease.bytes.slice();
  assert.notEqual(peer.stream.room().buffer, lease.bytes.buffer);
  peer.feed(Buffer.concat([MESSAGE.subarray(40_000), MESSAGE]));
  assert.deepEqual(lease.bytes, before);
  assert.deepEqual(peer.messages[0], ["74", "68", ""]);
});

test("a place is given back when the connection breaks, or when nobody takes the message", () => {
  let cancelled = 0;
  const place = () =>
    new Lease(new Uint8Array(PAYLOAD.length), () => {
      cancelled += 1;
    });
  const broken = new Peer(place);
  broken.feed(Buffer.concat([OPEN, MESSAGE.subarray(0, 40_000)]));
  assert.equal(cancelled, 0);
  broken.stream.close();
  assert.equal(cancelled, 1);
  const four = message(Buffer.from("t"), Buffer.from("h"), PAYLOAD, Buffer.from("more"));
  new Peer(place).feed(Buffer.concat([OPEN, four]));
  assert.equal(cancelled, 2);
});
