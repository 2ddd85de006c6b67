/** What a publisher would send of a version: for tests and fuzzers, which have no publisher. */

import { crc32c, digest } from "../src/checksum.js";
import { ChunkPlan } from "../src/chunks.js";
import { Layout } from "../src/layout.js";

export type Frames = Uint8Array[];

/** Return the bytes of a layout: its length, and then its JSON. */
export function layoutOf(json: string | object): Uint8Array {
  const text = Buffer.from(typeof json === "string" ? json : JSON.stringify(json));
  const prefix = Buffer.alloc(8);
  prefix.writeBigUInt64LE(BigInt(text.length));
  return Buffer.concat([prefix, text]);
}

/** Return the header of a message. */
export function header(type: string, fields: object = {}): Uint8Array {
  return Buffer.from(JSON.stringify({ wbp: 1, type, ...fields }));
}

export function welcome(epoch: number, models: Record<string, number> = {}): Frames {
  const fields = { epoch, data: "tcp://127.0.0.1:9", ping_ms: 1000, lost_ms: 5000, models };
  return [header("welcome", fields)];
}

export interface Options {
  readonly chunkBytes?: number;
  readonly commit?: "auto" | "together";
  readonly acknowledge?: "applied" | "staged";
}

/** A version of model `m` with one tensor `w` of dtype U8. */
export class Published {
  readonly layout: Uint8Array;
  readonly plan: ChunkPlan;
  readonly crcs: number[];
  readonly digest: string;

  constructor(
    readonly epoch: number,
    readonly version: number,
    readonly data: Uint8Array,
    readonly options: Options = {},
  ) {
    const offsets = { data_offsets: [0, data.length] };
    this.layout = layoutOf({ w: { dtype: "U8", shape: [data.length], ...offsets } });
    this.plan = new ChunkPlan(data.length, options.chunkBytes ?? 4);
    this.crcs = Array.from({ length: this.plan.count }, (_, i) => crc32c(this.bytes(i)));
    this.digest = digest(this.id, this.plan.chunkBytes, this.crcs);
  }

  get id(): string {
    return Layout.parse(this.layout).id;
  }

  /** Return the bytes of a chunk. */
  bytes(index: number): Uint8Array {
    return this.data.subarray(...this.plan.span(index));
  }

  get #named() {
    return { model: "m", epoch: this.epoch, version: this.version };
  }

  announce(withLayout = true, changes: object = {}): Frames {
    const { commit = "auto", acknowledge = commit === "auto" ? "applied" : "staged" } =
      this.options;
    const fields = {
      ...this.#named,
      layout: this.id,
      layout_bytes: this.layout.length,
      nbytes: this.data.length,
      chunk_bytes: this.plan.chunkBytes,
      commit,
      acknowledge,
      encoding: "raw",
      ...changes,
    };
    return [header("announce", fields), ...(withLayout ? [this.layout] : [])];
  }

  whole(): Frames {
    const whole = { crc: this.crcs[0] ?? 0, digest: this.digest };
    return [...this.announce(false, { whole }), this.bytes(0)];
  }

  chunk(index: number, bytes = this.bytes(index)): Frames {
    return [header("chunk", { ...this.#named, index, crc: this.crcs[index] ?? 0 }), bytes];
  }

  /** Return a message that only names the version, and its digest where that belongs to it. */
  say(type: "end" | "commit" | "abort" | "beacon"): Frames {
    const digest = type === "end" || type === "commit" ? { digest: this.digest } : {};
    return [header(type, { ...this.#named, ...digest })];
  }
}

/** Return bytes that differ from version to version. */
export function bytesOf(count: number, seed: number): Uint8Array {
  return Uint8Array.from({ length: count }, (_, i) => (i * 7 + seed * 31) & 0xff);
}
