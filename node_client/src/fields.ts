/**
 * Defines the types of header fields. Each type checks a JSON value and converts it.
 *
 * `messages.ts` describes the messages as tables of these fields.
 */

import { INTEGER_MAX } from "./limits.js";

export interface Field<T> {
  /** A description of valid values, for error texts. */
  readonly must: string;
  /** Returns the converted value; undefined if it has a wrong type or is out of bounds. */
  readonly read: (value: unknown) => T | undefined;
  /** The default of an optional field; undefined if the field is required. */
  readonly absent?: T;
}

export type Fields = Readonly<Record<string, Field<unknown>>>;
export type Values<F extends Fields> = {
  readonly [K in keyof F]: F[K] extends Field<infer T> ? T : never;
};
/** The fields of a message. */
export type FieldsOf<M> = { readonly [K in Exclude<keyof M, "type">]: Field<M[K]> };

const NAME = /^[A-Za-z0-9._-]{1,128}$/;
const BASE64 = /^[A-Za-z0-9+/]*={0,2}$/;

/** Whether a text is a valid name of a model or worker. */
export function isName(text: string): boolean {
  return NAME.test(text);
}

export function matching(must: string, pattern: RegExp): Field<string> {
  return { must, read: (v) => (typeof v === "string" && pattern.test(v) ? v : undefined) };
}

export const name: Field<string> = {
  must: "1 to 128 of the characters A-Z a-z 0-9 . _ -",
  read: (v) => (typeof v === "string" && isName(v) ? v : undefined),
};
export const boolean: Field<boolean> = {
  must: "true or false",
  read: (v) => (typeof v === "boolean" ? v : undefined),
};

export function hex(digits: number): Field<string> {
  return matching(`${digits} hex digits`, new RegExp(`^[0-9a-f]{${digits}}$`));
}

export function hexOrEmpty(digits: number): Field<string> {
  return matching(`${digits} hex digits or empty`, new RegExp(`^([0-9a-f]{${digits}})?$`));
}

export function integer(least: number, greatest = INTEGER_MAX): Field<number> {
  return {
    must: `an integer from ${least} to ${greatest}`,
    read: (v) =>
      typeof v === "number" && Number.isSafeInteger(v) && least <= v && v <= greatest
        ? v + 0 // never minus zero
        : undefined,
  };
}

export const count = integer(0);
export const positive = integer(1);

export function text(codePointsMax: number): Field<string> {
  return {
    must: `a text of at most ${codePointsMax} characters`,
    read: (v) => (typeof v === "string" && codePoints(v) <= codePointsMax ? v : undefined),
  };
}

function codePoints(value: string): number {
  let pairs = 0;
  for (const _ of value.matchAll(/[\ud800-\udbff][\udc00-\udfff]/g)) pairs += 1;
  return value.length - pairs;
}

export function oneOf<const T extends string>(...allowed: T[]): Field<T> {
  return { must: `one of ${allowed.join(", ")}`, read: (v) => allowed.find((a) => a === v) };
}

/** Return a field that allows null besides the values of `field`. */
export function nullable<T>(field: Field<T>): Field<T | null> {
  return { must: `${field.must}, or null`, read: (v) => (v === null ? null : field.read(v)) };
}

/** Return a field like `field` that may be omitted. `absent` is its default. */
export function optional<T>(field: Field<T>, absent: T): Field<T> {
  return { ...field, absent };
}

export function array<T>(field: Field<T>, most: number): Field<readonly T[]> {
  return {
    must: `a list of at most ${most} values, each ${field.must}`,
    read: (v) => {
      if (!Array.isArray(v) || v.length > most) return undefined;
      const values = v.map((one) => field.read(one));
      return values.some((value) => value === undefined) ? undefined : (values as T[]);
    },
  };
}

/** Bytes, in base64. */
export function base64(bytesMax: number): Field<Uint8Array> {
  return {
    must: `base64 of at most ${bytesMax} bytes`,
    read: (v) => {
      if (typeof v !== "string" || v.length % 4 !== 0 || !BASE64.test(v)) return undefined;
      const bytes = Buffer.from(v, "base64");
      return bytes.length <= bytesMax ? bytes : undefined;
    },
  };
}

/** An object with arbitrary keys. It is read as a map, since a key may be `__proto__`. */
export function map<T>(
  key: Field<string>,
  field: Field<T>,
  most: number,
): Field<ReadonlyMap<string, T>> {
  return {
    must: `an object of at most ${most} entries, each with ${field.must}`,
    read: (v) => {
      const entries = isObject(v) ? Object.entries(v) : null;
      if (entries === null || entries.length > most) return undefined;
      const values = new Map<string, T>();
      for (const [name, value] of entries) {
        const read = key.read(name) === undefined ? undefined : field.read(value);
        if (read === undefined) return undefined;
        values.set(name, read);
      }
      return values;
    },
  };
}

/** An object with these fields. Other fields are ignored. */
export function object<F extends Fields>(fields: F): Field<Values<F>> {
  return {
    must: `an object with ${Object.keys(fields).join(" and ")}`,
    read: (v) => (isObject(v) ? readAll(fields, v, () => undefined) : undefined),
  };
}

/** Read all fields of an object. Call `wrong` with the first field that is missing or invalid. */
export function readAll<F extends Fields>(
  fields: F,
  from: Readonly<Record<string, unknown>>,
  wrong: (name: string, field: Field<unknown>) => undefined,
): Values<F> | undefined {
  const values: Record<string, unknown> = {};
  for (const [key, field] of Object.entries(fields)) {
    const value = Object.hasOwn(from, key) ? field.read(from[key]) : field.absent;
    if (value === undefined) return wrong(key, field);
    values[key] = value;
  }
  return values as Values<F>;
}

export function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
