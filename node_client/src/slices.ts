/** Work on much memory, a slice at a time: the event loop turns in between. */

import { setImmediate } from "node:timers/promises";
import { SLICE_MS } from "./limits.js";

const PAGE_BYTES = 4096;
const PIECE_BYTES = 2 ** 20;

/** Do all steps, some within each turn of the event loop, the first at once; return what they do. */
export async function inSlices<T>(steps: Iterable<void, T>): Promise<T> {
  const each = steps[Symbol.iterator]();
  let since = performance.now();
  for (;;) {
    const step = each.next();
    if (step.done) return step.value;
    if (performance.now() - since < SLICE_MS) continue;
    await setImmediate();
    since = performance.now();
  }
}

/** Do all steps within this turn; return what they do. */
export function atOnce<T>(steps: Iterable<void, T>): T {
  const each = steps[Symbol.iterator]();
  for (;;) {
    const step = each.next();
    if (step.done) return step.value;
  }
}

/** Yield where each piece of some bytes begins and ends, none of which takes long. */
export function* pieces(begin: number, end: number): Generator<readonly [number, number]> {
  for (let at = begin; at < end; at += PIECE_BYTES) yield [at, Math.min(at + PIECE_BYTES, end)];
}

/** Write to every page of fresh memory, as long as nobody else does. */
export function* touched(memory: Uint8Array, unused: () => boolean): Generator<void> {
  for (const [begin, end] of pieces(0, memory.length)) {
    if (!unused()) return;
    for (let page = begin; page < end; page += PAGE_BYTES) memory[page] = 1;
    yield;
  }
}
