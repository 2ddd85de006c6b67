/**
 * Defines all limits of the worker: those of the protocol (`protocol_limits.ts`), and its own.
 *
 * A peer may send anything: these limits bound the memory that its messages can use at the worker.
 */

import type { Timing } from "./protocol_limits.js";

export * from "./protocol_limits.js";

/** Layouts up to this size, of some 10,000 tensors, are always accepted. In memory: 10 MB. */
export const LAYOUT_BYTES_GUARANTEED = 2 ** 20;
/** Layouts with up to this many names, of tensors and metadata, are always read. In memory: 10 MB. */
export const NAMES_GUARANTEED = 2 ** 14;
/** The memory in bytes that is estimated for one name of a layout and all that is stored for it. */
export const NAME_COST = 512;
export const LAYOUTS_KEPT = 4; // per model, so that alternating layouts are not sent again
export const LAYOUTS_BYTES_KEPT = 2 ** 22; // of a model's layouts, or the last alone; parsed, ten times as much

export const CONNECT_MS = 3_000; // per attempt; the kernel sends SYN again after 1 s and after 3 s
export const LINGER_MS = 200; // for sending queued messages on closing, such as `bye`
export const PROBE_MS = 1_000; // for a whole probe of the first of several addresses
export const FAULT_MS = 1_000; // between two notices of internal errors, so that a flood causes one
/** Rate limit of received ZMTP commands. A publisher sends a PING every few seconds. */
export const COMMANDS = { burst: 64, perSecond: 16 };
export const UNREAD_BYTES_MAX = 2 ** 16; // send queue of a data connection: answers to PINGs
export const UNSENT_BYTES_MAX = 2 ** 20; // send queue of the control connection: hello has <= 64 KiB
export const HANDSHAKE_MS = 5_000; // of ZMTP, until messages can be sent
export const SILENCE_MS = 30_000; // without input; a publisher sends PINGs and beacons more often
export const PINGS_MS = 10 * SILENCE_MS; // with PINGs alone, as before the first version

export const EPOCHS_KEPT = 8; // epochs whose publisher's age is stored
export const APPLY_MS = 60_000; // per call of a user function, by default
export const APPLY_MS_MAX = 86_400_000; // one day: a call that takes longer is presumed to hang
export const SLICE_MS = 2; // of work on large memory, before the event loop runs
export const BUFFERS_MAX = 2; // per model, besides a patch base: one complete and one arriving
export const STAGING_BYTES_MAX = 2 ** 36; // of one version, by default

/** Return the intervals and timeouts of a worker, in milliseconds. */
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
