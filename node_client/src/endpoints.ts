/** Addresses: what a user types, and what a publisher tells a worker (section 3 of the protocol). */

import { AddressError } from "./errors.js";

const TCP = /^tcp:\/\/(\[[^\]]*\]|[^:/\s]+):(\d{1,5})$/;
const IPC = /^ipc:\/\/(\S+)$/;
const IPC_PATH_MAX = 107; // bytes that fit an address of the kernel
const ANY_HOST = new Set(["*", "0.0.0.0", "[::]"]);

/** What `node:net` connects to. */
export type Destination = { host: string; port: number } | { path: string };

/**
 * Return the address if a worker can connect to it.
 *
 * @throws AddressError - if it cannot.
 */
export function checkAddress(address: string): string {
  const port = Number(TCP.exec(address)?.[2] ?? 1);
  if (port >= 1 && port <= 65_535 && (TCP.test(address) || IPC.test(address))) return address;
  throw new AddressError(
    `${JSON.stringify(address)} is no address of a publisher; write tcp://HOST:PORT or ipc://PATH`,
  );
}

/**
 * Return where the data socket is, which the publisher names `data`, for a worker that reached it
 * at `control`.
 *
 * @throws AddressError - if the publisher told something that cannot be connected to.
 */
export function dataDestination(data: string, control: string): Destination {
  checkAddress(data);
  const path = IPC.exec(data)?.[1];
  if (path !== undefined) return { path: ipcPath(path) };
  const [, host = "", port = ""] = TCP.exec(data) ?? [];
  const used = ANY_HOST.has(host) ? TCP.exec(control)?.[1] : host;
  if (used === undefined) {
    throw new AddressError(
      `the publisher's data is at ${data}, on the host of its control address, but ${control} ` +
        "names no host; give the publisher an address to advertise",
    );
  }
  return { host: used.replace(/^\[|\]$/g, ""), port: Number(port) };
}

function ipcPath(path: string): string {
  if (Buffer.byteLength(path) > IPC_PATH_MAX) {
    throw new AddressError(`ipc://${path}: a path has at most ${IPC_PATH_MAX} bytes`);
  }
  // A path that begins with @ is a name outside of the file system, as ZeroMQ has it.
  return path.startsWith("@") ? `\0${path.slice(1)}` : path;
}
