/** What a publisher would send of a version: for tests and fuzzers, which have no publisher. */

import { crc32c, digest } from "../src/checksum.js";
import { ChunkPlan } from "../src/chunks.js";
import { Layout } from "../src/layout.js";
import type { Patch, PatchId } from "../src/messages.js";
import { DELTA } from "../src/messages.js";

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

/** A patch between two versions, which overwrites what differs (`docs/DELTA.md` at the root). */
export class PublishedPatch {
  readonly plan: ChunkPlan;
  readonly crcs: number[];

  constructor(
    readonly base: Published,
    readonly target: Published,
    readonly data = patchBytes(base, target),
  ) {
    this.plan = new ChunkPlan(data.length, target.plan.chunkBytes);
    this.crcs = Array.from({ length: this.plan.count }, (_, i) => crc32c(this.bytes(i)));
  }

  get id(): PatchId {
    return { encoding: DELTA, epoch: this.base.epoch, version: this.base.version };
  }

  get offered(): Patch {
    return { ...this.id, digest: this.base.digest, nbytes: this.data.length };
  }

  bytes(index: number): Uint8Array {
    return this.data.subarray(...this.plan.span(index));
  }

  get #named() {
    const { epoch, version } = this.target;
    return { model: "m", epoch, version, patch: this.id };
  }

  chunk(index: number, bytes = this.bytes(index)): Frames {
    return [header("chunk", { ...this.#named, index, crc: this.crcs[index] ?? 0 }), bytes];
  }

  end(digest = this.target.digest): Frames {
    return [header("end", { ...this.#named, digest })];
  }
}

/** Return what a patch says of itself. */
export function patchHead(base: Published, target: Published): Buffer {
  const head = Buffer.alloc(120);
  head.write("WBDELTA1");
  head.writeUInt32LE(target.plan.chunkBytes, 12);
  head.writeBigUInt64LE(BigInt(target.data.length), 16);
  head.write(target.id + base.digest + target.digest, 24, "hex");
  return head;
}

/** Return a patch for a version of less than 2^18 bytes, of which few differ: one group, one block. */
function patchBytes(base: Published, target: Published): Buffer {
  const head = patchHead(base, target);
  const places = [...target.data.keys()].filter((at) => target.data[at] !== base.data[at]);
  if (places.length === 0) return Buffer.concat([head, Buffer.from([0])]);
  const gaps = places.map((at, index) => at - (places[index - 1] ?? -1) - 1);
  const bits = gaps.map((gap) => `${"0".repeat(gap)}1`).join(""); // Rice codes of parameter 0
  const codes = (bits.match(/.{1,8}/g) ?? []).map((byte) => Number.parseInt(reversed(byte), 2));
  const values = places.map((at) => target.data[at] ?? 0);
  const body = [...[0, 8, 16].map((by) => (places.length >> by) & 255), ...codes, ...values];
  const entry = 4 * body.length + 2;
  const coded = entry < 128 ? [entry] : [(entry & 127) | 128, entry >> 7];
  return Buffer.concat([head, Buffer.from([...coded, ...body])]);
}

function reversed(digits: string): string {
  return [...digits].reverse().join("");
}

/** Return bytes that differ from version to version. */
export function bytesOf(count: number, seed: number): Uint8Array {
  return Uint8Array.from({ length: count }, (_, i) => (i * 7 + seed * 31) & 0xff);
}
