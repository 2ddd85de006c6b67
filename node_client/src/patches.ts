/**
 * Which patch a version arrives by, if there is one that fits, and what is done where it does not.
 *
 * A patch builds on the very bytes that run here. It arrives into memory of its own, and what it leads
 * to is held against the digest like any version. Whatever is wrong with it, all of the version is
 * fetched in its place, and what runs runs on meanwhile.
 */

import type { Effect } from "./effects.js";
import type { Keyring } from "./keyring.js";
import { LABEL_MAX, type Timing } from "./limits.js";
import {
  asText,
  DELTA,
  dataTopic,
  type Patch,
  patchTopic,
  type Refuse,
  type Running,
} from "./messages.js";
import * as reports from "./reports.js";
import type { Base } from "./staging.js";
import { Transfer } from "./transfer.js";
import type { VersionEntry, VersionStore } from "./version_store.js";

/** The patches of one model. */
export class Patches {
  #listens = false; // to chunks of patches, in place of those of versions

  constructor(
    readonly model: string,
    readonly versions: VersionStore,
    readonly timing: Timing,
    readonly keyring: Keyring | null,
    /** Whether patches are taken. */
    readonly taken: boolean,
  ) {}

  /** The topic of the chunks that are pushed to this worker. */
  get topic(): string {
    return this.#listens ? patchTopic(this.model) : dataTopic(this.model);
  }

  /** Have the next versions pushed in the way in which one arrives, if they are to be pushed. */
  listen({ patch }: Transfer): Effect[] {
    const before = this.topic; // D7
    this.#listens = patch !== null;
    if (this.topic === before || this.versions.mode === "catching-up") return [];
    return [
      { do: "subscribe", topic: before, on: false },
      { do: "subscribe", topic: this.topic, on: true },
    ];
  }

  /** Return what a version arrives by: a patch on what runs here; else itself. */
  transfer(entry: VersionEntry, now: number): Transfer {
    const { announce } = entry; // D4
    if (!this.taken || announce.patches.length === 0) return this.#whole(entry, now);
    const base = this.#base(announce.layout);
    const patch = base && announce.patches.find((one) => buildsOn(one, base.running));
    if (!patch || patch.nbytes > announce.nbytes)
      return this.#whole(entry, now, this.#unfit(entry));
    try {
      const room = new Uint8Array(patch.nbytes);
      const by = { patch, base };
      const transfer = new Transfer(announce, room, now, this.timing, this.keyring, by);
      if (patch !== announce.patches[0]) transfer.pull(); // the first alone is pushed
      return transfer;
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      return this.#whole(entry, now, `there is no memory for a patch of ${patch.nbytes} bytes`);
    }
  }

  /** What a patch may build on: what runs, if its bytes are here, and of this layout. */
  #base(layout: string): Base | null {
    const { base } = this.versions;
    const runs = base !== null && base.running === this.versions.at("running")?.running;
    return runs && base.layout.id === layout ? base : null;
  }

  #unfit({ announce }: VersionEntry): string {
    const runs = this.versions.at("running");
    const here = runs ? `version ${runs.version} of epoch ${runs.epoch} runs` : "nothing runs";
    const kept = this.versions.base === null ? ", and its bytes were not kept" : "";
    const offered = announce.patches.map(({ version }) => version).join(", ");
    return `${here} here${kept}; there are patches on ${offered}`;
  }

  #whole({ announce, buffer }: VersionEntry, now: number, why = ""): Transfer {
    const memory = buffer as Uint8Array;
    const unpatched = asText(why, LABEL_MAX);
    return new Transfer(announce, memory, now, this.timing, this.keyring, null, unpatched);
  }

  /** A patch is here, and what its version hashes to: decode it, unless that is being done. */
  decode({ transfer, buffer }: VersionEntry): Effect[] {
    const job = transfer.decode(buffer as Uint8Array); // D5
    return job === null ? [] : [{ do: "decode", job }];
  }

  /** The publisher has no patch (any more) that was asked for. */
  refused(refuse: Refuse, now: number): Effect[] {
    const entry = this.versions.find(refuse, "arriving"); // D8
    if (entry === null || entry.transfer.patch === null || entry.transfer.comes === "decoded")
      return [];
    return this.giveUp(entry, "the publisher has no such patch (any more)", now);
  }

  /** A patch is of no use: have all of its version fetched in its place. */
  giveUp(entry: VersionEntry, why: string, now: number): Effect[] {
    const { transfer: old, version } = entry; // D5, D10
    old.revoke();
    const transfer = this.#whole(entry, now, why);
    entry.comesBy(transfer);
    transfer.pull();
    this.versions.release(old);
    const text = `version ${version} of ${this.model} is fetched as a whole, not patched: ${why}`;
    return [{ do: "notice", code: "unpatched", text }, ...reports.fetches(transfer, now)];
  }
}

function buildsOn(patch: Patch, { epoch, version, digest }: Running): boolean {
  return (
    patch.encoding === DELTA &&
    patch.epoch === epoch &&
    patch.version === version &&
    patch.digest === digest
  );
}
