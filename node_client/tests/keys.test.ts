/** A worker's keys on disk, why handshakes fail, and who may be on the data connection. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { chmodSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { type AddressInfo, createServer, type Socket } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { curveKeyPair } from "zeromq";
import { Handshakes } from "../src/handshakes.js";
import { KeysError, readWorkerKeys, Worker } from "../src/index.js";
import { KEYS, workerKeys } from "../src/keys.js";
import { Subscription } from "../src/subscription.js";
import { frame, GREETING, READY } from "./streams.js";

function pair(name: string) {
  const { publicKey, secretKey } = curveKeyPair();
  return { name, public: publicKey, secret: secretKey, publisher: curveKeyPair().publicKey };
}

/** A folder as `weightbus keygen` makes it, of workers with these names. */
function folder(...names: string[]) {
  const path = mkdtempSync(join(tmpdir(), "keys-"));
  mkdirSync(join(path, "workers"));
  const files = Object.fromEntries(
    names.map((name) => {
      const file = join(path, "workers", `${name.replace("*", "+")}.json`);
      writeFileSync(file, JSON.stringify(pair(name)), { mode: 0o600 });
      return [name, file];
    }),
  );
  return { path, files, [Symbol.dispose]: () => rmSync(path, { recursive: true }) };
}

test("a key file is read, and one in a folder by the worker's name", () => {
  using keys = folder("w", "gpu-*", "gpu-0");
  for (const [name, file] of Object.entries(keys.files)) {
    assert.equal(readWorkerKeys(file).name, name);
    assert.deepEqual(readWorkerKeys(keys.path, name), readWorkerKeys(file));
  }
  assert.equal(readWorkerKeys(keys.path, "gpu-1").name, "gpu-*");
  assert.throws(() => readWorkerKeys(keys.path, "cpu-1"), /has 0 files for cpu-1/);
  assert.throws(() => readWorkerKeys(keys.path), /has 3 files for a worker without a name/);
  using one = folder("w");
  assert.equal(readWorkerKeys(one.path).name, "w");
});

test("what makes no sense is an error that names the file and shows no secret", () => {
  using keys = folder("w");
  const { w: file = "" } = keys.files;
  const good = readWorkerKeys(file);
  const cases: [unknown, RegExp][] = [
    [{ ...good, secret: pair("x").secret }, /do not belong together/],
    [{ ...good, public: good.public.slice(1) }, /not a worker's keys/],
    [{ ...good, name: "a*b*" }, /not a worker's keys/],
    [{ name: "w" }, /not a worker's keys/],
    [[], /not a worker's keys/],
    [{ ...good, public: "#".repeat(40) }, /each group of five for at most 32 bits/],
    [{ ...good, publisher: `%nSc1${good.publisher.slice(5)}` }, /not a worker's keys/], // 2^32
  ];
  for (const [bad, why] of cases) {
    writeFileSync(file, JSON.stringify(bad));
    assert.throws(
      () => readWorkerKeys(file),
      (error) => {
        assert.ok(error instanceof KeysError && error.message.includes(file), String(error));
        assert.ok(!error.message.includes(good.secret));
        return why.test(error.message);
      },
    );
  }
  writeFileSync(file, `{"secret": "${good.secret}" no`);
  assert.throws(
    () => readWorkerKeys(file),
    (error) => {
      return error instanceof KeysError && !error.message.includes(good.secret.slice(0, 8));
    },
  );
  for (const text of [JSON.stringify(good), `\n ${JSON.stringify(good)}`]) {
    assert.throws(
      () => workerKeys(text),
      (error) => {
        assert.ok(error instanceof KeysError && !error.message.includes(good.secret));
        return /is JSON .*, not a path/.test(error.message);
      },
    );
  }
  writeFileSync(file, JSON.stringify({ ...good, later: "fields" }));
  assert.deepEqual(readWorkerKeys(file), good);
  chmodSync(file, 0o604);
  assert.throws(() => readWorkerKeys(file), /chmod 600/);
  assert.throws(() => readWorkerKeys(`${file}x`), /cannot be read/);
});

test("keys are given, or in the environment, or none", () => {
  using keys = folder("w");
  const { w: file = "" } = keys.files;
  assert.equal(workerKeys(undefined), null);
  process.env[KEYS] = keys.path;
  try {
    assert.equal(workerKeys(undefined)?.name, "w");
    assert.equal(workerKeys(""), null);
    assert.throws(() => workerKeys(undefined, "other"), /has 0 files for other/);
  } finally {
    delete process.env[KEYS];
  }
  assert.deepEqual(workerKeys(readWorkerKeys(file)), readWorkerKeys(file));
  assert.throws(() => workerKeys({ ...pair("w"), secret: "" }), KeysError);
});

test("a worker is called as its key is", async () => {
  const named = async (name: string) => {
    const worker = new Worker("ipc:///nobody/is-here", { models: ["m"], keys: pair(name) });
    await worker.close();
    return worker.name;
  };
  assert.equal(await named("w"), "w");
  assert.match(await named("gpu-*"), new RegExp(`^gpu-.*-${process.pid}-[0-9a-f]{6}$`));
});

test("what a socket tells of a failure is put in words", () => {
  const keyed = new Handshakes(1000);
  assert.match(keyed.refused(), /does not allow this worker's key/);
  assert.match(keyed.mismatched("ERR_ZMTP_MECHANISM_MISMATCH"), /speaks without keys/);
  assert.equal(keyed.mismatched("ERR_ZMTP_UNSPECIFIED"), "");
  const cut = (...times: number[]) => times.map((time) => keyed.cutOff(time) !== "");
  assert.deepEqual(cut(0, 500, 999), [false, false, false], "not for long enough");
  assert.deepEqual(cut(1000), [true]);
  keyed.succeeded();
  assert.deepEqual(cut(5000, 9000), [false, false], "not often enough");
  assert.match(keyed.cutOff(9001), /another key than/);
});

/** Serve subscribers; tell what each has said after its greeting and READY. */
async function serve(heard: (said: string, socket: Socket) => void) {
  const server = createServer((socket) => {
    socket.on("error", () => {});
    socket.write(Buffer.concat([GREETING, READY]));
    let all = "";
    socket.on("data", (bytes) => {
      all += bytes.toString("latin1");
      if (all.endsWith("\x01m")) heard(all.slice(all.indexOf("Identity") + 12), socket);
    });
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as AddressInfo;
  return { server, to: { host: "127.0.0.1", port } };
}

test(
  "a ticket is shown first, once, and nothing is dialled without",
  { timeout: 60_000 },
  async () => {
    const said: string[] = [];
    let told = () => {};
    const { server, to } = await serve((words, socket) => {
      said.push(words);
      socket.destroy();
      told();
    });
    const closed = () =>
      new Promise<void>((resolve) => {
        const look = () => (subscription.needsTicket ? resolve() : setImmediate(look));
        told = look;
      });
    const subscription = new Subscription({
      place: () => null,
      message: () => {},
      broken: () => {},
    });
    subscription.subscribe("m", true);
    for (const digit of ["1", "2"]) {
      const spent = closed();
      subscription.connect(to, digit.repeat(32));
      assert.ok(!subscription.needsTicket);
      await spent;
      subscription.redial();
      assert.ok(subscription.needsTicket, "it does not dial");
    }
    subscription.close();
    server.close();
    const shown = (digit: string) => `\0\x21\x03${digit.repeat(32)}\0\x02\x01m`;
    assert.deepEqual(said, [shown("1"), shown("2")]);
  },
);

test("another ticket leaves a connection as it is", { timeout: 60_000 }, async () => {
  const said: string[] = [];
  let told: (socket: Socket) => void = () => {};
  const { server, to } = await serve((words, socket) => {
    said.push(words.slice(3, 35));
    told(socket);
  });
  const next = () =>
    new Promise<Socket>((resolve) => {
      told = resolve;
    });
  const subscription = new Subscription({ place: () => null, message: () => {}, broken: () => {} });
  subscription.subscribe("m", true);
  const [first] = [next(), subscription.connect(to, "1".repeat(32))];
  const socket = await first;
  subscription.connect(to, "2".repeat(32));
  const pong = once(socket, "data");
  const closed = once(socket, "close").then(() => assert.fail("it has hung up"));
  socket.write(frame(Buffer.from("\x04PING\0\0", "latin1"), 4));
  await Promise.race([pong, closed]);
  closed.catch(() => {});
  const second = next();
  socket.destroy(); // the ticket that is kept serves the next one
  await second;
  assert.deepEqual(said, ["1".repeat(32), "2".repeat(32)]);
  subscription.close();
  server.close();
});
