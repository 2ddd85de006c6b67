/** Builds the worker's messages: hello, fetches, pings, and reports on versions. (W17) */

import { type Effect, send } from "./effects.js";
import { COMPANIONS, DELTA, type Failed, type Hello, RENAMING, type Running } from "./messages.js";
import type { Transfer } from "./transfer.js";
import type { VersionEntry, VersionStore } from "./version_store.js";

/** The fields of `hello` that identify a worker. */
export type Identity = Pick<Hello, "name" | "instance" | "client" | "host" | "pid">;

// This worker lacks the features of W34 and W35.
const FEATURES = [RENAMING, COMPANIONS]; // W25, C2
const WITH_PATCHES = [...FEATURES, DELTA]; // D4

/**
 * Return a `hello`. `epoch` is the latest applied epoch, and `age_ms` the time since the publisher
 * of that epoch started.
 */
export function hello(
  identity: Identity,
  models: ReadonlyMap<string, Running | null>,
  epoch: number,
  age_ms: number,
  patches: boolean,
): Effect {
  const features = patches ? WITH_PATCHES : FEATURES;
  return send({ type: "hello", ...identity, models, epoch, age_ms, features });
}

/** Return the current reports on all versions of a model, and `failure`, that on the last failure. */
export function standing(
  model: string,
  versions: VersionStore,
  failure: readonly Effect[],
): Effect[] {
  const [arriving, applying] = [versions.inPhase("arriving"), versions.inPhase("applying")];
  const waiting = versions.held ?? versions.inPhase("ready"); // C2
  const ready = applying ?? (arriving === null ? waiting : null);
  const running = versions.inPhase("running");
  const effects = staged(model, versions.inPhases("ready", "applying", "staged"));
  if (arriving !== null && applying === null) effects.push(progress(model, arriving));
  if (running !== null) effects.push(applied(model, running));
  effects.push(...failure);
  if (ready !== null) effects.push(progress(model, ready));
  return effects;
}

/** Return the fetches that are due. */
export function fetches(transfer: Transfer, now: number): Effect[] {
  const { model, epoch, version } = transfer.announce;
  const patch = transfer.patch ?? undefined;
  const unpatched = transfer.unpatched || undefined; // D10
  return transfer.wants(now).map((range) => {
    return send({ type: "fetch", model, epoch, version, ...range, patch, unpatched });
  });
}

/** Return the report on the progress of a version. */
export function progress(model: string, entry: VersionEntry): Effect {
  const { epoch, version } = entry;
  const arriving = entry.phase === "arriving" ? entry.transfer : null;
  const phase = arriving ? "receiving" : entry.phase === "applying" ? entry.phase : "staged";
  const [chunks, patch] = [arriving?.here ?? 0, arriving?.patch ?? undefined];
  return send({ type: "progress", model, epoch, version, chunks, phase, patch });
}

/** Return a `staged` message for each of these versions whose publisher requires one. */
export function staged(model: string, entries: readonly VersionEntry[]): Effect[] {
  const due = entries.map((entry) => entry.staged).filter(({ reportStaged }) => reportStaged); // W14
  return due.map(({ epoch, version, digest, patch }) =>
    send({ type: "staged", model, epoch, version, digest, patch: patch ?? undefined }),
  );
}

/** Return `applied` for the running version, with the patch by which the version was received. */
export function applied(model: string, { running, staged, note }: VersionEntry): Effect {
  const patch = staged.patch ?? undefined; // D11
  const decode_us = staged.decodeUs || undefined;
  return send({ type: "applied", model, ...running, patch, decode_us, note: note || undefined });
}

/** Return `failed` for a version. If `torn` is true, no version runs. */
export function failed(failure: Failed, torn: boolean): Effect {
  return send({ ...failure, intact: !torn }); // W24
}

/** Return a ping, whose token is the time. The publisher's pong repeats the token. (W12, W18) */
export function ping(now: number, subscribed: boolean): Effect {
  return send({ type: "ping", token: Math.floor(now), subscribed });
}

/** Return a notice that no published messages arrive. */
export function unheard(address: string): Effect {
  const text = // W33
    `no published message arrives from ${address}, so everything is fetched: does a firewall ` +
    "block the address?";
  return { do: "notice", code: "nothing-published", text };
}
