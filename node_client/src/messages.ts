/**
 * The messages of WBP/1 that a worker receives or sends, and the objects in them.
 *
 * Made by `make protocol`; do not edit.
 */

import * as f from "./fields.js";
import {
  CHUNK_BYTES_MAX,
  CHUNK_BYTES_MIN,
  CHUNKS_MAX,
  FEATURES_MAX,
  GROUP_KEYS_MAX,
  HEADER_BYTES_MAX,
  LAYOUT_BYTES_MAX,
  METADATA_MAX,
  METADATA_NAME_MAX,
  MODELS_MAX,
  NAMED_MAX,
  PATCHES_MAX,
  SOURCE_RANGES_MAX,
  SOURCES_MAX,
  TEXT_MAX,
} from "./protocol_limits.js";

/** A segment of shared memory: its path, and the token that the segment must contain. */
export interface Shared {
  /** The path to open. A path that S4 does not permit is not malformed. */
  readonly path: string;
  /** The token in the segment. */
  readonly token: string;
}

/** The checksum and digest of a version whose only chunk is sent in its announcement. */
export interface Whole {
  /** The CRC of the payload. */
  readonly crc: number;
  /** The digest of the version. */
  readonly digest: string;
}

/** A patch that a publisher offers: its id, the digest of its base, and its size. */
export interface Patch {
  /** As in `patchid`. */
  readonly encoding: string;
  /** As in `patchid`. */
  readonly epoch: number;
  /** As in `patchid`. */
  readonly version: number;
  /** The digest of the base. */
  readonly digest: string;
  /** Bytes of the patch, which is cut into chunks of `chunk_bytes`. */
  readonly nbytes: number;
}

/** Another publisher that has some chunks of a version, which its own publisher may lack. */
export interface Source {
  /** The control address of the source. */
  readonly address: string;
  /** The chunks that the source has: first and count of each range, in turn. */
  readonly chunks: readonly number[];
}

/** The id of a patch to a version: its encoding, and the base that it builds on. */
export interface PatchId {
  /** `delta-1`. */
  readonly encoding: string;
  /** The epoch of the base. */
  readonly epoch: number;
  /** The number of the base. */
  readonly version: number;
}

/** A version that a worker runs. `digest` is empty if the worker did not hash the version. */
export interface Running {
  /** The epoch of the version. */
  readonly epoch: number;
  /** Its number. */
  readonly version: number;
  /** The digest that the worker reported in `applied`. */
  readonly digest: string;
}

/** The state of a model at a worker: which versions run, arrive, or have failed. */
export interface Doing {
  /** Of the running version. */
  readonly epoch: number;
  /** The running version; 0: none. */
  readonly version: number;
  /** The newest version for this worker when the row was made; see also `models`. */
  readonly newest: number;
  /** Microseconds from the publish of the running version to its `applied`; 0: unknown. */
  readonly took_us: number;
  /** The version that the worker receives, has staged or applies; 0: none. */
  readonly incoming: number;
  /** The phase of that version; empty: none. */
  readonly phase: "" | "applying" | "receiving" | "staged";
  /** The chunks of that version that the worker has. */
  readonly chunks: number;
  /** All chunks of that version. */
  readonly count: number;
  /** Milliseconds since `phase` or `chunks` last changed. */
  readonly idle_ms: number;
  /** The last failed version, if no newer version runs; 0: none. */
  readonly failed: number;
  /** Code and text of that `failed`. */
  readonly error: string;
  /**
   * In `below`: the patch by which the running version arrived; null: it arrived whole, or
   * `took_us` is 0.
   */
  readonly patch: PatchId | null;
  /** In `below`: the patch by which `incoming` arrives or has arrived; null: it arrives whole. */
  readonly incoming_patch: PatchId | null;
}

/** A worker, and the state of each of its models. */
export interface WorkerRow {
  /** The worker. */
  readonly name: string;
  /** P14, P18. */
  readonly state: "live" | "lost" | "stuck";
  /**
   * How versions reach the worker: `shared` or `pushed` if that field, or `subscribed`, of its last
   * `ping` was true; else `pulled`.
   */
  readonly road: "pulled" | "pushed" | "shared";
  /** The age of its last message. */
  readonly heard_ms: number;
  /** Its models. */
  readonly models: ReadonlyMap<string, Doing>;
  /** That of its `hello`. */
  readonly client: string;
  /** That of its `hello`. */
  readonly host: string;
  /** That of its `hello`. */
  readonly pid: number;
  /** In `below`: that of its `hello`. */
  readonly instance: string;
  /** The worker is a relay. */
  readonly relay: boolean;
  /** The relays between the publisher and the worker, the nearest to the publisher first. */
  readonly through: readonly string[];
}

/** Admit a worker, and send the data endpoint, and the latest version of each model. */
export interface Welcome {
  readonly type: "welcome";
  /** The publisher's epoch, and the session's. */
  readonly epoch: number;
  /** The endpoint of the data channel (level 2). */
  readonly data: string;
  /** The publisher's interval of pings (W18). */
  readonly ping_ms: number;
  /** Milliseconds of silence until the publisher considers a worker lost; for logs. */
  readonly lost_ms: number;
  /**
   * For each model, the newest committed version for this worker. A model without a version has 0
   * or is missing.
   */
  readonly models: ReadonlyMap<string, number>;
  /** Milliseconds since the publisher started, or fewer; 0: unknown. */
  readonly age_ms: number;
  /** Values for optional features. */
  readonly features: readonly string[];
  /** The probe (S2); null: the publisher offers no segments. */
  readonly shared: Shared | null;
  /** The group keys (E2), the newest last; empty: nothing is sealed. */
  readonly keys: readonly string[];
}

/** Request a pong. A worker adds whether it receives pushes and reads shared memory. */
export interface Ping {
  readonly type: "ping";
  /** Returned in the `pong`. */
  readonly token: number;
  /** Of a worker: W18 at level 2. */
  readonly subscribed: boolean;
  /** Of a worker: it uses shared memory in this session (S2). */
  readonly shared: boolean;
}

/** Answer a ping. A publisher adds the latest version of each of the worker's models. */
export interface Pong {
  readonly type: "pong";
  /** That of the `ping`. */
  readonly token: number;
  /** Of a publisher: its epoch; of a worker: 0. */
  readonly epoch: number;
  /** Of a publisher: as in `welcome`. */
  readonly models: ReadonlyMap<string, number>;
  /**
   * Of a relay: milliseconds since it, or a relay above it, lost the publisher above (R3); 0:
   * neither has.
   */
  readonly cut_off_ms: number;
}

/** Announce a version. The payload may be the layout or, with `whole`, all of its data. */
export interface Announce {
  readonly type: "announce";
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /** The layout id. */
  readonly layout: string;
  /** The length of the layout, its 8 bytes of length included. */
  readonly layout_bytes: number;
  /** The length of the data section. */
  readonly nbytes: number;
  /** The length of a chunk. */
  readonly chunk_bytes: number;
  /** `auto`: the worker applies the version once it is whole. `together`: level 3. */
  readonly commit: "auto" | "together";
  /**
   * `staged`: a worker of level 3 also sends the message `staged` (W14). Other workers ignore the
   * field.
   */
  readonly acknowledge: "applied" | "staged";
  /** `raw`. Other values are reserved. */
  readonly encoding: string;
  /** null: not encrypted. `aes-256-gcm`: sealed. Other values are reserved. */
  readonly encryption: string | null;
  /** The CRC of chunk 0 and the digest, if chunk 0 is the payload. */
  readonly whole: Whole | null;
  /** The segment that holds the data section; null: there is none. */
  readonly shared: Shared | null;
  /** A worker that reads the segment reports a digest (S7). */
  readonly hash: boolean;
  /** The id of the group key that seals this payload (E3). */
  readonly key: string | null;
  /** The tag of this payload. */
  readonly tag: string | null;
  /** The version may become the base of a patch (D1, D3). */
  readonly keep: boolean;
  /** The patches that lead to this version. The first is pushed (D6). */
  readonly patches: readonly Patch[];
  /** Texts about the version. */
  readonly metadata: ReadonlyMap<string, string>;
  /** To a relay: the version is only for these workers behind it (R8). Empty: for all. */
  readonly workers: readonly string[];
  /** The sources of the version, and the chunks that each has (N1). */
  readonly sources: readonly Source[];
  /** The numbers of the versions of other models that are published as one with this version. */
  readonly companions: ReadonlyMap<string, number>;
}

/** One chunk of a version's data section. The payload is the chunk. */
export interface Chunk {
  readonly type: "chunk";
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /** The number of the chunk. */
  readonly index: number;
  /** The CRC of the payload. */
  readonly crc: number;
  /** The patch that the chunk belongs to (D9). */
  readonly patch: PatchId | null;
}

/** The bytes of a chunk that a worker needs. The payload is these bytes. */
export interface Piece {
  readonly type: "piece";
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /** The number of the chunk. */
  readonly index: number;
  /** The CRC of the payload. */
  readonly crc: number;
  /** The CRC of the chunk, in which the bytes of the payload are zero. */
  readonly rest: number;
}

/** The CRC of each chunk of a version. The payload has 4 bytes, little-endian, for each. */
export interface Checksums {
  readonly type: "checksums";
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
}

/** End the push of a version, and send its digest. */
export interface End {
  readonly type: "end";
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /** The digest of the version. */
  readonly digest: string;
  /** The patch whose chunks this `end` follows (D9). `digest` is always that of the version. */
  readonly patch: PatchId | null;
}

/** Refuse a worker or a message, with the reason. */
export interface Refuse {
  readonly type: "refuse";
  /** A code. */
  readonly code: string;
  /** The reason in words. */
  readonly text: string;
  /** Of a refused `fetch`: its model. */
  readonly model: string | null;
  /** Of a refused `fetch`: its epoch; 0: not given. */
  readonly epoch: number;
  /** Of a refused `fetch`: its version. */
  readonly version: number;
}

/** Repeat the number of a model's latest version (0: none yet). */
export interface Beacon {
  readonly type: "beacon";
  /** The model. */
  readonly model: string;
  /** The publisher's epoch. */
  readonly epoch: number;
  /** The newest committed version for all workers; 0: none. */
  readonly version: number;
}

/** Allow workers to apply the version that they have staged. */
export interface Commit {
  readonly type: "commit";
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /** The digest of the version. */
  readonly digest: string;
}

/** Make workers drop the version that they have staged. */
export interface Abort {
  readonly type: "abort";
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /** The reason. */
  readonly text: string;
}

/** One encrypted chunk of a version's data section. The payload is the encrypted chunk. */
export interface SealedChunk {
  readonly type: "sealed_chunk";
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /** The number of the chunk. */
  readonly index: number;
  /** The id of the group key. */
  readonly key: string;
  /** The tag of the payload. */
  readonly tag: string;
  /** As in `chunk`. */
  readonly patch: PatchId | null;
}

/** An encrypted announcement (its payload is not in `sealed`), end or beacon for all. */
export interface SealedMessage {
  readonly type: "sealed_message";
  /** The id of the group key. */
  readonly key: string;
  /** Increases with each message under one group key (E5). */
  readonly count: number;
  /** The sealed header of the inner message and its tag, in base64 with padding. */
  readonly sealed: Uint8Array;
}

/** Send the group keys. The last one encrypts messages from now on. */
export interface Rekey {
  readonly type: "rekey";
  /** The publisher's epoch. */
  readonly epoch: number;
  /** The group keys, as in `welcome`. */
  readonly keys: readonly string[];
}

/** Give the running version `was` another epoch and number; the bytes are equal. */
export interface Rename {
  readonly type: "rename";
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /** The version that the worker runs, as in its `hello`. */
  readonly was: Running;
  /** Metadata of the new name; replaces the old. */
  readonly metadata: ReadonlyMap<string, string>;
}

/** Request to join. `models` has each model of the worker, with the version that it runs. */
export interface Hello {
  readonly type: "hello";
  /** The worker's name. A second instance of the name is refused while the first is live (P3). */
  readonly name: string;
  /** Random; drawn at the start of the process, for all its connections. */
  readonly instance: string;
  /** The models that the worker wants, each with its running version; null: none runs. */
  readonly models: ReadonlyMap<string, Running | null>;
  /**
   * The applied epoch: the greatest epoch of which this process applied a version, or wrote a part
   * of one into a model (W24); 0: none.
   */
  readonly epoch?: number | undefined;
  /** Milliseconds since the publisher of the applied epoch started (W1); 0: unknown. */
  readonly age_ms?: number | undefined;
  /** The optional features that the worker implements. */
  readonly features?: readonly string[] | undefined;
  /** Program and version, for operators. */
  readonly client?: string | undefined;
  /** The worker's host, for operators. */
  readonly host?: string | undefined;
  /** The worker's process, for operators. */
  readonly pid?: number | undefined;
}

/** Request a pong. A worker adds whether it receives pushes and reads shared memory. */
export interface WorkerPing {
  readonly type: "ping";
  /** Returned in the `pong`. */
  readonly token?: number | undefined;
  /** Of a worker: W18 at level 2. */
  readonly subscribed?: boolean | undefined;
  /** Of a worker: it uses shared memory in this session (S2). */
  readonly shared?: boolean | undefined;
}

/** Answer a ping. A publisher adds the latest version of each of the worker's models. */
export interface WorkerPong {
  readonly type: "pong";
  /** That of the `ping`. */
  readonly token?: number | undefined;
  /** Of a publisher: its epoch; of a worker: 0. */
  readonly epoch?: number | undefined;
  /** Of a publisher: as in `welcome`. */
  readonly models?: ReadonlyMap<string, number> | undefined;
  /**
   * Of a relay: milliseconds since it, or a relay above it, lost the publisher above (R3); 0:
   * neither has.
   */
  readonly cut_off_ms?: number | undefined;
}

/** Request `count` chunks of a version, from index `first` on; with 0, its announcement. */
export interface Fetch {
  readonly type: "fetch";
  /** The model. */
  readonly model: string;
  /** The session's epoch. */
  readonly epoch: number;
  /**
   * The version; 0: the newest committed version for this worker. With `version` 0, `count` is 0.
   */
  readonly version: number;
  /** The first chunk. */
  readonly first?: number | undefined;
  /** The number of chunks. 0: the publisher answers with the announcement and the `end`. */
  readonly count?: number | undefined;
  /** With `count` 0: whether the announcement carries the layout. */
  readonly layout?: boolean | undefined;
  /** The requested patch (D8). */
  readonly patch?: PatchId | null | undefined;
  /** Why the version is fetched whole although it has patches (D10). */
  readonly unpatched?: string | undefined;
  /** The bytes that the worker needs of these chunks (T2); empty: all. */
  readonly ranges?: readonly number[] | undefined;
  /** With `count` 0: the publisher answers with `checksums` (T4). */
  readonly checksums?: boolean | undefined;
}

/** Report that the worker runs a version. `digest` is empty if the version was not hashed. */
export interface Applied {
  readonly type: "applied";
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /** The digest that the worker computed. Empty only with shared memory. */
  readonly digest: string;
  /** A remark about this version, for the publisher's user. */
  readonly note?: string | undefined;
  /** As in `staged`. */
  readonly patch?: PatchId | null | undefined;
  /** The time to decode the patch, in microseconds (D11); 0: not given. */
  readonly decode_us?: number | undefined;
}

/** Report that a version failed. `intact` is true if the previous version still runs. */
export interface Failed {
  readonly type: "failed";
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /** A code. */
  readonly code: string;
  /** The reason in words; at most 20 lines on tensors that differ. */
  readonly text: string;
  /** false: an apply failed half-way, so the worker runs no version of the model (W24). */
  readonly intact?: boolean | undefined;
}

/** Leave the session. */
export interface Bye {
  readonly type: "bye";
}

/** Report how many chunks of a version have arrived, and what the worker does with it. */
export interface Progress {
  readonly type: "progress";
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /**
   * With phase `receiving`: the number of valid chunks that the worker has, pushed or fetched. With
   * other phases: 0.
   */
  readonly chunks: number;
  /**
   * `applying`: the version is being applied. `receiving`: it is arriving. `staged`: it is ready,
   * and the user has not begun to apply it.
   */
  readonly phase?: "applying" | "receiving" | "staged" | undefined;
  /** With `staged`: why the version cannot be applied yet. */
  readonly waits?: string | undefined;
  /** The patch by which the version arrives (D9), and whose chunks `chunks` counts. */
  readonly patch?: PatchId | null | undefined;
}

/** Report that a version is complete and verified, and not applied yet. */
export interface Staged {
  readonly type: "staged";
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /** The digest that the worker computed. */
  readonly digest: string;
  /** The patch by which the version arrived (D9). */
  readonly patch?: PatchId | null | undefined;
}

/** Report the workers behind a relay that changed, and those that left. */
export interface Below {
  readonly type: "below";
  /** The session's epoch. */
  readonly epoch: number;
  /**
   * The report starts from the beginning: workers that neither this message nor the following ones
   * name are no longer behind the relay.
   */
  readonly first?: boolean | undefined;
  /** Another `below` continues this one. */
  readonly more?: boolean | undefined;
  /** Workers that joined or changed; each replaces its earlier row. */
  readonly rows?: readonly WorkerRow[] | undefined;
  /** Workers that left. */
  readonly left?: readonly string[] | undefined;
}

export type PublisherMessage =
  | Welcome
  | Ping
  | Pong
  | Announce
  | Chunk
  | Piece
  | Checksums
  | End
  | Refuse
  | Beacon
  | Commit
  | Abort
  | SealedChunk
  | SealedMessage
  | Rekey
  | Rename;

/** The messages of a worker. A field at its default may be omitted. */
export type WorkerMessage =
  | Hello
  | WorkerPing
  | WorkerPong
  | Fetch
  | Applied
  | Failed
  | Bye
  | Progress
  | Staged
  | Below;

// How the fields of a publisher's messages are read.

const shared: f.Field<Shared> = f.object({
  path: f.text(TEXT_MAX),
  token: f.hex(32),
});
const whole: f.Field<Whole> = f.object({
  crc: f.integer(0, 2 ** 32 - 1),
  digest: f.hex(64),
});
const patch: f.Field<Patch> = f.object({
  encoding: f.name,
  epoch: f.count,
  version: f.positive,
  digest: f.hex(64),
  nbytes: f.positive,
});
const source: f.Field<Source> = f.object({
  address: f.text(TEXT_MAX),
  chunks: f.array(f.integer(0, CHUNKS_MAX), SOURCE_RANGES_MAX),
});
const patchId: f.Field<PatchId> = f.object({
  encoding: f.name,
  epoch: f.count,
  version: f.positive,
});
const running: f.Field<Running> = f.object({
  epoch: f.count,
  version: f.positive,
  digest: f.hexOrEmpty(64),
});

/** The messages of a publisher and their fields. */
export const FROM_PUBLISHER: { readonly [M in PublisherMessage as M["type"]]: f.FieldsOf<M> } = {
  welcome: {
    epoch: f.count,
    data: f.text(TEXT_MAX),
    ping_ms: f.integer(1, 3_600_000),
    lost_ms: f.integer(2, 36_000_000),
    models: f.map(f.name, f.count, MODELS_MAX),
    age_ms: f.optional(f.count, 0),
    features: f.optional(f.array(f.name, FEATURES_MAX), []),
    shared: f.optional(f.nullable(shared), null),
    keys: f.optional(f.array(f.hex(64), GROUP_KEYS_MAX), []),
  },
  ping: {
    token: f.optional(f.count, 0),
    subscribed: f.optional(f.boolean, false),
    shared: f.optional(f.boolean, false),
  },
  pong: {
    token: f.optional(f.count, 0),
    epoch: f.optional(f.count, 0),
    models: f.optional(f.map(f.name, f.count, MODELS_MAX), new Map()),
    cut_off_ms: f.optional(f.count, 0),
  },
  announce: {
    model: f.name,
    epoch: f.count,
    version: f.positive,
    layout: f.hex(64),
    layout_bytes: f.integer(10, LAYOUT_BYTES_MAX + 8),
    nbytes: f.count,
    chunk_bytes: f.integer(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX),
    commit: f.oneOf("auto", "together"),
    acknowledge: f.oneOf("applied", "staged"),
    encoding: f.name,
    encryption: f.optional(f.nullable(f.name), null),
    whole: f.optional(f.nullable(whole), null),
    shared: f.optional(f.nullable(shared), null),
    hash: f.optional(f.boolean, false),
    key: f.optional(f.nullable(f.hex(16)), null),
    tag: f.optional(f.nullable(f.hex(32)), null),
    keep: f.optional(f.boolean, false),
    patches: f.optional(f.array(patch, PATCHES_MAX), []),
    metadata: f.optional(
      f.map(f.text(METADATA_NAME_MAX), f.text(TEXT_MAX), METADATA_MAX),
      new Map(),
    ),
    workers: f.optional(f.array(f.name, NAMED_MAX), []),
    sources: f.optional(f.array(source, SOURCES_MAX), []),
    companions: f.optional(f.map(f.name, f.count, MODELS_MAX), new Map()),
  },
  chunk: {
    model: f.name,
    epoch: f.count,
    version: f.positive,
    index: f.integer(0, CHUNKS_MAX - 1),
    crc: f.integer(0, 2 ** 32 - 1),
    patch: f.optional(f.nullable(patchId), null),
  },
  piece: {
    model: f.name,
    epoch: f.count,
    version: f.positive,
    index: f.integer(0, CHUNKS_MAX - 1),
    crc: f.integer(0, 2 ** 32 - 1),
    rest: f.integer(0, 2 ** 32 - 1),
  },
  checksums: {
    model: f.name,
    epoch: f.count,
    version: f.positive,
  },
  end: {
    model: f.name,
    epoch: f.count,
    version: f.positive,
    digest: f.hex(64),
    patch: f.optional(f.nullable(patchId), null),
  },
  refuse: {
    code: f.name,
    text: f.text(TEXT_MAX),
    model: f.optional(f.nullable(f.name), null),
    epoch: f.optional(f.count, 0),
    version: f.optional(f.count, 0),
  },
  beacon: {
    model: f.name,
    epoch: f.count,
    version: f.count,
  },
  commit: {
    model: f.name,
    epoch: f.count,
    version: f.positive,
    digest: f.hex(64),
  },
  abort: {
    model: f.name,
    epoch: f.count,
    version: f.positive,
    text: f.optional(f.text(TEXT_MAX), ""),
  },
  sealed_chunk: {
    model: f.name,
    epoch: f.count,
    version: f.positive,
    index: f.integer(0, CHUNKS_MAX - 1),
    key: f.hex(16),
    tag: f.hex(32),
    patch: f.optional(f.nullable(patchId), null),
  },
  sealed_message: {
    key: f.hex(16),
    count: f.positive,
    sealed: f.base64(HEADER_BYTES_MAX),
  },
  rekey: {
    epoch: f.count,
    keys: f.array(f.hex(64), GROUP_KEYS_MAX),
  },
  rename: {
    model: f.name,
    epoch: f.count,
    version: f.positive,
    was: running,
    metadata: f.optional(
      f.map(f.text(METADATA_NAME_MAX), f.text(TEXT_MAX), METADATA_MAX),
      new Map(),
    ),
  },
};

/** The least and greatest number of payload frames; 0 of the other messages. */
export const PAYLOADS: {
  readonly [T in PublisherMessage["type"]]?: readonly [least: number, most: number];
} = {
  announce: [0, 1],
  chunk: [1, 1],
  piece: [1, 1],
  checksums: [1, 1],
  sealed_chunk: [1, 1],
  sealed_message: [0, 1],
};

// Optional features.
export const MAPPING = "mapping";
export const RENAMING = "renaming";
export const DELTA = "delta-1";
export const UPSTREAM = "upstream";
export const TICKET = "ticket";
export const CHECKING = "checking";
export const RELAY = "relay";
export const COMPANIONS = "companions";
export const PARTS = "parts";
