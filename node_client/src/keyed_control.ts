/** Implements the control channel with keys, as a DEALER socket of the `zeromq` package. */

import { closeSync, openSync } from "node:fs";
import { setImmediate } from "node:timers/promises";
import { capability, Dealer } from "zeromq";
import type { Control, ControlHandlers } from "./control.js";
import { AddressError, KeysError } from "./errors.js";
import type { Handshakes } from "./handshakes.js";
import type { WorkerKeys } from "./keys.js";
import {
  CONNECT_MS,
  HEADER_BYTES_MAX,
  LAYOUT_BYTES_GUARANTEED,
  LINGER_MS,
  MESSAGE_BYTES_MAX,
  SLICE_MS,
} from "./limits.js";

const DESCRIPTORS = 16; // the most file descriptors that a worker needs
const TOO_MANY = new Set(["EMFILE", "ENFILE"]);

/** The socket's events after which `changed` is called. */
const CHANGES = [
  "connect:delay",
  "connect:retry",
  "connect",
  "handshake",
  "handshake:error:auth",
  "handshake:error:protocol",
  "handshake:error:other",
  "disconnect",
] as const;

/**
 * Check that enough file descriptors are free: ZeroMQ aborts the process if it cannot open one.
 *
 * @throws AddressError - if fewer than `DESCRIPTORS` are free.
 */
function checkDescriptors(address: string): void {
  const taken: number[] = [];
  try {
    while (taken.length < DESCRIPTORS) taken.push(openSync("/dev/null", "r"));
  } catch (error) {
    if (!TOO_MANY.has((error as NodeJS.ErrnoException).code ?? "")) return; // no /dev/null
    throw new AddressError(
      `cannot connect to ${address}: ${taken.length} descriptors are left, and its sockets need ` +
        `${DESCRIPTORS}: close files, or raise the limit (\`ulimit -n\`) where this is started`,
    );
  } finally {
    for (const descriptor of taken) closeSync(descriptor);
  }
}

function dealer(address: string, bytesMax: number): Dealer {
  checkDescriptors(address);
  const payload = Math.max(bytesMax, LAYOUT_BYTES_GUARANTEED);
  return new Dealer({
    immediate: true, // queue nothing while disconnected: hellos would pile up
    sendTimeout: 0, // drop a message that cannot be sent now: the machine repeats it
    linger: LINGER_MS,
    receiveHighWaterMark: 32, // received messages to queue before TCP flow control stops the peer
    // The limit of a frame, also in the handshake, before the peer is authenticated.
    maxMessageSize: Math.min(payload + HEADER_BYTES_MAX, MESSAGE_BYTES_MAX),
    connectTimeout: CONNECT_MS,
    reconnectInterval: 50,
    reconnectMaxInterval: 1_000,
  });
}

export class KeyedControl implements Control {
  readonly #socket: Dealer;

  constructor(
    readonly address: string,
    keys: WorkerKeys,
    bytesMax: number,
    handshakes: Handshakes,
    readonly handlers: ControlHandlers,
  ) {
    this.#socket = dealer(address, bytesMax);
    try {
      this.#pin(keys);
      this.#socket.ipv6 = address.includes("[");
      // Watch before connecting: the first attempt may fail at once, without a retry.
      this.#watch(handshakes);
      this.#socket.connect(address);
    } catch (error) {
      this.#socket.close();
      if (error instanceof KeysError) throw error;
      throw new AddressError(`cannot connect to ${address}: ${(error as Error).message}`);
    }
    this.#run().catch((error) => handlers.ended(error));
  }

  /** Accept only the owner of the publisher's key. */
  #pin({ publisher, public: own, secret }: WorkerKeys): void {
    if (!capability.curve) {
      throw new KeysError(
        "keys need CURVE, which this build of zeromq lacks: install the zeromq package with the " +
          "binaries that come with it, or build it against a libzmq with libsodium",
      );
    }
    this.#socket.curvePublicKey = own; // K1
    this.#socket.curveSecretKey = secret;
    this.#socket.curveServerKey = publisher;
  }

  #watch(handshakes: Handshakes): void {
    const { events } = this.#socket;
    for (const change of CHANGES) events.on(change, () => this.handlers.changed());
    events.on("handshake", () => {
      handshakes.succeeded();
      this.handlers.connected();
    });
    const failed = (why: string) => {
      if (why !== "") this.handlers.shutOut(why);
      this.handlers.broke("the handshake fails");
    };
    events.on("disconnect", () => this.handlers.broke("the publisher closed the connection"));
    events.on("connect:retry", () => this.handlers.broke("no connection is made"));
    events.on("handshake:error:auth", () => failed(handshakes.refused()));
    events.on("handshake:error:protocol", ({ error }) => failed(handshakes.mismatched(error.code)));
    events.on("handshake:error:other", () => failed(handshakes.cutOff(performance.now())));
  }

  get connected(): boolean {
    return !this.#socket.closed && this.#socket.writable;
  }

  /** Pass messages to the handlers until the channel is closed. The event loop runs in between. */
  async #run(): Promise<void> {
    let since = performance.now();
    for await (const frames of this.#socket) {
      this.handlers.message(frames);
      if (performance.now() - since < SLICE_MS) continue;
      await setImmediate();
      since = performance.now();
    }
  }

  send(header: string): void {
    if (!this.#socket.closed) this.#socket.send(header).catch(() => {});
  }

  redial(): void {
    try {
      this.#socket.disconnect(this.address);
    } catch {} // not connected
    this.#socket.connect(this.address);
  }

  close(): void {
    this.#socket.close();
  }
}
