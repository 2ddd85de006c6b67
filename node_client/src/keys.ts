/**
 * Reads a worker's keys, as `weightbus keygen` writes them, from a file of one JSON object, or from
 * the folder that has such a file for each worker.
 *
 *     DIR/workers/NAME.json     the worker's key pair, its name, the publisher's public key
 */

import { createPrivateKey, createPublicKey } from "node:crypto";
import { closeSync, fstatSync, openSync, readdirSync, readSync, statSync } from "node:fs";
import { basename, join } from "node:path";
import { KeysError } from "./errors.js";
import { type Field, matching, object } from "./fields.js";
import { TEXT_MAX } from "./limits.js";

export const KEYS = "WEIGHTBUS_KEYS"; // the environment variable with the default path
const [WORKERS, SUFFIX] = ["workers", ".json"] as const;
const OTHERS = 0o007; // the permissions of other users in a file's mode
const DIGITS =
  "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"; // Z85
// The PKCS #8 header before the 32 bytes of a secret X25519 key (RFC 8410).
const PKCS8 = Buffer.from("302e020100300506032b656e04220420", "hex");

const z85 = matching("40 characters of Z85", /^[0-9a-zA-Z.\-:+=^!/*?&<>()[\]{}@%$#]{40}$/);
const key: Field<string> = {
  must: `${z85.must}, each group of five for at most 32 bits`, // some groups stand for more
  read: (v) => {
    const found = z85.read(v);
    return found && valuesOf(found).every((value) => value < 2 ** 32) ? found : undefined;
  },
};
const form = matching(
  "1 to 128 of the characters A-Z a-z 0-9 . _ - and at most one *",
  /^(?=.{1,128}$)[A-Za-z0-9._-]*\*?[A-Za-z0-9._-]*$/,
);
const FILE = { name: form, public: key, secret: key, publisher: key };
const HELP = "see weightbus keygen --help";

/** A worker's key pair, and the public key of the only publisher that it connects to. */
export interface WorkerKeys {
  /** The worker name that the key allows; a `*` in it stands for any characters. */
  readonly name: string;
  /** Each key is 40 characters of Z85. */
  readonly public: string;
  readonly secret: string;
  readonly publisher: string;
}

/**
 * Return a worker's keys; null if the worker has no keys.
 *
 * @param given - the keys, or a path; undefined means the path in the environment variable.
 * @param name - the worker's name, if the user set one.
 * @throws KeysError - if the keys cannot be read or are invalid.
 */
export function workerKeys(
  given: WorkerKeys | string | undefined,
  name?: string,
): WorkerKeys | null {
  if (typeof given === "object") return checkPair(checked(given, "keys"), "keys");
  const path = given ?? process.env[KEYS] ?? "";
  return path === "" ? null : readWorkerKeys(path, name);
}

/**
 * Return the keys for each of several addresses; null for each if the worker has no keys.
 *
 * @param given - as for `workerKeys`, for all addresses; or a list with an item for each.
 * @throws KeysError - as `workerKeys`; also if the list does not have keys for each address.
 */
export function keysOfEach(
  given: WorkerKeys | string | readonly (WorkerKeys | string)[] | undefined,
  addresses: readonly string[],
  name?: string,
): (WorkerKeys | null)[] {
  const list: readonly (WorkerKeys | string)[] | null = Array.isArray(given) ? given : null;
  if (list === null) {
    const keys = workerKeys(given as WorkerKeys | string | undefined, name);
    return addresses.map(() => keys);
  }
  if (list.length !== addresses.length) {
    const count = `${list.length} keys for ${addresses.length} addresses`;
    throw new KeysError(`${count} (${addresses.join(", ")}): give one for each, or one for all`);
  }
  return addresses.map((address, index) => {
    const keys = workerKeys(list[index], name);
    if (keys !== null) return keys;
    const why = "a worker that has keys needs a key for each publisher";
    throw new KeysError(`no keys for ${address}: ${why}; give one for each address, or none`);
  });
}

/**
 * Read a worker's key file, or the file for `name` in a folder that `weightbus keygen` made.
 *
 * @throws KeysError - if there is no such file, or it is invalid.
 */
export function readWorkerKeys(path: string, name?: string): WorkerKeys {
  if (path.trimStart().startsWith("{")) {
    const what = "`keys` is JSON (not shown), not a path: give the path of a file that holds it";
    throw new KeysError(what);
  }
  const found = isFolder(path) ? fileOf(join(path, WORKERS), name) : path;
  return checkPair(checked(parseJson(read(found), found), found), found);
}

function isFolder(path: string): boolean {
  try {
    return statSync(path).isDirectory();
  } catch {
    return false; // reading the path reports the error
  }
}

function checked(value: unknown, where: string): WorkerKeys {
  const found = object(FILE).read(value);
  if (found !== undefined) return found;
  const wrong = Object.entries(FILE).map(([field, { must }]) => `${field}: ${must}`);
  throw new KeysError(`${where}: not a worker's keys, which have ${wrong.join("; ")}; ${HELP}`);
}

function parseJson(text: string, path: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    // Without the parser's message, which may quote a secret.
    throw new KeysError(`${path} is not a key file: it is not valid JSON; ${HELP}`);
  }
}

function read(path: string): string {
  let opened: number | undefined;
  try {
    opened = openSync(path, "r");
    if (fstatSync(opened).mode & OTHERS) {
      throw new KeysError(`${path} is open to every user of this host: chmod 600 ${path}`);
    }
    const bytes = Buffer.alloc(TEXT_MAX);
    return bytes.toString("utf8", 0, readSync(opened, bytes));
  } catch (error) {
    if (error instanceof KeysError) throw error;
    throw new KeysError(`${path} cannot be read: ${(error as Error).message}`);
  } finally {
    if (opened !== undefined) closeSync(opened);
  }
}

/** Return the path of the file for a worker's name; without a name, the path of the only file. */
function fileOf(folder: string, name: string | undefined): string {
  const files = filesOf(folder).map((file) => ({ file, of: nameOf(file) }));
  const exact = files.filter(({ of }) => of === name);
  const fit = files.filter(({ of }) => name === undefined || fits(of, name));
  const [only, ...others] = exact.length > 0 ? exact : fit;
  if (only !== undefined && others.length === 0) return join(folder, only.file);
  const names = files.map(({ file }) => file).join(", ") || "it is empty";
  throw new KeysError(
    `${folder} has ${fit.length} files for ${name ?? "a worker without a name"} (${names}): give ` +
      "`keys` one file, or `name` of the worker that it is for; weightbus keygen makes more",
  );
}

function filesOf(folder: string): string[] {
  try {
    return readdirSync(folder)
      .filter((file) => file.endsWith(SUFFIX))
      .sort();
  } catch (error) {
    throw new KeysError(`${folder} cannot be read: ${(error as Error).message}`);
  }
}

/**
 * Return the pattern of worker names that a key file is for. A file name has `+` where the pattern
 * has `*`; a worker name never contains `+`.
 */
function nameOf(file: string): string {
  return basename(file, SUFFIX).replace("+", "*");
}

/** Whether a key for this pattern allows this worker name. */
function fits(pattern: string, name: string): boolean {
  const [begin = "", end] = pattern.split("*");
  if (end === undefined) return name === pattern;
  const long = name.length >= begin.length + end.length;
  return long && name.startsWith(begin) && name.endsWith(end);
}

/** Return the keys if the public key belongs to the secret key. */
function checkPair(keys: WorkerKeys, where: string): WorkerKeys {
  const secret = createPrivateKey({
    key: Buffer.concat([PKCS8, bytesOf(keys.secret)]),
    format: "der",
    type: "pkcs8",
  });
  const own = createPublicKey(secret).export({ format: "der", type: "spki" }).subarray(-32);
  if (own.equals(bytesOf(keys.public))) return keys;
  throw new KeysError(
    `${where}: public and secret key do not belong together; make a new pair with weightbus keygen`,
  );
}

/** Return, for each five characters of a key, the number that they stand for. */
function valuesOf(key: string): number[] {
  const groups = key.match(/.{5}/g) ?? [];
  return groups.map((five) => [...five].reduce((sum, c) => sum * 85 + DIGITS.indexOf(c), 0));
}

/** Return the 32 bytes that the 40 characters of a key stand for: 4 bytes for each 5 characters. */
function bytesOf(key: string): Buffer {
  const bytes = Buffer.alloc((key.length / 5) * 4);
  for (const [index, value] of valuesOf(key).entries()) bytes.writeUInt32BE(value, index * 4);
  return bytes;
}
