/**
 * The limits of WBP/1 that a worker keeps, and its times.
 *
 * Made by `make protocol`; do not edit.
 */

/** Bytes of a header. */
export const HEADER_BYTES_MAX = 65_536;
/** The greatest integer. */
export const INTEGER_MAX = 2 ** 53 - 1;
/** Bytes of the largest frame that a worker accepts. */
export const MESSAGE_BYTES_MAX = 100_065_536;
/** Chunks of a version. */
export const CHUNKS_MAX = 2 ** 20;
/** Bytes of a chunk, at least. */
export const CHUNK_BYTES_MIN = 1;
/** Bytes of a chunk, at most. */
export const CHUNK_BYTES_MAX = 2 ** 26;
/** Chunks requested and not yet received. */
export const WINDOW_CHUNKS = 16;
/** Chunks of one `fetch`. */
export const FETCH_CHUNKS_MAX = 64;
/** Waits in a row without a valid chunk (W12). */
export const TRIES_MAX = 5;
/** Models of a worker. */
export const MODELS_MAX = 64;
/** Features of one side. */
export const FEATURES_MAX = 64;
/** Characters of a text, an address or a path. */
export const TEXT_MAX = 4096;
/** Characters of a client's or host's name. */
export const LABEL_MAX = 256;
/** Bytes of the JSON of a layout. */
export const LAYOUT_BYTES_MAX = 100_000_000;
/** Tensors of a version. */
export const TENSORS_MAX = 1_000_000;
/** Bytes of a tensor's name. */
export const NAME_BYTES_MAX = 4096;
/** Dimensions of a tensor. */
export const RANK_MAX = 64;
/** Applies of a model that fail half-way in a row. */
export const APPLIES_MAX = 3;
/** Chunks between two reports of progress. */
export const PROGRESS_CHUNKS = 16;
/** Seconds for which a ticket is valid. */
export const TICKET_SECONDS = 30;
/** Group keys of a session. */
export const GROUP_KEYS_MAX = 2;
/** Patches of an announcement. */
export const PATCHES_MAX = 8;
/** Entries of a version's metadata. */
export const METADATA_MAX = 32;
/** Characters of a name in metadata. */
export const METADATA_NAME_MAX = 128;
/** Bytes of names and texts of a version's metadata. */
export const METADATA_BYTES_MAX = 4096;
/** Relays between a publisher and a worker. */
export const RELAYS_MAX = 16;
/** Workers that an announcement to a relay names. */
export const NAMED_MAX = 256;
/** Sources of an announcement. */
export const SOURCES_MAX = 1024;
/** Numbers in `chunks` of a source. */
export const SOURCE_RANGES_MAX = 4096;
/** Numbers in `ranges` of a `fetch`. */
export const RANGES_MAX = 1024;

/** The times of a worker, in milliseconds. */
export interface Timing {
  /** Between two hellos. */
  readonly helloRetry: number;
  /** Between two pings. */
  readonly ping: number;
  /** Silence after which the other side is lost. */
  readonly lostAfter: number;
  /** Silence of the control channel after which the publisher is lost. */
  readonly deafAfter: number;
  /** Between two fetches of version 0 (W4); silence after which a push counts as ended. */
  readonly quiet: number;
  /** Silence after which a fetch is repeated. */
  readonly patience: number;
  /** The longest such silence. */
  readonly patienceMax: number;
  /** Between two `progress` of a slow push; less than `quiet`. */
  readonly report: number;
}
