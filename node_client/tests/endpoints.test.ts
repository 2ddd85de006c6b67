/** Where a worker connects for published data: where the publisher is, or where its user says so. */

import assert from "node:assert/strict";
import type { LookupAddress } from "node:dns";
import { once } from "node:events";
import { type AddressInfo, connect, createServer } from "node:net";
import { test } from "node:test";
import { type Destination, dataDestination, type Lookup } from "../src/endpoints.js";
import { AddressError } from "../src/errors.js";

/** The addresses of some hosts. */
const HOSTS: Record<string, string[]> = {
  trainer: ["10.0.0.5", "127.0.0.1"],
  alias: ["127.0.0.1", "10.9.9.9"],
  elsewhere: ["10.0.0.6"],
};

const lookup: Lookup = (host, _, done) => {
  const found = HOSTS[host]?.map((address): LookupAddress => ({ address, family: 4 }));
  if (found === undefined) done(new Error(`there is no ${host}`), []);
  else done(null, found);
};

const to = (data: string, control: string, anyHost = false) =>
  dataDestination(data, control, anyHost, lookup);

const KNOWN: [data: string, control: string, found: Destination, anyHost?: boolean][] = [
  ["tcp://*:2", "tcp://trainer:1", { host: "trainer", port: 2 }],
  ["tcp://0.0.0.0:2", "tcp://10.0.0.5:1", { host: "10.0.0.5", port: 2 }],
  ["tcp://[::]:2", "tcp://[::1]:1", { host: "::1", port: 2 }],
  ["tcp://Trainer:2", "tcp://trainer:1", { host: "trainer", port: 2 }],
  ["tcp://10.0.0.5:2", "tcp://10.0.0.5:1", { host: "10.0.0.5", port: 2 }],
  ["tcp://[::ffff:10.0.0.5]:2", "tcp://10.0.0.5:1", { host: "::ffff:10.0.0.5", port: 2 }],
  ["tcp://[fe80::0:1]:2", "tcp://[fe80::1]:1", { host: "fe80::0:1", port: 2 }],
  ["tcp://127.0.0.1:2", "tcp://localhost:1", { host: "127.0.0.1", port: 2 }],
  ["tcp://[::1]:2", "tcp://127.0.0.2:1", { host: "::1", port: 2 }],
  ["tcp://10.0.0.6:2", "tcp://10.0.0.5:1", { host: "10.0.0.6", port: 2 }, true],
  ["tcp://elsewhere:2", "ipc:///run/c", { host: "elsewhere", port: 2 }, true],
  ["ipc:///run/c.data", "ipc:///run/c", { path: "/run/c.data" }],
  ["ipc://@c.data", "ipc://@c", { path: "\0c.data" }],
  ["ipc:///run/other", "ipc:///run/c", { path: "/run/other" }, true],
];
for (const [data, control, found, anyHost] of KNOWN) {
  test(`${data} of ${control}${anyHost === true ? ", any allowed" : ""}`, () => {
    assert.deepEqual(to(data, control, anyHost), found);
  });
}

const ELSEWHERE: [data: string, control: string][] = [
  ["tcp://10.0.0.6:2", "tcp://10.0.0.5:1"],
  ["tcp://169.254.169.254:80", "tcp://127.0.0.1:1"],
  ["tcp://127.0.0.1:2", "tcp://10.0.0.5:1"],
  ["tcp://127.0.0.1:2", "ipc:///run/c"],
  ["ipc:///run/docker.sock", "tcp://127.0.0.1:1"],
  ["ipc:///run/docker.sock", "ipc:///run/c"],
  ["ipc:///run/c/../docker.sock", "ipc:///run/c"],
  ["ipc://@other", "ipc://@c"],
  ["ipc://@c.data", "ipc:///run/c"],
  ["tcp://trainer:0", "tcp://trainer:1"],
  ["tcp://trainer", "tcp://trainer:1"],
  ["http://trainer:80", "tcp://trainer:1"],
];
for (const [data, control] of ELSEWHERE) {
  test(`never ${data} of ${control}`, () => {
    assert.throws(() => to(data, control), AddressError);
  });
}

/** Connect; return the address of the other side, or what is wrong. */
async function dialled(data: string, control: string): Promise<string> {
  const socket = connect(to(data, control));
  try {
    await once(socket, "connect");
    return socket.remoteAddress ?? "";
  } catch (error) {
    return (error as Error).message;
  } finally {
    socket.destroy();
  }
}

test("whether two names are of one host is known once they are looked up", async () => {
  await using server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as AddressInfo;
  assert.equal(await dialled(`tcp://alias:${port}`, "tcp://trainer:1"), "127.0.0.1");
  assert.equal(await dialled(`tcp://127.0.0.1:${port}`, "tcp://trainer:1"), "127.0.0.1");
  assert.equal(await dialled(`tcp://alias:${port}`, "tcp://127.0.0.1:1"), "127.0.0.1");
  for (const [one, other] of [
    ["elsewhere", "trainer"],
    ["10.0.0.6", "trainer"],
    ["trainer", "10.0.0.7"],
  ]) {
    const told = await dialled(`tcp://${one}:${port}`, `tcp://${other}:1`);
    assert.match(told, /not on the host of its control address .*`anyDataHost: true`/);
  }
  assert.match(await dialled(`tcp://nobody:${port}`, "tcp://trainer:1"), /there is no nobody/);
});
