/**
 * The group keys of a worker's session: what is sealed is opened with them, or has no effect.
 *
 * There are two while one takes the place of another; the older one is forgotten soon after. What is
 * published beside chunks counts up under each key: what counts no higher than the last is a replay.
 */

import { ProtocolError } from "./errors.js";
import { GROUP_KEYS_MAX } from "./limits.js";
import {
  type Announce,
  type Decoded,
  decode,
  type SealedChunk,
  type SealedMessage,
} from "./messages.js";
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

const PUBLISHED = new Set(["announce", "beacon", "end"]); // what is sealed for all, beside chunks
const NOTHING: Uint8Array = new Uint8Array(0);
const NO_SECRET = { id: "", names: NOTHING, key: NOTHING };

/** What a message says of how its payload was sealed. */
interface Seal {
  readonly key: string | null;
  readonly tag: string | null;
}

/** What one worker can open. A worker that has one takes nothing that is not sealed. */
export class Keyring {
  readonly #keys = new Map<string, GroupKey>(); // by id, the newest last
  readonly #counts = new Map<string, number>(); // the highest that was opened, by id
  #aloneAt = Number.POSITIVE_INFINITY; // when the newest is the only one that counts
  #lacking = false; // something came that was sealed with another key
  #last = NO_SECRET; // of a version

  /**
   * A session begins, and these are its keys, of which an older one counts until then. A count goes
   * on, or replays would count.
   */
  begin(keys: readonly string[], until = Number.POSITIVE_INFINITY): void {
    this.#keys.clear();
    for (const key of keys.map((hex) => new GroupKey(hex))) this.#keys.set(key.id, key);
    for (const id of this.#counts.keys()) if (!this.#keys.has(id)) this.#counts.delete(id);
    this.#aloneAt = until;
    this.#lacking = false;
    this.#last = NO_SECRET;
  }

  /**
   * There are other keys; the one before counts until then. What is told before a key that is here
   * is older than that: it was forgotten, or never here.
   */
  add(keys: readonly string[], until: number): void {
    const told = keys.map((hex) => new GroupKey(hex));
    const here = told.findLastIndex(({ id }) => this.#keys.has(id));
    for (const key of told.slice(here + 1)) {
      this.#keys.set(key.id, key); // E6
      this.#aloneAt = until;
    }
    this.#keep(GROUP_KEYS_MAX);
  }

  /** Forget a key whose time is over; return whether one is needed that is not here. */
  lacks(now: number): boolean {
    if (now >= this.#aloneAt) {
      this.#aloneAt = Number.POSITIVE_INFINITY;
      this.#keep(1);
    }
    return this.#lacking;
  }

  /** A hello is said, whose answer brings the keys that there are. */
  asked(): void {
    this.#lacking = false;
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
    this.#lacking ||= found === undefined;
    return found;
  }

  /** Return what opens a chunk of a version, or of a patch; null if its key is not known. */
  opening(subject: Subject, chunk: SealedChunk, size: number): Opening | null {
    return this.#opening(subject, chunk, CHUNK, chunk.index, size);
  }

  /**
   * Open in its place what came with an announcement, its layout or all its bytes, if it is sound.
   *
   * Of all the bytes there are none then, as of a damaged chunk, which is fetched.
   */
  payload(announce: Announce, bytes: Uint8Array): Uint8Array | null {
    const purpose = announce.whole === null ? LAYOUT : CHUNK; // E4
    const opening = this.#opening(announce, announce, purpose, 0, bytes.length);
    if (opening !== null && opening.opens(bytes, bytes) !== null) return bytes;
    return announce.whole === null ? null : NOTHING;
  }

  #opening(of: Subject, { key: id, tag }: Seal, purpose: Purpose, index: number, size: number) {
    const group = this.#key(id);
    if (group === undefined || tag === null) return null;
    const names = namesOf(of);
    if (this.#last.id !== group.id || Buffer.compare(this.#last.names, names) !== 0) {
      this.#last = { id: group.id, names, key: group.ofVersion(names) };
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
   * Return what was published, if it was sealed: the rest can be anybody's word. (E1)
   *
   * It comes only once; unless it does not count, since the rest of it is still on its way.
   */
  published(decoded: Decoded, counts = true): Decoded | null {
    const { message, payloads } = decoded;
    if (message.type === "sealed_chunk") return decoded;
    return message.type === "sealed_message" ? this.#message(message, payloads, counts) : null;
  }

  /** Return what the publisher said, if it is that, and new. */
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
