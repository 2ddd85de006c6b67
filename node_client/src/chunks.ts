/** Divides a data section into chunks (section 5.5 of the protocol). */

import { CHUNK_BYTES_MAX } from "./limits.js";

/** Divides `nbytes` bytes into `count` chunks of `chunkBytes` bytes; the last may be shorter. */
export class ChunkPlan {
  readonly count: number;

  constructor(
    readonly nbytes: number,
    readonly chunkBytes: number,
  ) {
    if (!Number.isInteger(chunkBytes) || chunkBytes < 1 || chunkBytes > CHUNK_BYTES_MAX) {
      throw new RangeError(`chunks of ${chunkBytes} bytes; 1 to ${CHUNK_BYTES_MAX} are allowed`);
    }
    this.count = Math.ceil(nbytes / chunkBytes);
  }

  /** Return the byte range of a chunk. */
  span(index: number): readonly [begin: number, end: number] {
    const begin = index * this.chunkBytes;
    return [begin, Math.min(begin + this.chunkBytes, this.nbytes)];
  }
}
