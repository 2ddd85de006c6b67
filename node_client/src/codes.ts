/**
 * The codes of WBP/1 that tell a worker what to do.
 *
 * Made by `make protocol`; do not edit.
 */

/**
 * The codes of `failed`:
 *
 * - `layout-invalid`: the layout breaks a rule, or is not the announced one.
 * - `layout-mismatch`: the model has other names, shapes or dtypes.
 * - `unsupported`: an unknown encoding or encryption; `together` at levels 1 and 2.
 * - `too-large`: more bytes than the worker accepts.
 * - `too-many-chunks`: too many chunks.
 * - `no-memory`: no memory, disk space or file descriptor.
 * - `digest-mismatch`: the chunks do not match the version's digest, or do not arrive.
 * - `apply`: the user rejected the version, or applying it failed; for an apply that failed
 *   half-way see W24.
 */
export type FailedCode =
  | "layout-invalid"
  | "layout-mismatch"
  | "unsupported"
  | "too-large"
  | "too-many-chunks"
  | "no-memory"
  | "digest-mismatch"
  | "apply";

/** The codes of `failed` with which a version is tried again. */
export const TRANSIENT: ReadonlySet<string> = new Set([
  "layout-invalid",
  "unsupported",
  "no-memory",
  "digest-mismatch",
]);

/** The codes of `refuse` that end the session and are reported to the user. */
export const TURNED_AWAY: ReadonlySet<string> = new Set([
  "name-taken",
  "stale-epoch",
  "limit",
  "protocol-version",
  "wrong-name",
  "revoked",
  "not-allowed",
]);
