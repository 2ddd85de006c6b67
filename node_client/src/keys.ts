/**
 * A worker's keys, as `weightbus keygen` writes them: a file of one small JSON object, or the folder
 * that has such files for many.
 *
 *     DIR/workers/NAME.json     a worker's pair, its name, and the publisher's public key
 */

import { createPrivateKey, createPublicKey } from "node:crypto";
import { closeSync, fstatSync, openSync, readdirSync, readSync, statSync } from "node:fs";
import { basename, join } from "node:path";
import { KeysError } from "./errors.js";
import { type Field, matching, object } from "./fields.js";
import { TEXT_MAX } from "./limits.js";

export const KEYS = "WEIGHTBUS_KEYS"; // of the environment, where no keys are given: a path, or empty
const [WORKERS, SUFFIX] = ["workers", ".json"] as const;
const EVERYBODY = 0o007; // of a file's mode: what users may that are neither its owner nor of its group
const DIGITS =
  "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"; // Z85
// What stands before the 32 bytes of a secret X25519 key in PKCS #8 (RFC 8410).
const PKCS8 = Buffer.from("302e020100300506032b656e04220420", "hex");

const z85 = matching("40 characters of Z85", /^[0-9a-zA-Z.\-:+=^!/*?&<>()[\]{}@%$#]{40}$/);
const key: Field<string> = {
  must: `${z85.must}, each five of which stand for 32 bits`, // some stand for more
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

/** What a worker needs: its pair, and the public key of the only publisher that it speaks to. */
export interface WorkerKeys {
  /** What it may be called; a `*` in it stands for any characters. */
  readonly name: string;
  /** Its pair, 40 characters of Z85 each, like the publisher's public key. */
  readonly public: string;
  readonly secret: string;
  readonly publisher: string;
}

/**
 * Return a worker's keys; null: it has none.
 *
 * @param given - what is in a file, or a path; undefined: what the environment says.
 * @param name - of the worker, if it was given one.
 * @throws KeysError - if they cannot be read, or make no sense.
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
 * Read a worker's file, or that of a name in a folder that `weightbus keygen` has made.
 *
 * @throws KeysError - if there is none, or it makes no sense.
 */
export function readWorkerKeys(path: string, name?: string): WorkerKeys {
  if (path.trimStart().startsWith("{")) {
    const what = "`keys` is no path, but JSON (not shown): give the path of a file with that";
    throw new KeysError(what);
  }
  const found = isFolder(path) ? fileOf(join(path, WORKERS), name) : path;
  return checkPair(checked(parsed(read(found), found), found), found);
}

function isFolder(path: string): boolean {
  try {
    return statSync(path).isDirectory();
  } catch {
    return false; // which whoever reads it will find
  }
}

function checked(value: unknown, where: string): WorkerKeys {
  const found = object(FILE).read(value);
  if (found !== undefined) return found;
  const wrong = Object.entries(FILE).map(([field, { must }]) => `${field}: ${must}`);
  throw new KeysError(`${where}: no worker's keys, which have ${wrong.join("; ")}; ${HELP}`);
}

function parsed(text: string, path: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    throw new KeysError(`${path} is no file of keys: it is no JSON; ${HELP}`); // nor shown: a secret
  }
}

function read(path: string): string {
  let opened: number | undefined;
  try {
    opened = openSync(path, "r");
    if (fstatSync(opened).mode & EVERYBODY) {
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

/** Return the file in a folder that is for a worker of this name; without one, the only file. */
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

/** Return the name that a file is for: no name has a `+`, which stands for `*` there. */
function nameOf(file: string): string {
  return basename(file, SUFFIX).replace("+", "*");
}

/** Whether somebody whose key is for `form` may be called so. */
function fits(form: string, name: string): boolean {
  const [begin = "", end] = form.split("*");
  if (end === undefined) return name === form;
  const long = name.length >= begin.length + end.length;
  return long && name.startsWith(begin) && name.endsWith(end);
}

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

/** Return what each five characters of a key stand for. */
function valuesOf(key: string): number[] {
  const groups = key.match(/.{5}/g) ?? [];
  return groups.map((five) => [...five].reduce((sum, c) => sum * 85 + DIGITS.indexOf(c), 0));
}

/** Return the 32 bytes that a key's 40 characters stand for: 4 for each 5. */
function bytesOf(key: string): Buffer {
  const bytes = Buffer.alloc((key.length / 5) * 4);
  for (const [index, value] of valuesOf(key).entries()) bytes.writeUInt32BE(value, index * 4);
  return bytes;
}
