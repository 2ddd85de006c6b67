/** Decodes a received patch into a version's buffer, in steps; the job may be ended between two steps. */

import { PatchError } from "./errors.js";
import { Patch } from "./patch.js";
import type { Base } from "./staging.js";

const UNWANTED = "it is no longer needed";

/** A job to decode one patch. */
export class Patching {
  #live = true;

  constructor(
    readonly model: string,
    /** The version that the patch builds on. */
    readonly base: Base,
    readonly patch: Uint8Array,
    /** The buffer to decode into. */
    readonly buffer: Uint8Array,
    /** The digest of the version. */
    readonly digest: string,
  ) {}

  /** False after `end`: the buffer may then be in use for another version. */
  get live(): boolean {
    return this.#live;
  }

  /** Cancel the job. */
  end(): void {
    this.#live = false;
  }
}

/** Decode a patch in short steps. Return the reason that it is unusable; empty if it is usable. (D5) */
export function* patching(job: Patching): Generator<void, string> {
  const { base, buffer, digest } = job;
  if (!job.live) return UNWANTED;
  try {
    const patch = new Patch(base.layout, job.patch);
    if (patch.target !== digest) {
      return `it leads to ${patch.target.slice(0, 12)}, but ${digest.slice(0, 12)} was announced`;
    }
    for (const _ of patch.steps(base.data, buffer)) {
      yield;
      if (!job.live) return UNWANTED;
      if (base.data.length < buffer.length)
        return "the user transferred the running version's memory";
    }
    return "";
  } catch (error) {
    if (error instanceof PatchError) return error.message;
    if (error instanceof RangeError) return "there is no memory to decode it";
    throw error;
  }
}
