/**
 * Encodes and decodes the messages of WBP/1: `[topic] [header] [payload]...`, the topic only on
 * published messages.
 *
 * A header is one JSON object, `{"wbp":1,"type":"announce",...}`. The tables below are those of
 * section 6 of the protocol. Decoding checks all values, so the machine never gets a value out of
 * bounds. Unknown fields are ignored, so that later versions of the protocol can add fields.
 */

import { ProtocolError } from "./errors.js";
import * as f from "./fields.js";
import {
  CHUNK_BYTES_MAX,
  CHUNKS_MAX,
  HEADER_BYTES_MAX,
  LAYOUT_BYTES_MAX,
  TEXT_MAX,
} from "./limits.js";

const WBP = 1;
/** The name of the feature and of the encoding of patches. */
export const DELTA = "delta-1";
const TICKET = /^ticket\.([0-9a-f]{32})$/; // a feature with a ticket

const OF_VERSION = { model: f.name, epoch: f.count, version: f.positive };
const WITH_DIGEST = { ...OF_VERSION, digest: f.hex64 };
const BY_PATCH = { patch: f.optional(f.nullable(f.patchId), () => null) };
const METADATA = { metadata: f.optional(f.metadata, () => new Map<string, string>()) };
const off = () => false;
const zero = () => 0;
const empty = () => "";
const nothing = () => null;

/** The messages of a publisher and their fields. */
const FROM_PUBLISHER = {
  welcome: {
    epoch: f.count,
    data: f.reason,
    ping_ms: f.integer(1, 3_600_000),
    lost_ms: f.integer(2, 36_000_000),
    models: f.byName(f.count),
    shared: f.optional(f.nullable(f.shared), nothing),
    age_ms: f.optional(f.count, zero),
    features: f.optional(f.names, () => []),
    keys: f.optional(f.groupKeys, () => []),
  },
  rekey: { epoch: f.count, keys: f.groupKeys },
  announce: {
    ...OF_VERSION,
    layout: f.hex64,
    layout_bytes: f.integer(10, LAYOUT_BYTES_MAX + 8),
    nbytes: f.count,
    chunk_bytes: f.integer(1, CHUNK_BYTES_MAX),
    commit: f.oneOf("auto", "together"),
    acknowledge: f.oneOf("applied", "staged"),
    encoding: f.name,
    encryption: f.optional(f.nullable(f.name), nothing),
    key: f.optional(f.nullable(f.hex16), nothing),
    tag: f.optional(f.nullable(f.hex32), nothing),
    shared: f.optional(f.nullable(f.shared), nothing),
    hash: f.optional(f.boolean, off),
    whole: f.optional(f.nullable(f.whole), nothing),
    keep: f.optional(f.boolean, off),
    patches: f.optional(f.patches, () => []),
    ...METADATA,
  },
  chunk: {
    ...OF_VERSION,
    index: f.integer(0, CHUNKS_MAX - 1),
    crc: f.integer(0, 2 ** 32 - 1),
    ...BY_PATCH,
  },
  sealed_chunk: {
    ...OF_VERSION,
    index: f.integer(0, CHUNKS_MAX - 1),
    key: f.hex16,
    tag: f.hex32,
    ...BY_PATCH,
  },
  sealed_message: { key: f.hex16, count: f.positive, sealed: f.sealed },
  end: { ...WITH_DIGEST, ...BY_PATCH },
  commit: WITH_DIGEST,
  abort: { ...OF_VERSION, text: f.optional(f.reason, empty) },
  rename: { ...OF_VERSION, was: f.running, ...METADATA },
  beacon: { ...OF_VERSION, version: f.count },
  refuse: {
    code: f.name,
    text: f.reason,
    model: f.optional(f.nullable(f.name), nothing),
    epoch: f.optional(f.count, zero),
    version: f.optional(f.count, zero),
  },
  ping: {
    token: f.optional(f.count, zero),
    subscribed: f.optional(f.boolean, off),
    shared: f.optional(f.boolean, off),
  },
  pong: {
    token: f.optional(f.count, zero),
    epoch: f.optional(f.count, zero),
    models: f.optional(f.byName(f.count), () => new Map<string, number>()),
  },
} as const satisfies Record<string, f.Fields>;

type Tables = typeof FROM_PUBLISHER;
type PublisherType = keyof Tables;
type MessageOf<K extends PublisherType> = { readonly type: K } & f.Values<Tables[K]>;

export type PublisherMessage = { [K in PublisherType]: MessageOf<K> }[PublisherType];
export type Welcome = MessageOf<"welcome">;
export type Announce = MessageOf<"announce">;
export type Chunk = MessageOf<"chunk">;
export type SealedChunk = MessageOf<"sealed_chunk">;
export type SealedMessage = MessageOf<"sealed_message">;
export type End = MessageOf<"end">;
export type Commit = MessageOf<"commit">;
export type Rename = MessageOf<"rename">;
export type Refuse = MessageOf<"refuse">;
export type Pong = MessageOf<"pong">;
/** A patch that an announcement offers. `PatchId` has the fields that identify a patch. */
export type Patch = Announce["patches"][number];
export type PatchId = Pick<Patch, "encoding" | "epoch" | "version">;

/** A version that a worker runs, with its digest. */
export interface Running {
  readonly epoch: number;
  readonly version: number;
  readonly digest: string;
}

interface OfVersion {
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
}

interface ByPatch extends OfVersion {
  readonly digest: string;
  readonly patch?: PatchId | undefined;
}

/** The messages of a worker. A field at its default may be omitted. */
export type WorkerMessage =
  | {
      readonly type: "hello";
      readonly name: string;
      readonly instance: string;
      readonly models: ReadonlyMap<string, Running | null>;
      readonly epoch?: number;
      readonly age_ms?: number;
      readonly features?: readonly string[];
      readonly client?: string;
      readonly host?: string;
      readonly pid?: number;
    }
  | (OfVersion & {
      readonly type: "fetch";
      readonly first?: number;
      readonly count?: number;
      readonly layout?: boolean;
      readonly patch?: PatchId | undefined;
      readonly unpatched?: string | undefined;
    })
  | (OfVersion & {
      readonly type: "progress";
      readonly chunks: number;
      readonly phase?: string;
      readonly patch?: PatchId | undefined;
      readonly waits?: string;
    })
  | (ByPatch & { readonly type: "staged" })
  | (ByPatch & {
      readonly type: "applied";
      readonly decode_us?: number | undefined;
      readonly note?: string | undefined;
    })
  | (OfVersion & {
      readonly type: "failed";
      readonly code: string;
      readonly text: string;
      readonly intact?: boolean;
    })
  | { readonly type: "bye" }
  | { readonly type: "ping"; readonly token?: number; readonly subscribed?: boolean }
  | {
      readonly type: "pong";
      readonly token?: number;
      readonly epoch?: number;
      readonly models?: ReadonlyMap<string, number>;
    };

export type Failed = Extract<WorkerMessage, { type: "failed" }>;

/** Return the header of a message as JSON. */
export function encode(message: WorkerMessage): string {
  const asObject = (_: string, v: unknown) => (v instanceof Map ? Object.fromEntries(v) : v);
  return JSON.stringify({ wbp: WBP, ...message }, asObject);
}

/** Truncate a text to a field's limit, and replace lone surrogates, which JSON must not hold. */
export function asText(words: string, codePointsMax = TEXT_MAX): string {
  return words.slice(0, codePointsMax).toWellFormed();
}

/** A decoded message with its payload frames. */
export interface Decoded {
  readonly message: PublisherMessage;
  readonly payloads: readonly Uint8Array[];
}

/**
 * Decode a publisher's message from its header and payload frames, without the topic.
 *
 * @throws ProtocolError - and no other error - if the frames break the protocol.
 */
export function decode(frames: readonly Uint8Array[]): Decoded {
  const [header, ...payloads] = frames;
  if (header === undefined) throw new ProtocolError("a message without frames");
  const fields = parse(header);
  checkNumber(fields);
  const { type } = fields;
  if (typeof type !== "string" || !Object.hasOwn(FROM_PUBLISHER, type)) {
    throw new ProtocolError(`a header of type ${show(type)}, which no publisher sends`);
  }
  const message = read(type as PublisherType, fields);
  checkPayloads(message, payloads.length);
  return { message, payloads };
}

const UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

function parse(header: Uint8Array): Record<string, unknown> {
  if (header.length > HEADER_BYTES_MAX) {
    throw new ProtocolError(`a header of ${header.length} bytes; ${HEADER_BYTES_MAX} are allowed`);
  }
  let value: unknown;
  try {
    value = JSON.parse(UTF8.decode(header)); // V8's parser does not recurse: deep nesting is safe
  } catch (error) {
    throw new ProtocolError(`a header that is no JSON: ${(error as Error).message}`);
  }
  if (!f.isObject(value)) throw new ProtocolError("a header that is no JSON object");
  return value;
}

/** Check the protocol number first: headers of another protocol may have other fields. */
function checkNumber(header: Readonly<Record<string, unknown>>): void {
  const wbp = Object.hasOwn(header, "wbp") ? header.wbp : 0;
  if (wbp === WBP) return;
  if (!Number.isInteger(wbp)) throw new ProtocolError(`a header with "wbp" ${show(wbp)}`);
  throw new ProtocolError(`protocol number ${wbp}; this side speaks ${WBP}`, "protocol-version");
}

function read(type: PublisherType, header: Readonly<Record<string, unknown>>): PublisherMessage {
  const values = f.readAll(FROM_PUBLISHER[type] as f.Fields, header, (name, field) => {
    throw new ProtocolError(
      `${type}: "${name}" is ${show(header[name])}; it must be ${field.must}`,
    );
  });
  return { type, ...values } as unknown as PublisherMessage;
}

function checkPayloads(message: PublisherMessage, payloads: number): void {
  const chunk = message.type === "chunk" || message.type === "sealed_chunk";
  const may = chunk || message.type === "announce" || message.type === "sealed_message";
  const must = chunk || (message.type === "announce" && message.whole !== null);
  const [least, most] = [Number(must), Number(may)];
  if (payloads < least || payloads > most) {
    throw new ProtocolError(
      `${message.type} with ${payloads} payload frames; ${least} to ${most} are allowed`,
    );
  }
}

function show(value: unknown): string {
  return value === undefined ? "missing" : (JSON.stringify(value) ?? "?").slice(0, 60);
}

/** Return the ticket of a welcome; empty if the welcome has no ticket. */
export function ticketOf({ features }: Welcome): string {
  return features.map((feature) => TICKET.exec(feature)?.[1] ?? "").find(Boolean) ?? "";
}

export function controlTopic(model: string): string {
  return `${model}/ctl`;
}

export function dataTopic(model: string): string {
  return `${model}/dat`;
}

export function patchTopic(model: string): string {
  return `${model}/dlt`;
}

/**
 * Return `name` if it is a valid name of a model or worker.
 *
 * @throws RangeError - if the name is invalid.
 */
export function checkName(name: string, what: string): string {
  if (f.isName(name)) return name;
  throw new RangeError(
    `${what} ${JSON.stringify(name)}: a name is 1 to 128 of the characters A-Z a-z 0-9 . _ - so ` +
      "that it fits topics, files and addresses in every language",
  );
}
