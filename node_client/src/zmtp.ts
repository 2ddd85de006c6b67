/**
 * Implements the worker's side of ZMTP 3 (ZeroMQ RFC 23, NULL security), without sockets.
 *
 * libzmq receives each message into newly allocated memory and passes it between threads; both cost
 * more time than the network. Besides, libzmq collects the frames of a message without limit. So
 * this module parses messages itself, and payloads are received from the kernel directly into their
 * buffer. The caller writes input into `room()`, then calls `received()` with the number of bytes.
 *
 *     greeting (64 bytes) ──> READY ──> messages and commands
 *
 *     a frame:  ┌───────┬──────────────┬──── ··· ────┐   flags: 1 not the last, 2 long size,
 *               │ flags │ size, 1 or 8 │    body     │          4 command
 *               └───────┴──────────────┴──── ··· ────┘
 *     a message:  topic (only if published), header, at most one payload
 */

import { HEADER_BYTES_MAX, LABEL_MAX, MESSAGE_BYTES_MAX } from "./limits.js";
import type { Lease } from "./transfer.js";
import { printable } from "./words.js";

const [MORE, LONG, COMMAND] = [1, 2, 4] as const;
const TICKET = "\x03"; // the first byte of a message with a ticket
const GREETING_BYTES = 64;
const HEAD_BYTES_MAX = 9; // of a frame: flags and a long size
const FRAMES_MAX = 8; // per message; a later protocol may have several payloads
const SCRATCH_BYTES = 2 ** 15; // for input outside a lease; so much of a payload is copied at most
const RECEIVE_BYTES = 2 ** 18; // of a payload read at once: they are hashed while in the CPU's cache
const ERROR_TEXT_MAX = 200; // characters of an ERROR command to show
const NOTHING = Buffer.alloc(0);

const MECHANISM = "NULL";
/** How the greeting of every ZMTP peer begins. */
export const SIGNATURE = Buffer.from("ff00000000000000007f", "hex");
// Signature and version. The rest of the greeting, with the mechanism, is sent once the peer's
// mechanism is known: if the two differ, libzmq closes the connection before it sends its own.
const GREETING = Buffer.concat([SIGNATURE, Buffer.from([3, 0])]);
const GREETING_REST = Buffer.from(MECHANISM.padEnd(20 + 32, "\0"), "latin1");

/** A type of socket. */
export interface Kind {
  /** The name of the type in READY. */
  readonly name: string;
  /** The socket types to which this type may connect. */
  readonly peers: readonly string[];
  /** The index of a message's payload frame: after the topic, if any, and the header. */
  readonly payload: number;
}

export const DEALER: Kind = { name: "DEALER", peers: ["ROUTER"], payload: 1 };
export const SUB: Kind = { name: "SUB", peers: ["PUB", "XPUB"], payload: 2 };

/** The peer does not speak ZMTP 3 or breaks its rules: the connection must be closed. */
export class ZmtpError extends Error {}

/** The peer requires another security mechanism. */
export class MechanismError extends ZmtpError {
  constructor(readonly mechanism: string) {
    super(`the other side requires ${printable(mechanism)} security`);
  }
}

export interface Handlers {
  /** Send bytes to the peer. */
  readonly send: (bytes: Uint8Array) => void;
  /**
   * Returns a lease to receive a payload, given the frames before the payload and its size. If it
   * returns null, the payload is discarded, and the message has an empty payload.
   */
  readonly place: (frames: readonly Uint8Array[], size: number) => Lease | null;
  /** Called when a message is complete. */
  readonly message: (frames: readonly Uint8Array[]) => void;
}

/**
 * A frame body that is being received. A payload is received into `lease`, or discarded if `lease`
 * is null. Any other body is received into `memory`.
 */
interface Body {
  readonly flags: number;
  readonly memory: Buffer | null;
  readonly lease: Lease | null;
  missing: number;
}

/** One connection. */
export class Stream {
  state: "greeting" | "ready" | "open" = "greeting";
  readonly #topics = new Set<string>();
  #ticket = "";
  readonly #head = Buffer.alloc(GREETING_BYTES); // a greeting or a frame's head
  #headCount = 0; // bytes of the head received so far
  #frames: Uint8Array[] = []; // of the message that is arriving
  #body: Body | null = null;
  #payload: Lease | null = null; // of the message that is arriving
  readonly #scratch = Buffer.allocUnsafeSlow(SCRATCH_BYTES);
  #direct = false; // whether the last `room()` was in a lease
  #messages = 0; // received messages and pieces of payloads
  #commands = 0; // received commands

  constructor(
    readonly handlers: Handlers,
    readonly kind: Kind = SUB,
  ) {}

  /** Number of messages and pieces of payloads received, without commands such as PING. */
  get messages(): number {
    return this.#messages;
  }

  /** Number of commands received. */
  get commands(): number {
    return this.#commands;
  }

  /** Send the greeting on a new connection. A ticket, if not empty, is the first message. */
  greet(ticket = ""): void {
    this.#ticket = ticket;
    this.handlers.send(GREETING);
  }

  /** Send a message of one frame. */
  send(body: Uint8Array): void {
    this.#send(body);
  }

  /** Subscribe to a topic, or unsubscribe if `on` is false. A repeated call has no effect. */
  subscribe(topic: string, on: boolean): void {
    if (this.#topics.has(topic) === on) return;
    if (on) this.#topics.add(topic);
    else this.#topics.delete(topic);
    if (this.state === "open") this.#sendTopic(topic, on);
  }

  /** Return the memory for the next input. */
  room(): Uint8Array {
    const lease = this.#body?.lease;
    this.#direct = lease?.live === true;
    return lease?.live ? lease.room(RECEIVE_BYTES) : this.#scratch;
  }

  /**
   * Process `count` bytes that were written into the last `room()`.
   *
   * @throws ZmtpError - if the peer breaks the protocol. The connection must then be closed.
   */
  received(count: number): void {
    if (this.#direct && this.#body !== null) {
      this.#body.missing -= count;
      this.#messages += 1;
      if (this.#body.lease?.live) this.#body.lease.received(count);
      if (this.#body.missing === 0) this.#complete(this.#body);
      return;
    }
    for (let at = 0; at < count; ) {
      const bytes = this.#scratch.subarray(at, count);
      at += this.#body === null ? this.#takeHead(bytes) : this.#takeBody(this.#body, bytes);
    }
  }

  /** Cancel the payload that is being received. Call this when the connection has closed. */
  close(): void {
    this.#payload?.cancel();
    this.#payload = null;
  }

  // `#takeHead` and `#takeBody` consume bytes and return their number.

  #takeHead(bytes: Uint8Array): number {
    const wanted = this.state === "greeting" ? GREETING_BYTES : this.#headBytes(bytes[0] as number);
    const count = Math.min(wanted - this.#headCount, bytes.length);
    this.#head.set(bytes.subarray(0, count), this.#headCount);
    this.#headCount += count;
    if (this.#headCount < wanted) return count; // a long size may be incomplete
    this.#headCount = 0;
    if (this.state === "greeting") this.#greeted(this.#head);
    else this.#begin(this.#head, wanted);
    return count;
  }

  /** Return the length of a frame's head, given its flags: received already, or the byte `next`. */
  #headBytes(next: number): number {
    const flags = this.#headCount > 0 ? (this.#head[0] as number) : next;
    if (flags > (MORE | LONG | COMMAND)) throw new ZmtpError(`a frame with flags ${flags}`);
    return flags & LONG ? HEAD_BYTES_MAX : 2;
  }

  #greeted(head: Buffer): void {
    if (head[0] !== 0xff || head[9] !== 0x7f || (head[10] as number) < 3) {
      throw new ZmtpError("the other side does not speak ZMTP 3");
    }
    const mechanism = head.toString("latin1", 12, 32).replace(/\0+$/, "");
    if (mechanism !== MECHANISM) throw new MechanismError(mechanism);
    this.state = "ready";
    this.handlers.send(GREETING_REST);
    this.#send(ready(this.kind.name), COMMAND);
  }

  /** Handle the complete head of a frame: check the size, and provide memory for the body. */
  #begin(head: Buffer, headBytes: number): void {
    const flags = head[0] as number;
    const size = headBytes === 2 ? (head[1] as number) : Number(head.readBigUInt64BE(1));
    const payload = !(flags & COMMAND) && this.#frames.length >= this.kind.payload;
    const limit = payload ? MESSAGE_BYTES_MAX : HEADER_BYTES_MAX;
    if (size > limit) {
      throw new ZmtpError(`a frame of ${size} bytes; at most ${limit} are allowed`);
    }
    if (!(flags & COMMAND)) this.#checkMessage();
    const memory = payload ? null : Buffer.allocUnsafe(size);
    this.#body = { flags, memory, lease: payload ? this.#lease(size) : null, missing: size };
    if (size === 0) this.#complete(this.#body);
  }

  #checkMessage(): void {
    if (this.state !== "open") throw new ZmtpError("a message before READY");
    if (this.#frames.length >= FRAMES_MAX) {
      throw new ZmtpError(`a message of more than ${FRAMES_MAX} frames`);
    }
  }

  #lease(size: number): Lease | null {
    if (size === 0 || this.#frames.length !== this.kind.payload) return null;
    this.#payload = this.handlers.place(this.#frames, size);
    return this.#payload;
  }

  #takeBody(body: Body, bytes: Uint8Array): number {
    const count = Math.min(body.missing, bytes.length);
    const piece = bytes.subarray(0, count);
    if (body.memory !== null) body.memory.set(piece, body.memory.length - body.missing);
    else if (body.lease?.live) {
      body.lease.room(count).set(piece);
      body.lease.received(count);
    }
    body.missing -= count;
    if (body.missing === 0) this.#complete(body);
    return count;
  }

  #complete({ flags, memory, lease }: Body): void {
    this.#body = null;
    if (flags & COMMAND) {
      this.#command(memory ?? NOTHING);
      return;
    }
    this.#frames.push(memory ?? (lease?.live ? lease.bytes : NOTHING));
    if (flags & MORE) return;
    const frames = this.#frames;
    this.#frames = [];
    this.#messages += 1;
    this.handlers.message(frames);
    this.close(); // cancel a lease that the handler did not use
  }

  #command(body: Buffer): void {
    this.#commands += 1;
    const end = 1 + (body[0] ?? 0);
    const name = body.toString("latin1", 1, end);
    if (name === "READY" && this.state === "ready") {
      this.#checkPeer(property(body.subarray(end), "socket-type"));
      this.state = "open";
      if (this.#ticket !== "") this.#send(Buffer.from(TICKET + this.#ticket, "latin1")); // K7
      for (const topic of this.#topics) this.#sendTopic(topic, true);
    } else if (name === "PING") {
      // A TTL of two bytes is followed by a context of at most 16 bytes, which PONG returns.
      const pong = Buffer.concat([
        Buffer.from("\x04PONG", "latin1"),
        body.subarray(end + 2, end + 18),
      ]);
      this.#send(pong, COMMAND);
    } else if (name === "ERROR") {
      const text = printable(body.toString("latin1", end + 1), ERROR_TEXT_MAX);
      throw new ZmtpError(`the other side says: ${text}`);
    }
  }

  #checkPeer(peer: string): void {
    if (this.kind.peers.includes(peer)) return;
    const wanted = this.kind.peers.join(" or ");
    const seen = printable(peer, LABEL_MAX) || "socket without a type";
    throw new ZmtpError(`a ${seen} is at the other end, not a ${wanted}: is this the right port?`);
  }

  #sendTopic(topic: string, on: boolean): void {
    this.#send(Buffer.from(`${on ? "\x01" : "\0"}${topic}`, "latin1"));
  }

  /** Send one frame: a command, or a message. */
  #send(body: Uint8Array, flags = 0): void {
    const long = body.length > 255;
    const head = Buffer.alloc(long ? HEAD_BYTES_MAX : 2);
    head[0] = long ? flags | LONG : flags;
    if (long) head.writeBigUInt64BE(BigInt(body.length), 1);
    else head[1] = body.length;
    this.handlers.send(Buffer.concat([head, body]));
  }
}

function ready(type: string): Buffer {
  const size = String.fromCharCode(type.length);
  const properties = `\x0bSocket-Type\0\0\0${size}${type}\x08Identity\0\0\0\0`;
  return Buffer.from(`\x05READY${properties}`, "latin1");
}

/** Return the value of a property of READY; empty if it is missing. */
function property(properties: Buffer, wanted: string): string {
  for (let at = 0; at < properties.length; ) {
    const name = 1 + at + (properties[at] ?? 0);
    if (name + 4 > properties.length) break;
    const end = name + 4 + properties.readUInt32BE(name);
    if (end > properties.length) break;
    if (properties.toString("latin1", at + 1, name).toLowerCase() === wanted) {
      return properties.toString("latin1", name + 4, end);
    }
    at = end;
  }
  return "";
}
