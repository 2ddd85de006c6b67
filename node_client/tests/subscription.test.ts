/** The data connection: dialled until it is of use, and dialled again whenever it breaks. */

import assert from "node:assert/strict";
import { once } from "node:events";
import {
  type AddressInfo,
  Socket as ClientSocket,
  createServer,
  type Server,
  type Socket,
} from "node:net";
import { test } from "node:test";
import { COMMANDS, UNREAD_BYTES_MAX } from "../src/limits.js";
import { Subscription, type SubscriptionHandlers } from "../src/subscription.js";
import { Lease } from "../src/transfer.js";
import { frame, GREETING, message, READY } from "./streams.js";

const deadline = { timeout: 60_000 };
const PAYLOAD = Buffer.alloc(3_000_000, 9);

async function serve(talk: (socket: Socket) => void): Promise<Server> {
  const server = createServer((socket) => {
    socket.on("error", () => {}); // the other side hangs up when it likes
    talk(socket);
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  return server;
}

function destination(server: Server) {
  return { host: "127.0.0.1", port: (server.address() as AddressInfo).port };
}

/** Subscribe to `m`; end with what `until` returns. */
async function subscribe<T>(
  to: { host: string; port: number },
  until: (done: (value: T) => void) => Partial<SubscriptionHandlers>,
): Promise<T> {
  const { promise, resolve } = deferred<T>();
  const subscription = new Subscription({
    place: (_, size) => new Lease(new Uint8Array(size)),
    message: () => {},
    broken: () => {},
    ...until(resolve),
  });
  subscription.subscribe("m", true);
  subscription.connect(to);
  const value = await promise;
  subscription.close();
  return value;
}

function deferred<T>() {
  let resolve: (value: T) => void = () => {};
  const promise = new Promise<T>((done) => {
    resolve = done;
  });
  return { promise, resolve };
}

test(
  "a connection that is cut in a payload is dialled again, and asks again",
  deadline,
  async () => {
    const asked: string[] = [];
    let cancelled = 0;
    const server = await serve((socket) => {
      socket.write(Buffer.concat([GREETING, READY]));
      let heard = "";
      socket.on("data", (bytes) => {
        heard += bytes.toString("latin1");
        if (!heard.endsWith("\x00\x02\x01m")) return; // the subscription
        asked.push(heard.slice(0, 12));
        heard = "";
        const bytesOut = message(Buffer.from("m"), Buffer.from("h"), PAYLOAD);
        if (asked.length > 1) socket.write(bytesOut);
        else socket.write(bytesOut.subarray(0, 2_000_000), () => socket.destroy());
      });
    });
    const place = (_: unknown, size: number) =>
      new Lease(new Uint8Array(size), () => {
        cancelled += 1;
      });
    const frames = await subscribe<readonly Uint8Array[]>(destination(server), (message) => {
      return { message, place };
    });
    server.close();
    assert.deepEqual(Buffer.from(frames[2] ?? []), PAYLOAD);
    assert.equal(asked.length, 2);
    assert.ok(cancelled >= 1, "the first place was given back");
  },
);

test("what comes slowly is taken piece by piece", deadline, async () => {
  const sent = message(Buffer.from("m"), Buffer.from("h"), PAYLOAD);
  const place = sent.length - PAYLOAD.length; // where the payload begins
  let end = place;
  let sendMore = () => {};
  const server = await serve((socket) => {
    sendMore = () => {
      end += 1000;
      socket.write(sent.subarray(end - 1000, end));
    };
    socket.write(Buffer.concat([GREETING, READY, sent.subarray(0, end)]));
    sendMore();
  });
  const pieces = await subscribe<number>(destination(server), (done) => ({
    place: (_, size) => {
      const lease = new Lease(new Uint8Array(size));
      const received = lease.received.bind(lease);
      let count = 0;
      lease.received = (bytes) => {
        received(bytes);
        if (place + lease.count < end) return; // the rest of what was sent comes
        count += 1;
        if (count === 5) done(count);
        else sendMore(); // only once these are here
      };
      return lease;
    },
  }));
  server.close();
  assert.equal(pieces, 5);
});

test("whoever dials anew does so at once, and asks again", deadline, async () => {
  let asked = 0;
  const subscription = new Subscription({ place: () => null, message: () => {}, broken: () => {} });
  const { promise, resolve } = deferred<void>();
  const server = await serve((socket) => {
    socket.write(Buffer.concat([GREETING, READY]));
    let heard = "";
    socket.on("data", (bytes) => {
      heard += bytes.toString("latin1");
      if (!heard.endsWith("\x00\x02\x01m")) return; // the subscription
      asked += 1;
      if (asked === 1) subscription.redial();
      else resolve();
    });
  });
  subscription.redial(); // there is nowhere to dial to yet
  subscription.subscribe("m", true);
  subscription.connect(destination(server));
  await promise;
  subscription.close();
  server.close();
});

test("whoever speaks another protocol is told of, once", deadline, async () => {
  const server = await serve((socket) => socket.end("HTTP/1.1 400 Bad Request\r\n".repeat(9)));
  const reason = await subscribe<string>(destination(server), (broken) => ({ broken }));
  server.close();
  assert.equal(reason, "the other side does not speak ZMTP 3");
});

test("so is a port where nobody listens", deadline, async () => {
  const server = await serve(() => {});
  const nobody = destination(server);
  server.close();
  await once(server, "close");
  assert.match(await subscribe<string>(nobody, (broken) => ({ broken })), /ECONNREFUSED/);
});

test("pings alone are no sign of life for ever", deadline, async () => {
  const silence = { any: 60_000, message: 300 };
  let connections = 0;
  const { promise, resolve } = deferred<void>();
  const server = await serve((socket) => {
    socket.write(Buffer.concat([GREETING, READY]));
    socket.on("data", () => {});
    const pinging = setInterval(() => socket.write(frame(Buffer.from("\x04PING\0\0"), 4)), 100);
    socket.on("close", () => clearInterval(pinging));
    connections += 1;
    if (connections === 2) resolve();
  });
  const handlers = { place: () => null, message: () => {}, broken: () => {} };
  const subscription = new Subscription(handlers, silence);
  subscription.connect(destination(server));
  await promise;
  subscription.close();
  server.close();
});

test(
  "who has more commands than a publisher is hung up on, ever more seldom",
  deadline,
  async () => {
    const pings = Array.from({ length: COMMANDS.burst + 1 }, () => {
      return frame(Buffer.from("\x04PING\0\0", "latin1"), 4);
    });
    const server = await serve((socket) => {
      socket.write(Buffer.concat([GREETING, READY, ...pings]));
    });
    const reason = await subscribe<string>(destination(server), (broken) => ({ broken }));
    server.close();
    assert.match(reason, /more than 64 commands at once, or 16 a second/);
  },
);

test("as many commands as a publisher may have are answered", deadline, async () => {
  const pings = Array.from({ length: COMMANDS.burst - 1 }, () => {
    return frame(Buffer.from("\x04PING\0\0", "latin1"), 4);
  });
  const sent = message(Buffer.from("m"), Buffer.from("h"));
  const server = await serve((socket) => {
    socket.write(Buffer.concat([GREETING, READY, ...pings, sent]));
  });
  const frames = await subscribe<readonly Uint8Array[]>(destination(server), (message) => {
    return { message };
  });
  server.close();
  assert.equal(frames.length, 2);
});

test("who does not read what it asks for is hung up on", deadline, async () => {
  const server = await serve((socket) => {
    socket.write(Buffer.concat([GREETING, READY, frame(Buffer.from("\x04PING\0\0"), 4)]));
  });
  Object.defineProperty(ClientSocket.prototype, "writableLength", {
    configurable: true,
    get: () => UNREAD_BYTES_MAX + 1, // as if the kernel took no more for the other side
  });
  try {
    const reason = await subscribe<string>(destination(server), (broken) => ({ broken }));
    assert.match(reason, /does not read 65537 bytes; at most 65536 may be queued/);
  } finally {
    Reflect.deleteProperty(ClientSocket.prototype, "writableLength"); // that of all streams remains
    server.close();
  }
});
