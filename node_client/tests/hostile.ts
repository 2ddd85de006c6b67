/**
 * A publisher that means harm, of plain sockets: it speaks ZMTP by hand, and says what a test has it
 * say. It has no keys.
 */

import { once } from "node:events";
import { type AddressInfo, createServer, type Server, type Socket } from "node:net";
import { frame, GREETING, message, READY, ROUTER_READY } from "./streams.js";

export const EPOCH = 7;
const COMMAND = 4;

/** One socket that listens, and what those who connect have said. */
export class Port implements AsyncDisposable {
  readonly peers: Socket[] = [];
  readonly heard: Buffer[] = [];
  #arrived: () => void = () => {};
  #hungUp: () => void = () => {};

  private constructor(
    readonly server: Server,
    readonly address: string,
    /** What is said at once to whoever connects. */
    public greets: Uint8Array,
  ) {}

  /** Listen at a path, or at a port of the loopback. */
  static async open(greets: Uint8Array, path?: string): Promise<Port> {
    const server = createServer();
    if (path === undefined) server.listen(0, "127.0.0.1");
    else server.listen(path);
    await once(server, "listening");
    const bound = server.address();
    const tcp = () => `tcp://127.0.0.1:${(bound as AddressInfo).port}`;
    const port = new Port(server, typeof bound === "string" ? `ipc://${bound}` : tcp(), greets);
    server.on("connection", (socket) => port.#greet(socket));
    return port;
  }

  #greet(socket: Socket): void {
    socket.on("error", () => {}); // the other side hangs up when it likes
    socket.on("data", (bytes) => {
      this.heard.push(bytes);
      this.#arrived();
    });
    socket.on("close", () => this.#hungUp());
    socket.write(this.greets);
    this.peers.push(socket);
  }

  /** Wait until somebody has said this. */
  async hears(words: string): Promise<void> {
    while (!Buffer.concat(this.heard).includes(words)) {
      await new Promise<void>((resolve) => {
        this.#arrived = resolve;
      });
    }
    this.heard.length = 0;
  }

  /** Say the same to the one who came last, again and again, until so many bytes are out or it hangs up. */
  async flood(bytes: Uint8Array, most: number): Promise<number> {
    const socket = this.peers.at(-1) as Socket;
    let said = 0;
    while (said < most && !socket.destroyed) {
      said += bytes.length;
      if (socket.write(bytes)) continue;
      await new Promise<void>((resolve) => {
        socket.once("drain", resolve);
        this.#hungUp = resolve;
      });
    }
    this.heard.length = 0; // what comes now is said by who comes next
    return said;
  }

  say(bytes: Uint8Array): void {
    this.peers.at(-1)?.write(bytes);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const peer of this.peers) peer.destroy();
    this.server.close();
  }
}

/** A publisher: the port of its control channel, and that of its data. */
export class Hostile implements AsyncDisposable {
  private constructor(
    readonly control: Port,
    readonly data: Port,
  ) {}

  static async start(path?: string): Promise<Hostile> {
    const control = await Port.open(Buffer.concat([GREETING, ROUTER_READY]), path);
    const data = await Port.open(Buffer.concat([GREETING, READY]), path && `${path}.data`);
    return new Hostile(control, data);
  }

  get address(): string {
    return this.control.address;
  }

  /** Let in who says hello. */
  async welcome(more: object = {}): Promise<void> {
    await this.control.hears('"type":"hello"');
    const known = { epoch: EPOCH, data: this.data.address, ping_ms: 1000, lost_ms: 5000 };
    this.say({ type: "welcome", ...known, models: {}, ...more });
  }

  /** Let in who comes again, on a connection on which it takes itself for one that is known. */
  async welcomeBack(): Promise<void> {
    await this.control.hears('"type":"ping"');
    this.say({ type: "refuse", code: "unknown-worker", text: "" });
    await this.welcome();
  }

  say(header: object, ...payloads: Uint8Array[]): void {
    this.control.say(message(json(header), ...payloads));
  }

  publish(topic: string, header: object, ...payloads: Uint8Array[]): void {
    this.data.say(message(Buffer.from(topic), json(header), ...payloads));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.control[Symbol.asyncDispose]();
    await this.data[Symbol.asyncDispose]();
  }
}

function json(header: object): Buffer {
  return Buffer.from(JSON.stringify({ wbp: 1, ...header }));
}

/** A message without an end: so many frames, behind each of which more follow. */
export function endless(frames: number, bytes: number): Buffer {
  return Buffer.concat(Array.from({ length: frames }, () => frame(Buffer.alloc(bytes), 1)));
}

/** So many PINGs of ZMTP, of the longest context. */
export function pings(count: number): Buffer {
  const ping = Buffer.concat([Buffer.from("\x04PING\0\x10", "latin1"), Buffer.alloc(16, "c")]);
  return Buffer.concat(Array.from({ length: count }, () => frame(ping, COMMAND)));
}
