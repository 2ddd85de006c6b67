/**
 * Parses the JSON of layouts strictly.
 *
 * `JSON.parse` keeps the last of two equal keys and reads `1.0`, `1e0` and `-0` as integers, so two
 * readers could see different models in the same bytes. The JSON of a layout has a fixed structure.
 * This parser accepts only that structure, in one pass over the bytes, without recursion.
 */

import { isUtf8 } from "node:buffer";
import { LayoutError, TooManyNamesError } from "./errors.js";
import { INTEGER_MAX, RANK_MAX, TENSORS_MAX } from "./limits.js";
import { printable } from "./words.js";

/** The entry of one tensor. */
export interface Entry {
  readonly dtype: string;
  readonly shape: readonly number[];
  readonly begin: number;
  readonly end: number;
}

export interface Header {
  readonly entries: Map<string, Entry>;
  readonly metadata: Map<string, string>;
}

const METADATA = "__metadata__";
const DIGITS_MAX = 16; // the digits of 2^53 - 1
const [QUOTE, COMMA, COLON, BACKSLASH] = [0x22, 0x2c, 0x3a, 0x5c];
const [OPEN, CLOSE, OPEN_LIST, CLOSE_LIST] = [0x7b, 0x7d, 0x5b, 0x5d];
const [ZERO, NINE, SPACE] = [0x30, 0x39, 0x20];

/**
 * Read `{"name": {"dtype": ..., "shape": [...], "data_offsets": [...]}, "__metadata__": {...}}`.
 *
 * @param namesMax - the maximum number of names of tensors and metadata.
 * @throws LayoutError - if the bytes do not have this form.
 * @throws TooManyNamesError - if there are more than `namesMax` names.
 */
export function readHeader(json: Uint8Array, namesMax = Number.POSITIVE_INFINITY): Header {
  if (!isUtf8(json)) throw new LayoutError("the layout is not UTF-8");
  if (json[0] !== OPEN) throw new LayoutError("the layout must begin with '{'");
  const reader = new Reader(json, namesMax); // L2
  const entries = new Map<string, Entry>();
  let metadata: Map<string, string> | undefined;
  reader.readObject((key) => {
    reader.nameCount += 1;
    if (entries.has(key) || (key === METADATA && metadata !== undefined)) reader.failDuplicate(key); // L3
    if (key === METADATA) metadata = readTexts(reader);
    else entries.set(key, readEntry(reader));
    if (entries.size > TENSORS_MAX) reader.fail(`more than ${TENSORS_MAX} tensors`); // L4
  });
  reader.checkEnd();
  return { entries, metadata: metadata ?? new Map() };
}

function readTexts(reader: Reader): Map<string, string> {
  const texts = new Map<string, string>();
  reader.readObject((key) => {
    reader.nameCount += 1;
    if (texts.has(key)) reader.failDuplicate(key);
    texts.set(key, reader.readString());
  });
  return texts;
}

function readEntry(reader: Reader): Entry {
  let dtype: string | undefined;
  let shape: number[] | undefined;
  let offsets: number[] | undefined;
  reader.readObject((key) => {
    if (key === "dtype" && dtype === undefined) dtype = reader.readString();
    else if (key === "shape" && shape === undefined) shape = reader.readIntegers(RANK_MAX);
    else if (key === "data_offsets" && offsets === undefined) offsets = reader.readIntegers(2);
    else reader.fail(`a repeated or unknown field ${shown(key)}`);
  });
  const [begin, end] = offsets ?? [];
  if (dtype === undefined || shape === undefined || begin === undefined || end === undefined) {
    return reader.fail("a tensor without dtype, shape, or two data_offsets");
  }
  return { dtype, shape, begin, end };
}

/** A cursor over the bytes, with a method to read each kind of value. */
class Reader {
  #at = 0;
  #nameCount = 0;

  constructor(
    readonly bytes: Uint8Array,
    readonly namesMax: number,
  ) {}

  /** Number of names read so far. */
  get nameCount(): number {
    return this.#nameCount;
  }

  set nameCount(count: number) {
    this.#nameCount = count;
    if (count <= this.namesMax) return;
    throw new TooManyNamesError(
      `a layout of more than ${this.namesMax} names of tensors and metadata, the most that this ` +
        "worker stores",
    );
  }

  fail(what: string): never {
    throw new LayoutError(`the layout is broken at byte ${this.#at} of its JSON: ${what}`);
  }

  failDuplicate(key: string): never {
    return this.fail(`the key ${shown(key)} occurs twice`);
  }

  /** Read an object. `value` is called after each key, and must read the value. */
  readObject(value: (key: string) => void): void {
    this.#expect(OPEN, "'{'");
    if (this.#take(CLOSE)) return;
    do {
      const key = this.readString();
      this.#expect(COLON, "':'");
      value(key);
    } while (this.#take(COMMA));
    this.#expect(CLOSE, "',' or '}'");
  }

  /** Read an array of at most `most` integers. */
  readIntegers(most: number): number[] {
    const values: number[] = [];
    this.#expect(OPEN_LIST, "'['");
    if (this.#take(CLOSE_LIST)) return values;
    do {
      if (values.length === most) this.fail(`an array of more than ${most} integers`);
      values.push(this.#integer());
    } while (this.#take(COMMA));
    this.#expect(CLOSE_LIST, "',' or ']'");
    return values;
  }

  readString(): string {
    this.#expect(QUOTE, "'\"'");
    const begin = this.#at;
    let escaped = false;
    for (;;) {
      const byte = this.bytes[this.#at] ?? 0;
      if (byte < SPACE) this.fail("a string without an end, or with a control character");
      if (byte === QUOTE) break;
      if (byte === BACKSLASH) {
        escaped = true;
        this.#at += 1;
      }
      this.#at += 1;
    }
    const { buffer, byteOffset } = this.bytes;
    const body = Buffer.from(buffer, byteOffset + begin, this.#at - begin).toString();
    this.#at += 1;
    return escaped ? this.#unescape(body) : body;
  }

  /** Check that only white space follows. */
  checkEnd(): void {
    this.#skip();
    if (this.#at < this.bytes.length) this.fail("text after the object");
  }

  #unescape(body: string): string {
    try {
      const text: string = JSON.parse(`"${body}"`);
      if (text.isWellFormed()) return text;
    } catch {} // invalid escape
    return this.fail("an invalid escape in a string");
  }

  #integer(): number {
    this.#skip();
    const begin = this.#at;
    let value = 0;
    for (let byte = this.#digit(); byte >= 0; byte = this.#digit()) {
      value = 10 * value + byte;
      this.#at += 1;
      if (this.#at - begin > DIGITS_MAX) break;
    }
    const digits = this.#at - begin;
    const padded = digits > 1 && this.bytes[begin] === ZERO; // L5
    if (digits === 0 || padded || value > INTEGER_MAX) {
      this.fail("not an integer from 0 to 2^53-1 without a sign and leading zeros");
    }
    return value; // a fraction or exponent then fails, since ',' or ']' is expected
  }

  #digit(): number {
    const byte = this.bytes[this.#at] ?? 0;
    return byte >= ZERO && byte <= NINE ? byte - ZERO : -1;
  }

  #skip(): void {
    for (;;) {
      const byte = this.bytes[this.#at];
      if (byte !== SPACE && byte !== 0x0a && byte !== 0x0d && byte !== 0x09) return;
      this.#at += 1;
    }
  }

  #take(byte: number): boolean {
    this.#skip();
    if (this.bytes[this.#at] !== byte) return false;
    this.#at += 1;
    return true;
  }

  #expect(byte: number, shown: string): void {
    if (!this.#take(byte)) this.fail(`${shown} is missing`);
  }
}

/** Return the beginning of a name, quoted and printable. */
export function shown(name: string): string {
  return printable(JSON.stringify(name.length > 40 ? `${name.slice(0, 40)}...` : name));
}
