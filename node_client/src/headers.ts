/**
 * Encodes and decodes the messages of WBP/1. The frames of a message are `[topic] [header]
 * [payload]...`; only published messages have a topic.
 *
 * A header is one JSON object, `{"wbp":1,"type":"announce",...}`. Decoding checks all values, so
 * the machine never gets a value out of bounds. Unknown fields are ignored, so that the
 * protocol can get more fields.
 */

import { ProtocolError } from "./errors.js";
import * as f from "./fields.js";
import { HEADER_BYTES_MAX, TEXT_MAX } from "./limits.js";
import {
  FROM_PUBLISHER,
  PAYLOADS,
  type PublisherMessage,
  TICKET,
  type Welcome,
  type WorkerMessage,
} from "./messages.js";

const WBP = 1;
const WITH_TICKET = new RegExp(`^${TICKET}\\.([0-9a-f]{32})$`);

/** Return the header of a message as JSON. */
export function encode(message: WorkerMessage): string {
  const asObject = (_: string, v: unknown) => (v instanceof Map ? Object.fromEntries(v) : v);
  return JSON.stringify({ wbp: WBP, ...message }, asObject);
}

/** Truncate a text to a field's limit, and replace lone surrogates, which UTF-8 cannot encode. */
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
  const message = read(type as PublisherMessage["type"], fields);
  checkPayloads(message, payloads.length);
  return { message, payloads };
}

const UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

function parse(header: Uint8Array): Record<string, unknown> {
  if (header.length > HEADER_BYTES_MAX) {
    throw new ProtocolError(`a header of ${header.length} bytes, over ${HEADER_BYTES_MAX}`);
  }
  let value: unknown;
  try {
    value = JSON.parse(UTF8.decode(header)); // V8's parser does not recurse: deep nesting is safe
  } catch (error) {
    throw new ProtocolError(`a header that is not valid JSON: ${(error as Error).message}`);
  }
  if (!f.isObject(value)) throw new ProtocolError("a header that is not a JSON object");
  return value;
}

/** Check the protocol number first: headers of another protocol may have other fields. */
function checkNumber(header: Readonly<Record<string, unknown>>): void {
  const wbp = Object.hasOwn(header, "wbp") ? header.wbp : 0;
  if (wbp === WBP) return;
  if (!Number.isInteger(wbp)) throw new ProtocolError(`a header with "wbp" ${show(wbp)}`);
  throw new ProtocolError(`protocol number ${wbp}; this side speaks ${WBP}`, "protocol-version");
}

function read(
  type: PublisherMessage["type"],
  header: Readonly<Record<string, unknown>>,
): PublisherMessage {
  const values = f.readAll(FROM_PUBLISHER[type] as f.Fields, header, (name, field) => {
    throw new ProtocolError(
      `${type}: "${name}" is ${show(header[name])}; it must be ${field.must}`,
    );
  });
  return { type, ...values } as unknown as PublisherMessage;
}

function checkPayloads(message: PublisherMessage, payloads: number): void {
  const [min, most] = PAYLOADS[message.type] ?? [0, 0];
  const least = message.type === "announce" && message.whole !== null ? most : min;
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
  return features.map((feature) => WITH_TICKET.exec(feature)?.[1] ?? "").find(Boolean) ?? "";
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
