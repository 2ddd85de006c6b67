/** Parses addresses from users and data endpoints from publishers (section 3 of the protocol). */

import { lookup as dnsLookup, type LookupAddress } from "node:dns";
import { BlockList, isIP, type LookupFunction } from "node:net";
import { AddressError } from "./errors.js";
import { printable } from "./words.js";

const TCP = /^tcp:\/\/(\[[^\]]*\]|[^:/\s]+):(\d{1,5})$/;
const IPC = /^ipc:\/\/(\S+)$/;
const IPC_PATH_MAX = 107; // the most bytes of a path that the kernel's socket address holds
const SHOWN_MAX = 200; // characters of a publisher's text in an error
const LOOPBACK = new BlockList();
LOOPBACK.addSubnet("127.0.0.0", 8, "ipv4");
LOOPBACK.addAddress("::1", "ipv6");
const ANY_HOST = new Set(["*", "0.0.0.0", "[::]"]);

/** Options for `connect` of `node:net`. */
export type Destination =
  | { host: string; port: number; lookup?: LookupFunction }
  | { path: string };

/** Looks up all addresses of a host, as `dns.lookup` does. */
export type Lookup = (
  host: string,
  options: { readonly all: true },
  done: (error: NodeJS.ErrnoException | null, found: LookupAddress[]) => void,
) => void;

/**
 * Return the address if it is valid.
 *
 * @throws AddressError - if the address is invalid.
 */
export function checkAddress(address: string): string {
  const port = Number(TCP.exec(address)?.[2] ?? 1);
  if (port >= 1 && port <= 65_535 && (TCP.test(address) || IPC.test(address))) return address;
  throw new AddressError(
    `${JSON.stringify(address)} is not an address of a publisher; write tcp://HOST:PORT or ipc://PATH`,
  );
}

/**
 * Return the control addresses of a worker. A comma in a text separates two addresses only if a
 * scheme such as `ipc://` follows, since a path may contain commas.
 *
 * @throws AddressError - if an address is invalid, or there is none.
 */
export function controlAddresses(given: string | readonly string[]): string[] {
  const addresses = typeof given === "string" ? given.split(/,\s*(?=\w+:\/\/)/) : [...given];
  for (const address of addresses) controlDestination(address);
  if (addresses.length === 0) throw new AddressError("no address: give at least one");
  return addresses;
}

/**
 * Return the destination of a control address.
 *
 * @throws AddressError - if the address is invalid.
 */
export function controlDestination(address: string): Destination {
  const path = IPC.exec(checkAddress(address))?.[1];
  if (path !== undefined) return { path: ipcPath(path) };
  const [, host = "", port = ""] = TCP.exec(address) ?? [];
  return { host: withoutBrackets(host), port: Number(port) };
}

/**
 * Return the destination of the data endpoint `data`, for a worker connected to `control`.
 *
 * Unless `anyHost` is true, the endpoint must be on the host of `control`: a hostile publisher must
 * not be able to make the worker connect to other hosts. Only a lookup shows whether two names
 * belong to one host, so names are compared when the worker connects.
 *
 * @throws AddressError - if the endpoint is invalid, or is not allowed.
 */
export function dataDestination(
  data: string,
  control: string,
  anyHost = false,
  lookup: Lookup = dnsLookup,
): Destination {
  const [path, folder] = [data, control].map((address) => IPC.exec(address)?.[1]);
  if (path !== undefined) {
    const beside = folder !== undefined && isBeside(ipcPath(path), ipcPath(folder));
    if (beside || anyHost) return { path: ipcPath(path) };
    throw elsewhereError(data, control);
  }
  const [, host = "", digits = ""] = TCP.exec(checkData(data)) ?? [];
  const used = TCP.exec(control)?.[1];
  if (ANY_HOST.has(host) && used === undefined) {
    throw new AddressError(
      `the publisher's data is at ${data}, on the host of its control address, but ${control} ` +
        "names no host; give the publisher an address to advertise",
    );
  }
  const port = Number(digits);
  const own = withoutBrackets(used ?? "");
  const advertised = ANY_HOST.has(host) ? own : withoutBrackets(host);
  if (anyHost || isSame(own, advertised)) return { host: advertised, port };
  const fault = () => elsewhereError(data, control);
  if (own === "" || (isIP(own) !== 0 && isIP(advertised) !== 0)) throw fault();
  return { port, ...sharedBy(advertised, own, (of) => addresses(of, lookup), fault) };
}

function checkData(data: string): string {
  try {
    return checkAddress(data);
  } catch {
    const text = printable(data, SHOWN_MAX);
    throw new AddressError(`the publisher's data is at ${text}, which is not an address`);
  }
}

function elsewhereError(data: string, control: string): AddressError {
  const text = printable(data, SHOWN_MAX);
  return new AddressError(
    `the publisher's data is at ${text}, which is not on the host of its control address ` +
      `${control} (or, of a path, not beside it), so everything is fetched, which is slower: if ` +
      "that address is right, allow it: `anyDataHost: true`",
  );
}

/** Whether the path of a data socket is the path of the control socket plus a suffix. */
function isBeside(path: string, control: string): boolean {
  return path.startsWith(control) && !path.slice(control.length).includes("/");
}

function withoutBrackets(host: string): string {
  return host.replace(/^\[|\]$/g, "").toLowerCase();
}

/** Whether two hosts are equal as text or as addresses, or are both loopback addresses. */
function isSame(one: string, other: string): boolean {
  if (one === other || (isLoopback(one) && isLoopback(other))) return true;
  const family = isIP(one);
  if (family === 0 || isIP(other) === 0) return false;
  const list = new BlockList(); // treats ::ffff:10.0.0.1 and 10.0.0.1 as equal
  list.addAddress(one, family === 4 ? "ipv4" : "ipv6");
  return list.check(other, isIP(other) === 4 ? "ipv4" : "ipv6");
}

function isLoopback(host: string): boolean {
  const family = isIP(host);
  if (family === 0) return host === "localhost";
  return LOOPBACK.check(host, family === 4 ? "ipv4" : "ipv6");
}

type Found = (host: string) => Promise<LookupAddress[]>;

function addresses(host: string, lookup: Lookup): Promise<LookupAddress[]> {
  const family = isIP(host);
  if (family !== 0) return Promise.resolve([{ address: host, family }]);
  return new Promise((done, failed) => {
    lookup(host, { all: true }, (error, found) => (error === null ? done(found) : failed(error)));
  });
}

/**
 * Return a destination with the IP addresses that both hosts have. On connecting, its lookup fails
 * with `fault()` if there are none. Its `host` is a name, since `node:net` calls `lookup` only for
 * names.
 */
function sharedBy(named: string, own: string, found: Found, fault: () => Error) {
  const [name, other] = isIP(named) === 0 ? [named, own] : [own, named];
  const look = async () => {
    const [some, others] = await Promise.all([found(name), found(other)]);
    const both = some.filter(({ address }) => others.some((one) => isSame(one.address, address)));
    if (both.length === 0) throw fault();
    return both as [LookupAddress, ...LookupAddress[]];
  };
  const lookup: LookupFunction = (_, { all }, done) => {
    look().then(
      (both) => (all ? done(null, both) : done(null, both[0].address, both[0].family)),
      (error) => done(error, "", 0),
    );
  };
  return { host: name, lookup };
}

function ipcPath(path: string): string {
  if (Buffer.byteLength(path) > IPC_PATH_MAX) {
    const text = printable(path, SHOWN_MAX);
    throw new AddressError(`ipc://${text}: a path has at most ${IPC_PATH_MAX} bytes`);
  }
  // As in ZeroMQ, a path that begins with @ is in the abstract namespace.
  return path.startsWith("@") ? `\0${path.slice(1)}` : path;
}
