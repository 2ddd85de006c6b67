/**
 * A connection to the publisher over ZMTP, without keys. One that breaks, or on which nothing comes,
 * is dialled again, and again.
 */

import { connect, type Socket } from "node:net";
import type { Destination } from "./endpoints.js";
import { COMMANDS, HANDSHAKE_MS } from "./limits.js";
import { TokenBucket } from "./token_bucket.js";
import type { Lease } from "./transfer.js";
import { type Kind, Stream, ZmtpError } from "./zmtp.js";

const REDIAL_MS = 50; // between two attempts; doubles,
const REDIAL_MAX_MS = 1_000; // up to this
const CLOSED = "the publisher closed the connection";

export interface Options {
  readonly kind: Kind;
  /** Milliseconds for the host's address and the connection. */
  readonly patience: number;
  /**
   * Milliseconds without anything, and without a message, after which the other side is gone; null: it
   * need not speak.
   */
  readonly silence: { readonly any: number; readonly message: number } | null;
  /** Bytes that wait for the other side to read them, at most. */
  readonly unread: number;
}

export interface Handlers {
  readonly place: (frames: readonly Uint8Array[], size: number) => Lease | null;
  readonly message: (frames: readonly Uint8Array[]) => void;
  /** Whether an attempt may begin; else `dial` is called again. */
  readonly may?: () => boolean;
  /** An attempt begins, of this stream. */
  readonly begins?: (stream: Stream) => void;
  /** The socket is connected: return the ticket to show first, empty if there is none. */
  readonly connected?: () => string;
  /** Messages can be sent. */
  readonly opened?: () => void;
  /** The connection has broken, or could not be made. */
  readonly broke?: (error: Error) => void;
  /** No connection has been of use for a while, and why: once for each outage. */
  readonly useless?: (reason: string) => void;
}

/** A connection, or the attempts at one. */
export class Connection {
  #destination: Destination | null = null;
  #socket: Socket | null = null;
  #stream: Stream | null = null;
  #timer: NodeJS.Timeout | undefined; // until it is dialled again, must be open, or is looked at
  #pause = REDIAL_MS;
  #error = new Error(CLOSED);
  #heardAt = 0; // anything,
  #spokeAt = 0; // and a message, or a piece of one
  #bucket = new TokenBucket(COMMANDS, 0); // of this connection

  constructor(
    readonly options: Options,
    readonly handlers: Handlers,
  ) {}

  /** Whether there is a connection, or an attempt at one. */
  get busy(): boolean {
    return this.#socket !== null;
  }

  /** Whether messages can be sent. */
  get open(): boolean {
    return this.#stream?.state === "open";
  }

  get stream(): Stream | null {
    return this.#stream;
  }

  /** Connect there, at once, in place of anywhere else; null: nowhere. */
  dial(destination: Destination | null): void {
    this.#hangUp();
    this.#pause = REDIAL_MS;
    this.#destination = destination;
    if (destination !== null) this.#dial(destination);
  }

  /** Send a message of one frame; it is lost while nobody is there, or does not read. */
  say(body: Uint8Array): void {
    const waits = this.#socket?.writableLength ?? 0;
    if (this.open && waits + body.length <= this.options.unread) this.#stream?.say(body);
  }

  /** Hang up for good. What waits to be sent gets so many milliseconds. */
  close(linger = 0): void {
    const socket = this.#socket;
    if (socket !== null && this.open && linger > 0) {
      this.#socket = null; // else it would be destroyed
      socket.end();
      const timer = setTimeout(() => socket.destroy(), linger);
      socket.once("close", () => clearTimeout(timer));
    }
    this.dial(null);
  }

  #hangUp(): void {
    clearTimeout(this.#timer);
    const socket = this.#socket;
    this.#socket = null;
    socket?.destroy();
    this.#stream?.close();
    this.#stream = null;
  }

  #dial(destination: Destination): void {
    if (this.handlers.may?.() === false) return;
    const { place, message } = this.handlers;
    const send = (bytes: Uint8Array) => void socket.write(bytes);
    const stream = new Stream({ place, message, send }, this.options.kind);
    const socket: Socket = connect({
      ...destination,
      noDelay: true,
      onread: {
        buffer: () => stream.room(),
        callback: (count) => this.#received(socket, stream, count),
      },
    });
    this.#socket = socket;
    this.#stream = stream;
    this.#error = new Error(CLOSED);
    this.#bucket = new TokenBucket(COMMANDS, performance.now());
    this.handlers.begins?.(stream);
    this.#within(this.options.patience, socket);
    socket.on("connect", () => {
      if (socket !== this.#socket) return;
      this.#within(HANDSHAKE_MS, socket); // bytes alone are no sign of life in a handshake
      stream.greet(this.handlers.connected?.());
    });
    socket.on("error", (error) => {
      if (socket === this.#socket) this.#error = error; // and `close` follows
    });
    socket.on("close", () => this.#closed(socket));
  }

  /** Give a connection up that is not open by then. */
  #within(milliseconds: number, socket: Socket): void {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#silent(socket), milliseconds);
  }

  #silent(socket: Socket): void {
    socket.destroy(new Error("it was silent for too long"));
  }

  #received(socket: Socket, stream: Stream, count: number): boolean {
    if (socket !== this.#socket) return !socket.destroyed; // it lingers: only its end matters
    const { state, messages, commands } = stream;
    const now = performance.now();
    try {
      stream.received(count);
      this.#check(socket, stream.commands - commands, now);
    } catch (error) {
      socket.destroy(error as Error);
      return false;
    }
    if (socket !== this.#socket) return !socket.destroyed; // a message had it dialled anew
    this.#heardAt = now;
    if (stream.messages !== messages) {
      this.#spokeAt = now;
      this.#pause = REDIAL_MS; // commands alone do not show that the next attempt is worth it
    }
    if (state !== "open" && stream.state === "open") this.#opened(socket);
    return true;
  }

  /** Hang up on who asks for answers and does not read them, or whose commands keep us busy. */
  #check(socket: Socket, commands: number, now: number): void {
    if (socket.writableLength > this.options.unread) {
      const most = `at most ${this.options.unread} may wait`;
      throw new ZmtpError(`it does not read ${socket.writableLength} bytes for it; ${most}`);
    }
    if (commands === 0 || this.#bucket.take(commands, now)) return;
    throw new ZmtpError(
      `more than ${COMMANDS.burst} commands at once, or ${COMMANDS.perSecond} a second: a ` +
        "publisher sends a PING every few seconds",
    );
  }

  #opened(socket: Socket): void {
    clearTimeout(this.#timer);
    this.#spokeAt = this.#heardAt;
    this.#listen(socket);
    this.handlers.opened?.();
  }

  /** Give a connection up on which nothing comes, or nothing but PINGs, which anybody can say. */
  #listen(socket: Socket): void {
    const { silence } = this.options;
    if (silence === null) return;
    const until = Math.min(this.#heardAt + silence.any, this.#spokeAt + silence.message);
    const left = until - performance.now();
    if (left <= 0) this.#silent(socket);
    else {
      // Timers come before input in a turn: what has come while somebody blocked it counts.
      const look = () => socket === this.#socket && this.#listen(socket);
      this.#timer = setTimeout(() => setImmediate(look), Math.ceil(left));
    }
  }

  #closed(socket: Socket): void {
    const destination = this.#destination;
    if (socket !== this.#socket || destination === null) return;
    const error = this.#error;
    this.#hangUp();
    this.#timer = setTimeout(() => this.#dial(destination), this.#pause);
    this.#slowDown();
    this.handlers.broke?.(error);
  }

  #slowDown(): void {
    if (this.#pause >= REDIAL_MAX_MS) return;
    this.#pause = Math.min(2 * this.#pause, REDIAL_MAX_MS);
    if (this.#pause === REDIAL_MAX_MS) this.handlers.useless?.(this.#error.message);
  }
}
