/** The bytes that a publisher sends over ZMTP. */

export const GREETING = Buffer.concat([
  Buffer.from("ff00000000000000017f0301", "hex"),
  Buffer.from("NULL".padEnd(20, "\0")),
  Buffer.alloc(32),
]);
export const READY = frame(Buffer.from("\x05READY\x0bSocket-Type\0\0\0\x04XPUB", "latin1"), 4);

export const ROUTER_READY = frame(
  Buffer.from("\x05READY\x0bSocket-Type\0\0\0\x06ROUTER", "latin1"),
  4,
);

export function frame(body: Uint8Array, flags = 0): Buffer {
  if (body.length < 256) return Buffer.concat([Buffer.from([flags, body.length]), body]);
  const head = Buffer.alloc(9);
  head[0] = flags | 2;
  head.writeBigUInt64BE(BigInt(body.length), 1);
  return Buffer.concat([head, body]);
}

export function message(...parts: Uint8Array[]): Buffer {
  return Buffer.concat(parts.map((part, i) => frame(part, i < parts.length - 1 ? 1 : 0)));
}
