/** How long it takes to open sealed bytes in their place, as they are received: what keys cost. */

import { createCipheriv, createDecipheriv } from "node:crypto";
import { AES_256_GCM, Opening, PIECE_BYTES, release } from "../src/sealing.js";
import { Lease } from "../src/transfer.js";

const CHUNK_BYTES = 2 ** 20;
const RECEIVED_BYTES = 2 ** 18; // at once, from the kernel
const ROUNDS = 5;
const [KEY, NONCE, NOTHING] = [Buffer.alloc(32, 1), Buffer.alloc(12, 2), Buffer.alloc(0)];

/** Return the seconds of the best round: to open, copy and hash; and of AES, with its copy, alone. */
export function opening(nbytes: number): { bytes: number; open_s: number; aes_s: number } {
  const cipher = createCipheriv(AES_256_GCM, KEY, NONCE);
  const sealed = cipher.update(Buffer.alloc(CHUNK_BYTES, 3));
  cipher.final();
  const tag = cipher.getAuthTag();
  const memory = new Uint8Array(Math.ceil(nbytes / CHUNK_BYTES) * CHUNK_BYTES);
  const chunks = Array.from({ length: memory.length / CHUNK_BYTES }, (_, index) =>
    memory.subarray(index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES),
  );
  const rounds = Array.from({ length: ROUNDS }, () => {
    for (const chunk of chunks) chunk.set(sealed);
    return [timed(chunks, (chunk) => open(chunk, tag)), timed(chunks, () => decipher(sealed, tag))];
  });
  const [open_s = 0, aes_s = 0] = [0, 1].map((n) => Math.min(...rounds.map((r) => r[n] ?? 0)));
  return { bytes: memory.length, open_s, aes_s };
}

function timed(chunks: readonly Uint8Array[], work: (chunk: Uint8Array) => void): number {
  const begun = performance.now();
  for (const chunk of chunks) work(chunk);
  return (performance.now() - begun) / 1000;
}

/** Open a chunk as the data connection does. */
function open(chunk: Uint8Array, tag: Uint8Array): void {
  const lease = new Lease(chunk, undefined, new Opening(KEY, NONCE, NOTHING, tag));
  while (lease.count < chunk.length) lease.received(lease.room(RECEIVED_BYTES).length);
  if (lease.opening?.proves() !== true) throw new Error("it cannot be opened");
}

/** What the library does by itself, into memory that is given back at once. */
function decipher(sealed: Uint8Array, tag: Uint8Array): void {
  const aes = createDecipheriv(AES_256_GCM, KEY, NONCE).setAuthTag(tag);
  for (let at = 0; at < sealed.length; at += PIECE_BYTES) {
    release(aes.update(sealed.subarray(at, at + PIECE_BYTES)));
  }
  aes.final();
}
