/**
 * Keeps a ZMTP connection without keys to the publisher: reconnects if the connection breaks, or if
 * nothing is received for too long.
 */

import { connect, type Socket } from "node:net";
import type { Destination } from "./endpoints.js";
import { COMMANDS, HANDSHAKE_MS } from "./limits.js";
import { TokenBucket } from "./token_bucket.js";
import type { Lease } from "./transfer.js";
import { type Kind, Stream, ZmtpError } from "./zmtp.js";

const REDIAL_MS = 50; // before the second attempt; doubles with each further attempt
const REDIAL_MAX_MS = 1_000; // the longest such delay
const CLOSED = "the publisher closed the connection";

export interface Options {
  readonly kind: Kind;
  /** The timeout in milliseconds of the name lookup and the TCP connection together. */
  readonly connectTimeout: number;
  /**
   * The connection is closed after `any` milliseconds without input, or `message` milliseconds
   * without a message. Null for no limit.
   */
  readonly silence: { readonly any: number; readonly message: number } | null;
  /** The limit of the send queue in bytes. */
  readonly queueMax: number;
}

export interface Handlers {
  readonly place: (frames: readonly Uint8Array[], size: number) => Lease | null;
  readonly message: (frames: readonly Uint8Array[]) => void;
  /** Returns whether an attempt may start. After false, the handlers' owner must call `dial`. */
  readonly mayDial?: () => boolean;
  /** Called when an attempt to connect starts. */
  readonly started?: (stream: Stream) => void;
  /** Called when the socket is connected. Returns the ticket to send first, or an empty string. */
  readonly connected?: () => string;
  /** Called when messages can be sent. */
  readonly opened?: () => void;
  /** Called when the connection broke, or the attempt failed. */
  readonly broke?: (error: Error) => void;
  /** Called once per outage, after several failed attempts, with the error text of the last. */
  readonly failing?: (reason: string) => void;
}

/** A connection that reconnects until closed. */
export class Connection {
  #destination: Destination | null = null;
  #socket: Socket | null = null;
  #stream: Stream | null = null;
  #timer: NodeJS.Timeout | undefined; // until the next attempt or check, or for the handshake
  #pause = REDIAL_MS;
  #error = new Error(CLOSED);
  #heardAt = 0; // when bytes were last received
  #messageAt = 0; // when a message, or a part of one, was last received
  #bucket = new TokenBucket(COMMANDS, 0); // limits the rate of commands on this connection

  constructor(
    readonly options: Options,
    readonly handlers: Handlers,
  ) {}

  /** Whether there is a connection or an attempt in progress. */
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

  /** Close the connection, and connect to `destination` at once; if it is null, stay disconnected. */
  dial(destination: Destination | null): void {
    this.#hangUp();
    this.#pause = REDIAL_MS;
    this.#destination = destination;
    if (destination !== null) this.#dial(destination);
  }

  /** Send a message of one frame. The message is dropped if not connected, or if the queue is full. */
  send(body: Uint8Array): void {
    const queued = this.#socket?.writableLength ?? 0;
    if (this.open && queued + body.length <= this.options.queueMax) this.#stream?.send(body);
  }

  /** Close the connection once the queued bytes are sent, at the latest after `linger` milliseconds. */
  close(linger = 0): void {
    const socket = this.#socket;
    if (socket !== null && this.open && linger > 0) {
      this.#socket = null; // so that `dial` does not destroy the socket
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
    if (this.handlers.mayDial?.() === false) return;
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
    this.handlers.started?.(stream);
    this.#abortAfter(this.options.connectTimeout, socket);
    socket.on("connect", () => {
      if (socket !== this.#socket) return;
      this.#abortAfter(HANDSHAKE_MS, socket); // received bytes do not extend this deadline
      stream.greet(this.handlers.connected?.());
    });
    socket.on("error", (error) => {
      if (socket === this.#socket) this.#error = error; // `close` follows
    });
    socket.on("close", () => this.#closed(socket));
  }

  /** Abort the connection unless it is open within `milliseconds`. */
  #abortAfter(milliseconds: number, socket: Socket): void {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#abortSilent(socket), milliseconds);
  }

  #abortSilent(socket: Socket): void {
    socket.destroy(new Error("the publisher was silent for too long"));
  }

  #received(socket: Socket, stream: Stream, count: number): boolean {
    if (socket !== this.#socket) return !socket.destroyed; // ignore input of an old connection
    const { state, messages, commands } = stream;
    const now = performance.now();
    try {
      stream.received(count);
      this.#check(socket, stream.commands - commands, now);
    } catch (error) {
      socket.destroy(error as Error);
      return false;
    }
    if (socket !== this.#socket) return !socket.destroyed; // handling a message has reconnected
    this.#heardAt = now;
    if (stream.messages !== messages) {
      this.#messageAt = now;
      this.#pause = REDIAL_MS; // commands alone do not show that reconnecting is worth it
    }
    if (state !== "open" && stream.state === "open") this.#opened(socket);
    return true;
  }

  /**
   * Throw if the peer does not read the answers to its commands, or if the newly received `commands`
   * exceed the rate limit.
   */
  #check(socket: Socket, commands: number, now: number): void {
    if (socket.writableLength > this.options.queueMax) {
      const most = `at most ${this.options.queueMax} may be queued`;
      throw new ZmtpError(`the publisher does not read ${socket.writableLength} bytes; ${most}`);
    }
    if (commands === 0 || this.#bucket.take(commands, now)) return;
    throw new ZmtpError(
      `more than ${COMMANDS.burst} commands at once, or ${COMMANDS.perSecond} a second: a ` +
        "publisher sends a PING every few seconds",
    );
  }

  #opened(socket: Socket): void {
    clearTimeout(this.#timer);
    this.#messageAt = this.#heardAt;
    this.#checkSilence(socket);
    this.handlers.opened?.();
  }

  /** Abort the connection if no bytes, or only PINGs, arrive for too long. */
  #checkSilence(socket: Socket): void {
    const { silence } = this.options;
    if (silence === null) return;
    const until = Math.min(this.#heardAt + silence.any, this.#messageAt + silence.message);
    const left = until - performance.now();
    if (left <= 0) this.#abortSilent(socket);
    else {
      // Timers run before input: first read what arrived while the event loop was blocked.
      const look = () => socket === this.#socket && this.#checkSilence(socket);
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
    if (this.#pause === REDIAL_MAX_MS) this.handlers.failing?.(this.#error.message);
  }
}
