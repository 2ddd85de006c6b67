/**
 * All limits of the worker: those of the protocol, and its own.
 *
 * A peer may send anything: these limits bound the memory that its messages can use here.
 */

import type { Timing } from "./protocol_limits.js";

export * from "./protocol_limits.js";

/** Layouts up to this size are always accepted: some 10,000 tensors; their names take 10 MB. */
export const LAYOUT_BYTES_GUARANTEED = 2 ** 20;
/** This many names of a layout and its metadata are always read: some 10 MB. */
export const NAMES_GUARANTEED = 2 ** 14;
/** Bytes of memory that one name of a layout counts as, with all data stored for it. */
export const NAME_COST = 512;
export const LAYOUTS_KEPT = 4; // per model, so that alternating layouts are not sent again
export const LAYOUTS_BYTES_KEPT = 2 ** 22; // of all layouts but the last; ten times that in memory

export const CONNECT_MS = 3_000; // per attempt; the kernel sends SYN again after 1 s and after 3 s
export const LINGER_MS = 200; // for queued messages at closing, such as `bye` or an acknowledgement
export const PROBE_MS = 1_000; // for a probe of the first of several addresses, as a whole
export const FAULT_MS = 1_000; // between two notices of internal errors: a flood causes one
/**
 * Rate limit of ZMTP commands, since answers take time. A publisher sends a PING every few seconds.
 */
export const COMMANDS = { burst: 64, perSecond: 16 };
export const UNREAD_BYTES_MAX = 2 ** 16; // queued answers to PINGs that the peer does not read
export const UNSENT_BYTES_MAX = 2 ** 20; // queued messages; a hello has up to 64 KiB
export const HANDSHAKE_MS = 5_000; // of ZMTP, until messages can be sent
export const SILENCE_MS = 30_000; // a publisher sends PINGs and beacons far more often than that
export const PINGS_MS = 10 * SILENCE_MS; // with PINGs alone, as before a first version

export const EPOCHS_KEPT = 8; // epochs whose publisher's age is stored
export const APPLY_MS = 60_000; // per call of a user function, by default
export const APPLY_MS_MAX = 86_400_000; // one day: a longer call is presumed to hang
export const SLICE_MS = 2; // of work on large memory before the event loop runs
export const BUFFERS_MAX = 2; // per model: one complete, one arriving; not counting a patch base
export const STAGING_BYTES_MAX = 2 ** 36; // of one version, by default

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
