/**
 * Decrypts sealed messages, layouts and chunks with the group keys of a worker's session.
 *
 * During a key rotation there are two group keys, and the older one expires soon. Each published
 * message except a chunk has a sequence number, its `count`. A message is a replay if its count is
 * not above the highest count that was decrypted with the same key.
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

const PUBLISHED = new Set(["announce", "beacon", "end"]); // all types that a sealed message may have
const NOTHING: Uint8Array = new Uint8Array(0);
const NO_SECRET = { id: "", names: NOTHING, key: NOTHING };

/** The key id and tag with which a payload was sealed. */
interface Seal {
  readonly key: string | null;
  readonly tag: string | null;
}

/** The group keys of one worker. A worker with a keyring ignores unencrypted published messages. */
export class Keyring {
  readonly #keys = new Map<string, GroupKey>(); // by id, the newest last
  readonly #counts = new Map<string, number>(); // by key id: the highest count of a decrypted message
  #oldKeysExpireAt = Number.POSITIVE_INFINITY; // when all keys but the newest expire
  #keyMissing = false; // whether a message was sealed with an unknown key
  #last = NO_SECRET; // the version key that was derived last, to reuse it

  /**
   * Start a session with only these keys. All keys but the newest expire at `until`. For keys that
   * were known before, the counts are kept, so that replays are still detected.
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
   * Add the new ones of these keys, which are listed from old to new. The previous key then expires
   * at `until`. A key listed before a known key is older than that key, and is ignored.
   */
  add(keys: readonly string[], until: number): void {
    const given = keys.map((hex) => new GroupKey(hex));
    const lastKnown = given.findLastIndex(({ id }) => this.#keys.has(id));
    for (const key of given.slice(lastKnown + 1)) {
      this.#keys.set(key.id, key); // E6
      this.#oldKeysExpireAt = until;
    }
    this.#keep(GROUP_KEYS_MAX);
  }

  /** Drop expired keys. Return whether an unknown key was needed since the last `noteHelloSent`. */
  lacks(now: number): boolean {
    if (now >= this.#oldKeysExpireAt) {
      this.#oldKeysExpireAt = Number.POSITIVE_INFINITY;
      this.#keep(1);
    }
    return this.#keyMissing;
  }

  /** Record that a hello was sent. Its answer, `welcome`, has the current keys. */
  noteHelloSent(): void {
    this.#keyMissing = false;
  }

  /** Drop all keys but the `count` newest. */
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

  /** Return what decrypts a chunk of a version or patch; null if the chunk's key is unknown. */
  opening(subject: Subject, chunk: SealedChunk, size: number): Opening | null {
    return this.#opening(subject, chunk, CHUNK, chunk.index, size);
  }

  /**
   * Decrypt in place, and return, the payload of an announcement: a layout or a whole version.
   *
   * For a layout that is not authentic, return null. For a version that is not authentic, return an
   * empty array, which counts as a damaged chunk, so that the version is fetched.
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
   * Return a published message, decrypted; a sealed chunk is returned unchanged. Return null for an
   * unencrypted message, whose sender is unknown, and for a replay. (E1)
   *
   * If `counts` is true, record the message's count, so that the message is not accepted again. Pass
   * false to look at a message whose payload is not complete.
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
