/** Builds the worker's messages: hello, fetches, and the reports that each ping repeats. (W17) */

import { type Effect, send } from "./effects.js";
import { COMPANIONS, DELTA, type Failed, type Hello, RENAMING, type Running } from "./messages.js";
import type { Transfer } from "./transfer.js";
import type { VersionEntry, VersionStore } from "./version_store.js";

/** The fields of `hello` that identify a worker. */
export type Identity = Pick<Hello, "name" | "instance" | "client" | "host" | "pid">;

// Without the features of W34 and W35.
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

/** Return the reports on all versions of a model, with the last failure. */
export function standing(
  model: string,
  versions: VersionStore,
  failure: readonly Effect[],
): Effect[] {
  const [arriving, applying] = [versions.inPhase("arriving"), versions.inPhase("applying")];
  const waiting = versions.held ?? versions.inPhase("ready"); // C2
  const ready = applying ?? (arriving === null ? waiting : null);
  const running = versions.inPhase("running");
  const effects = staged(model, versions.all("ready", "applying", "staged"));
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

/** Return a report of progress. */
export function progress(
  model: string,
  { epoch, version, phase: at, transfer }: VersionEntry,
): Effect {
  const arriving = at === "arriving" ? transfer : null;
  const phase = arriving ? "receiving" : at === "applying" ? at : "staged";
  const [chunks, patch] = [arriving?.here ?? 0, arriving?.patch ?? undefined];
  return send({ type: "progress", model, epoch, version, chunks, phase, patch });
}

/** Return a `staged` message for each version whose publisher requires one. */
export function staged(model: string, some: readonly VersionEntry[]): Effect[] {
  const due = some.map((entry) => entry.staged).filter(({ sayStaged }) => sayStaged); // W14
  return due.map(({ epoch, version, digest, patch }) =>
    send({ type: "staged", model, epoch, version, digest, patch: patch ?? undefined }),
  );
}

/** Return `applied` for the running version, with the patch by which the version was received. */
export function applied(
  model: string,
  { running, staged: came, note: remark }: VersionEntry,
): Effect {
  const patch = came.patch ?? undefined; // D11
  const decode_us = came.decodeUs || undefined;
  const note = remark || undefined;
  return send({ type: "applied", model, ...running, patch, decode_us, note });
}

/** Return `failed` for a version. `torn` means that no version runs. */
export function failed(failure: Failed, torn: boolean): Effect {
  return send({ ...failure, intact: !torn }); // W24
}

/** Return a ping. Its token is the time; the pong has the same token. (W12, W18) */
export function ping(now: number, subscribed: boolean): Effect {
  return send({ type: "ping", token: Math.floor(now), subscribed });
}

/** Return a notice that no published messages arrive. */
export function unheard(address: string): Effect {
  const text = // W33
    `nothing published comes from ${address}, so everything is fetched: does a firewall stand ` +
    "in the way of it?";
  return { do: "notice", code: "nothing-published", text };
}
