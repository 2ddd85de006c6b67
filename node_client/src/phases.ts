/**
 * The tables of phase x event -> phase for a version at a worker. Nothing else changes a phase.
 *
 *     announced ──> arriving ──> staged ──> ready ──> applying ──> running
 *         │             │           │         │           │           │
 *         └─────────────┴───────────┴─────────┴───────────┴───────────┴──> dropped, rejected
 *
 * An event without a transition from the current phase is ignored, since messages may be late,
 * repeated or out of order. `docs/PROTOCOL.md` has the same tables (section 8), and
 * `tests/vectors/phases.json` lists every pair of phase and event.
 */

export type Phase =
  | "announced" // its layout or memory is missing
  | "arriving" // its chunks are being received
  | "staged" // complete and verified; waits for a commit
  | "ready" // may be applied
  | "applying" // an apply is in progress
  | "running"
  | "dropped" // forgotten; it may be announced again
  | "rejected"; // not retried in this session

export type Event =
  | "begun" // its layout is known and fits, and it has memory
  | "mapped" // its segment is open, so it need not be staged
  | "whole" // all chunks and the digest have arrived, and match
  | "committed" // its commit is `auto`, or `commit` arrived, or it was announced again as `auto`
  | "taken" // an apply started
  | "put-back" // the apply was postponed
  | "applied"
  | "declined" // a permanent failure, or the user rejected it
  | "failed" // a failure that may pass
  | "torn" // an apply failed half-way: the previously running version is lost, too
  | "stale" // its segment now holds another version
  | "renamed" // a newer version has the same bytes
  | "newer" // a newer version replaces it
  | "gone" // the publisher no longer has it
  | "aborted"
  | "fenced"; // a session of another epoch started

/** Maps each state and event to the next state. Events that change nothing are omitted. */
export type Table<S extends string, E extends string> = Record<S, Partial<Record<E, S>>>;

export const ARROWS: Table<Phase, Event> = {
  announced: {
    begun: "arriving",
    mapped: "ready",
    declined: "rejected",
    failed: "dropped",
    newer: "dropped",
    gone: "dropped",
    aborted: "dropped",
    fenced: "dropped",
  },
  arriving: {
    whole: "staged",
    failed: "dropped",
    newer: "dropped",
    gone: "dropped",
    aborted: "dropped",
    fenced: "dropped",
  },
  staged: {
    committed: "ready",
    newer: "dropped",
    aborted: "dropped",
    fenced: "dropped",
  },
  ready: {
    taken: "applying",
    newer: "dropped",
  },
  applying: {
    applied: "running",
    "put-back": "ready",
    declined: "rejected",
    failed: "dropped",
    torn: "dropped",
    stale: "dropped",
    newer: "dropped",
  },
  running: {
    renamed: "running",
    newer: "dropped",
    torn: "dropped",
  },
  dropped: {},
  rejected: {},
};

// What an announced version waits for. A missing layout was requested. A segment or memory is
// available at once or not at all. A buffer becomes free when another version returns it. The
// version is `begun` once it lacks only memory, and `mapped` once it lacks only a segment.
export type Lack = "layout" | "segment" | "memory" | "buffer";
export type LackEvent = "known" | "located" | "opened" | "full" | "freed";

export const LACKS: Table<Lack, LackEvent> = {
  layout: { known: "memory", located: "segment" },
  segment: { opened: "memory" },
  memory: { full: "buffer" },
  buffer: { freed: "memory" },
};

// How an arriving version is received. In state `received`, the publisher pushes chunks, and lost
// ones are fetched. In state `pulled`, all missing chunks are fetched.
export type Coming = "received" | "pulled" | "copied" | "decoded";
export type Way = "unpushed" | "copy-started" | "patched" | "copy-ended";

export const COMING: Table<Coming, Way> = {
  received: { unpushed: "pulled", "copy-started": "copied" },
  pulled: { patched: "decoded" },
  copied: { "copy-ended": "pulled" },
  decoded: {},
};

// Whether a model's pushed chunks are received. A worker that dropped an arriving version for a
// newer one fetches that one completely before it starts another. Otherwise a worker that is slower
// than its publisher would never complete a version.
export type Mode = "following" | "catching-up";
export type ModeEvent = "replaced" | "completed";

export const MODES: Table<Mode, ModeEvent> = {
  following: { replaced: "catching-up" },
  "catching-up": { completed: "following" },
};

// Whether a worker has a session with its publisher. A worker that is probing has none yet: its
// hello was answered, and it still tests whether it can read the publisher's memory.
export type Session = "outside" | "probing" | "inside";
export type Change = "located" | "welcomed" | "unknown" | "refused" | "silent";

export const SESSIONS: Table<Session, Change> = {
  outside: { located: "probing", welcomed: "inside" },
  probing: {
    located: "probing", // by another welcome
    welcomed: "inside",
    unknown: "outside",
    refused: "outside",
    silent: "outside",
  },
  inside: {
    located: "probing", // by a publisher of another epoch
    welcomed: "inside", // the same
    unknown: "outside",
    refused: "outside",
    silent: "outside",
  },
};

// Codes of refusals that end a session and are reported to the user. The reason may disappear.
// (W20)
export const TURNED_AWAY: ReadonlySet<string> = new Set([
  ...["name-taken", "stale-epoch", "limit", "protocol-version"],
  ...["wrong-name", "not-allowed", "revoked"], // K3, K4, K8
]);
