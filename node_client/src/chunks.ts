/** How a data section is cut into chunks (section 5.5 of the protocol). */

import { CHUNK_BYTES_MAX } from "./limits.js";

/** The chunks of `nbytes` bytes: all of `chunkBytes` but the last, none where there are no bytes. */
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

  /** Return where a chunk begins and ends. */
  span(index: number): readonly [begin: number, end: number] {
    const begin = index * this.chunkBytes;
    return [begin, Math.min(begin + this.chunkBytes, this.nbytes)];
  }
}
