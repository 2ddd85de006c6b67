/** Runs long work in slices of time, between which the event loop runs. */

import { setImmediate } from "node:timers/promises";
import { SLICE_MS } from "./limits.js";

const PAGE_BYTES = 4096;
const PIECE_BYTES = 2 ** 20;

/** Run all steps in slices, the first one before this call returns. Return the iterator's result. */
export async function inSlices<T>(steps: Iterable<void, T>): Promise<T> {
  const iterator = steps[Symbol.iterator]();
  let since = performance.now();
  for (;;) {
    const step = iterator.next();
    if (step.done) return step.value;
    if (performance.now() - since < SLICE_MS) continue;
    await setImmediate();
    since = performance.now();
  }
}

/** Run all steps without a pause. Return the iterator's result. */
export function atOnce<T>(steps: Iterable<void, T>): T {
  const iterator = steps[Symbol.iterator]();
  for (;;) {
    const step = iterator.next();
    if (step.done) return step.value;
  }
}

/** Yield a byte range in pieces, each of which is quick to process. */
export function* pieces(begin: number, end: number): Generator<readonly [number, number]> {
  for (let at = begin; at < end; at += PIECE_BYTES) yield [at, Math.min(at + PIECE_BYTES, end)];
}

/** Prefault new memory by writing to every page, as long as `unused` returns true. */
export function* prefault(memory: Uint8Array, unused: () => boolean): Generator<void> {
  for (const [begin, end] of pieces(0, memory.length)) {
    if (!unused()) return;
    for (let page = begin; page < end; page += PAGE_BYTES) memory[page] = 1;
    yield;
  }
}
