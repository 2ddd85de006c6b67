/**
 * Every bound of the protocol in one place; docs/PROTOCOL.md gives the reason for each.
 *
 * A peer may send anything. What it can make this side remember or allocate is bounded here.
 */

export const INTEGER_MAX = Number.MAX_SAFE_INTEGER; // 2^53 - 1
export const HEADER_BYTES_MAX = 65_536;
export const TEXT_MAX = 4096; // code points of a reason, an address, a path
/** Of what is said of one version: entries, and characters of a name. */
export const METADATA_MAX = 32;
export const METADATA_NAME_MAX = 128;
export const LABEL_MAX = 256; // code points of a client's description or a host
export const FEATURES_MAX = 64;
export const MODELS_MAX = 64;
export const GROUP_KEYS_MAX = 2; // one, and the one before while it changes
export const CHUNK_BYTES_MAX = 2 ** 26;
export const CHUNKS_MAX = 2 ** 20;
export const PATCHES_MAX = 8; // of one version: each is on another base, and most workers run one of two
export const FETCH_CHUNKS_MAX = 64;
export const LAYOUT_BYTES_MAX = 100_000_000; // the 8 bytes of its length come on top
export const TENSORS_MAX = 1_000_000;
export const RANK_MAX = 64;
export const NAME_BYTES_MAX = 4096; // of a tensor's name
export const MESSAGE_BYTES_MAX = LAYOUT_BYTES_MAX + HEADER_BYTES_MAX; // ZMQ_MAXMSGSIZE

/** Of a layout that is taken however small `bytesMax` is: some 10,000 tensors; their names take 10 MB. */
export const LAYOUT_BYTES_FREE = 2 ** 20;
/** Names of a layout, of metadata as well, that are read however small `bytesMax` is: some 10 MB. */
export const NAMES_FREE = 2 ** 14;
/** Bytes of memory that a name of a layout counts as, with all that is kept of it. */
export const NAME_COST = 512;
export const LAYOUTS_KEPT = 4; // of a model, so that one that alternates sends none again;
export const LAYOUTS_BYTES_KEPT = 2 ** 22; // together, but for the last: each takes ten times that

export const CONNECT_MS = 3_000; // for one attempt: the kernel's own second comes after 1 s, its third 3 s
export const LINGER_MS = 200; // what is on its way at closing (a goodbye, an acknowledgement) gets this
export const FAULT_MS = 1_000; // between two words of messages that this worker fails on: a flood is one
/** Commands of ZMTP: a publisher pings every few seconds. Each PING is answered, which takes time. */
export const COMMANDS = { burst: 64, perSecond: 16 };
export const UNREAD_BYTES_MAX = 2 ** 16; // of answers to PINGs, which the other side does not read
export const UNSENT_BYTES_MAX = 2 ** 20; // of messages, of which a hello has up to 64 KiB
export const HANDSHAKE_MS = 5_000; // of ZMTP, until messages can be sent
export const SILENCE_MS = 30_000; // a publisher pings and sends beacons far more often than that
export const PINGS_MS = 10 * SILENCE_MS; // with nothing but PINGs: what has no version yet sends no more

export const WINDOW_CHUNKS = 16; // asked for and not here yet, at most
export const PROGRESS_CHUNKS = 16; // between two reports of progress
export const TRIES_MAX = 5; // times that nothing new of a patch or version comes: half a minute, for slow links
export const APPLIES_MAX = 3; // in a row that fail half-way before a version is rejected
export const EPOCHS_KEPT = 8; // of which the publisher's age is remembered
export const APPLY_MS = 60_000; // for each call of a user's function, unless the user says otherwise
export const APPLY_MS_MAX = 86_400_000; // what hangs for a day hangs for ever
export const SLICE_MS = 2; // of work on much memory, between which the event loop turns
export const BUFFERS_MAX = 2; // of a model: one version complete, one arriving; and what runs, for patches
export const STAGING_BYTES_MAX = 2 ** 36; // of one version, unless the user says otherwise

/** How long a worker waits, in milliseconds (section 11 of the protocol). */
export interface Timing {
  /** Between two pings or repetitions of a report. */
  readonly ping: number;
  /** Silence after which the publisher is lost. */
  readonly lostAfter: number;
  /** Silence of the control channel alone after which it is lost. */
  readonly deafAfter: number;
  /** Between two hellos while nobody answers. */
  readonly helloRetry: number;
  /** Silence after which no push is waited for any more. */
  readonly quiet: number;
  /** Between two reports of progress where chunks come slowly. */
  readonly report: number;
  /** Silence after which a fetch is repeated; doubles each time, up to `patienceMax`. */
  readonly patience: number;
  readonly patienceMax: number;
}

export function timing(ping = 1000, lostAfter = 5 * ping): Timing {
  if (!(ping > 0 && lostAfter >= 2 * ping)) {
    throw new RangeError(
      `ping ${ping} ms and lostAfter ${lostAfter} ms: both must be above zero, and lostAfter at ` +
        "least twice ping, so that the publisher has two chances to be heard",
    );
  }
  return {
    ping,
    lostAfter,
    deafAfter: 6 * lostAfter,
    helloRetry: Math.min(ping, 250),
    quiet: Math.min(ping, 250),
    report: Math.min(ping, 250) * 0.4,
    patience: ping,
    patienceMax: 16 * ping,
  };
}
