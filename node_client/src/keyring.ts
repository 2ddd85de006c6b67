/**
 * The group keys of a worker's session, which decrypt sealed messages, layouts and chunks.
 *
 * During a rotation there are two keys, and the older one expires soon. Each published message
 * except a chunk has a count, which rises with each message under the same key. A message is a
 * replay if its count is not above the last count.
 */

import { ProtocolError } from "./errors.js";
import { type Decoded, decode } from "./headers.js";
import { GROUP_KEYS_MAX } from "./limits.js";
import type { Announce, SealedChunk, SealedMessage } from "./messages.js";
import {
  associatedOf,
  CHUNK,
  GroupKey,
  LAYOUT,
  namesOf,
  nonceOf,
  Opening,
  type Purpose,
  type Subject,
} from "./sealing.js";

const PUBLISHED = new Set(["announce", "beacon", "end"]); // sealed for all workers, besides chunks
const NOTHING: Uint8Array = new Uint8Array(0);
const NO_SECRET = { id: "", names: NOTHING, key: NOTHING };

/** The key id and tag with which a payload was sealed. */
interface Seal {
  readonly key: string | null;
  readonly tag: string | null;
}

/**
 * The group keys of one worker. With a keyring, a worker ignores published messages in the clear.
 */
export class Keyring {
  readonly #keys = new Map<string, GroupKey>(); // by id, the newest last
  readonly #counts = new Map<string, number>(); // by key id: highest count of a decrypted message
  #oldKeysExpireAt = Number.POSITIVE_INFINITY; // when all but the newest key expire
  #keyMissing = false; // a message was sealed with an unknown key
  #last = NO_SECRET; // the last version key that was derived

  /**
   * Start a session with these keys only. All keys but the newest expire at `until`. The counts of
   * known keys are kept, so that replays are still detected.
   */
  begin(keys: readonly string[], until = Number.POSITIVE_INFINITY): void {
    this.#keys.clear();
    for (const key of keys.map((hex) => new GroupKey(hex))) this.#keys.set(key.id, key);
    for (const id of this.#counts.keys()) if (!this.#keys.has(id)) this.#counts.delete(id);
    this.#oldKeysExpireAt = until;
    this.#keyMissing = false;
    this.#last = NO_SECRET;
  }

  /**
   * Add the keys of a rotation. The previous key expires at `until`. Keys listed before a known key
   * are older than that key, and are ignored.
   */
  add(keys: readonly string[], until: number): void {
    const given = keys.map((hex) => new GroupKey(hex));
    const here = given.findLastIndex(({ id }) => this.#keys.has(id));
    for (const key of given.slice(here + 1)) {
      this.#keys.set(key.id, key); // E6
      this.#oldKeysExpireAt = until;
    }
    this.#keep(GROUP_KEYS_MAX);
  }

  /** Drop expired keys. Return whether a message needed an unknown key since the last `asked`. */
  lacks(now: number): boolean {
    if (now >= this.#oldKeysExpireAt) {
      this.#oldKeysExpireAt = Number.POSITIVE_INFINITY;
      this.#keep(1);
    }
    return this.#keyMissing;
  }

  /** Record that a hello was sent. The answer has the current keys. */
  asked(): void {
    this.#keyMissing = false;
  }

  #keep(count: number): void {
    for (const id of [...this.#keys.keys()].slice(0, -count)) {
      this.#keys.delete(id);
      this.#counts.delete(id);
      this.#last = NO_SECRET;
    }
  }

  #key(id: string | null): GroupKey | undefined {
    const found = this.#keys.get(id ?? "");
    this.#keyMissing ||= found === undefined;
    return found;
  }

  /** Return the `Opening` of a chunk of a version or patch; null if the chunk's key is unknown. */
  opening(subject: Subject, chunk: SealedChunk, size: number): Opening | null {
    return this.#opening(subject, chunk, CHUNK, chunk.index, size);
  }

  /**
   * Decrypt the payload of an announcement in place. The payload is a layout or a whole version.
   *
   * If a layout is not authentic, return null. If a version is not authentic, return no bytes; the
   * version is then fetched like a damaged chunk.
   */
  payload(announce: Announce, bytes: Uint8Array): Uint8Array | null {
    const purpose = announce.whole === null ? LAYOUT : CHUNK; // E4
    const opening = this.#opening(announce, announce, purpose, 0, bytes.length);
    if (opening !== null && opening.decrypt(bytes, bytes) !== null) return bytes;
    return announce.whole === null ? null : NOTHING;
  }

  #opening(of: Subject, { key: id, tag }: Seal, purpose: Purpose, index: number, size: number) {
    const group = this.#key(id);
    if (group === undefined || tag === null) return null;
    const names = namesOf(of);
    if (this.#last.id !== group.id || Buffer.compare(this.#last.names, names) !== 0) {
      this.#last = { id: group.id, names, key: group.versionKey(names) };
    }
    const associated = associatedOf(of, purpose, index, size);
    return new Opening(
      this.#last.key,
      nonceOf(purpose, index),
      associated,
      Buffer.from(tag, "hex"),
    );
  }

  /**
   * Return a published message, decrypted; a sealed chunk is returned unchanged. Return null for a
   * message in the clear, whose sender is unknown, and for a replay. (E1)
   *
   * With `counts`, a message is accepted only once. `counts` is false before the payload is
   * complete.
   */
  published(decoded: Decoded, counts = true): Decoded | null {
    const { message, payloads } = decoded;
    if (message.type === "sealed_chunk") return decoded;
    return message.type === "sealed_message" ? this.#message(message, payloads, counts) : null;
  }

  /** Decrypt a sealed message. Return null if it is not authentic or a replay. */
  #message(sealed: SealedMessage, payloads: Decoded["payloads"], counts: boolean): Decoded | null {
    const { key: id, count } = sealed; // E5
    const key = this.#key(id);
    if (key === undefined || count <= (this.#counts.get(id) ?? 0)) return null;
    const plain = key.openMessage(count, sealed.sealed);
    if (plain === null) return null;
    if (counts) this.#counts.set(id, count);
    try {
      const decoded = decode([plain, ...payloads]);
      return PUBLISHED.has(decoded.message.type) ? decoded : null;
    } catch (error) {
      if (error instanceof ProtocolError) return null;
      throw error;
    }
  }
}
