/** Work on much memory, a slice at a time: the event loop turns in between. */

import { setImmediate } from "node:timers/promises";
import { SLICE_MS } from "./limits.js";

const PAGE_BYTES = 4096;
const PIECE_BYTES = 2 ** 20;

/** Do all steps, some within each turn of the event loop, the first at once. */
export async function inSlices(steps: Iterable<void>): Promise<void> {
  let since = performance.now();
  for (const _ of steps) {
    if (performance.now() - since < SLICE_MS) continue;
    await setImmediate();
    since = performance.now();
  }
}

/** Write to every page of fresh memory, as long as nobody else does. */
export function* touched(memory: Uint8Array, unused: () => boolean): Generator<void> {
  for (let at = 0; at < memory.length; at += PIECE_BYTES) {
    if (!unused()) return;
    const end = Math.min(at + PIECE_BYTES, memory.length);
    for (let page = at; page < end; page += PAGE_BYTES) memory[page] = 1;
    yield;
  }
}
