/** A patch on its way to the version that it leads to, which is decoded while the event loop turns. */

import { PatchError } from "./errors.js";
import { Patch } from "./patch.js";
import type { Base } from "./staging.js";

const UNWANTED = "nobody wants it any more";

/** What is to be decoded. */
export class Patching {
  #live = true;

  constructor(
    readonly model: string,
    /** What the patch builds on. */
    readonly base: Base,
    readonly patch: Uint8Array,
    /** Where to. */
    readonly buffer: Uint8Array,
    /** What the version hashes to. */
    readonly digest: string,
  ) {}

  /** Until nobody wants it any more: its memory is then another's. */
  get live(): boolean {
    return this.#live;
  }

  /** Nobody wants it any more. */
  end(): void {
    this.#live = false;
  }
}

/** Decode a patch, a little at each step; return why it is of no use, nothing if it is. (D5) */
export function* patching(job: Patching): Generator<void, string> {
  const { base, buffer, digest } = job;
  if (!job.live) return UNWANTED;
  try {
    const patch = new Patch(base.layout, job.patch);
    if (patch.target !== digest) {
      return `it leads to ${patch.target.slice(0, 12)}; announced is ${digest.slice(0, 12)}`;
    }
    for (const _ of patch.steps(base.data, buffer)) {
      yield;
      if (!job.live) return UNWANTED;
      if (base.data.length < buffer.length) return "the memory of what runs was transferred";
    }
    return "";
  } catch (error) {
    if (error instanceof PatchError) return error.message;
    if (error instanceof RangeError) return "there is no memory to decode it";
    throw error;
  }
}
