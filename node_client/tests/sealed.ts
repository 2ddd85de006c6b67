/** What a publisher would send of a version that it seals. */

import { createCipheriv } from "node:crypto";
import {
  AES_256_GCM,
  associatedOf,
  CHUNK,
  GroupKey,
  LAYOUT,
  MESSAGE,
  namesOf,
  nonceOf,
  type Purpose,
} from "../src/sealing.js";
import { type Frames, header, type Published, PublishedPatch, welcome } from "./published.js";

interface Box {
  readonly sealed: Buffer;
  readonly tag: Buffer;
}

function box(key: Uint8Array, nonce: Uint8Array, associated: Uint8Array, plain: Uint8Array): Box {
  const cipher = createCipheriv(AES_256_GCM, key, nonce).setAAD(associated);
  const sealed = Buffer.concat([cipher.update(plain), cipher.final()]);
  return { sealed, tag: cipher.getAuthTag() };
}

/** A publisher's half of sealing, under one group key. */
export class Sealer {
  readonly group: GroupKey;
  count = 0;

  constructor(readonly hex = "ab".repeat(32)) {
    this.group = new GroupKey(hex);
  }

  /** Let somebody in who gets the group keys; and perhaps a ticket. */
  welcome(epoch: number, keys = [this.hex], features: readonly string[] = []): Frames {
    const [head = new Uint8Array()] = welcome(epoch);
    return [header("welcome", { ...JSON.parse(Buffer.from(head).toString()), keys, features })];
  }

  #payload(
    of: Published | PublishedPatch,
    purpose: Purpose,
    index: number,
    plain: Uint8Array,
  ): Box {
    const { epoch, version } = targetOf(of);
    const sizes = { nbytes: of.data.length, chunk_bytes: of.plan.chunkBytes };
    const how =
      of instanceof PublishedPatch
        ? { encoding: of.id.encoding, base: [of.id.epoch, of.id.version] as const }
        : { encoding: "raw" };
    const subject = { model: "m", epoch, version, ...sizes, ...how };
    const key = this.group.versionKey(namesOf(subject));
    const associated = associatedOf(subject, purpose, index, plain.length);
    return box(key, nonceOf(purpose, index), associated, plain);
  }

  chunk(of: Published | PublishedPatch, index: number): Frames {
    const { sealed, tag } = this.#payload(of, CHUNK, index, of.bytes(index));
    const { epoch, version } = targetOf(of);
    const patch = of instanceof PublishedPatch ? { patch: of.id } : {};
    const named = { model: "m", epoch, version, index, ...patch };
    return [
      header("sealed_chunk", { ...named, key: this.group.id, tag: tag.toString("hex") }),
      sealed,
    ];
  }

  /** As it goes to one worker: its header in the clear. */
  announce(version: Published, withLayout = true, changes: object = {}): Frames {
    const fields = { encryption: AES_256_GCM, key: this.group.id, ...changes };
    if (!withLayout) return version.announce(false, fields);
    const { sealed, tag } = this.#payload(version, LAYOUT, 0, version.layout);
    return [...version.announce(false, { ...fields, tag: tag.toString("hex") }), sealed];
  }

  /** As it goes to all, with its only chunk. */
  whole(version: Published): Frames {
    const { sealed, tag } = this.#payload(version, CHUNK, 0, version.bytes(0));
    const whole = { crc: version.crcs[0] ?? 0, digest: version.digest };
    const fields = { encryption: AES_256_GCM, key: this.group.id, tag: tag.toString("hex"), whole };
    return this.message([...version.announce(false, fields), sealed]);
  }

  /** Seal the header of a message for all. */
  message([head = new Uint8Array(), ...payloads]: Frames, count = ++this.count): Frames {
    const sizes = Buffer.alloc(20);
    sizes.writeUInt32LE(MESSAGE);
    sizes.writeBigUInt64LE(BigInt(count), 4);
    sizes.writeBigUInt64LE(BigInt(head.length), 12);
    const { sealed, tag } = box(this.group.messageKey, nonceOf(MESSAGE, count), sizes, head);
    const text = Buffer.concat([sealed, tag]).toString("base64");
    return [header("sealed_message", { key: this.group.id, count, sealed: text }), ...payloads];
  }

  /** Everything that is published of a version. */
  all(version: Published): Frames[] {
    const chunks = version.crcs.map((_, index) => this.chunk(version, index));
    return [this.message(this.announce(version)), ...chunks, this.message(version.say("end"))];
  }
}

function targetOf(of: Published | PublishedPatch): Published {
  return of instanceof PublishedPatch ? of.target : of;
}
