/**
 * Chooses a patch that turns the running version into the announced one, if one is offered, and
 * fetches the whole version if the patch turns out to be unusable.
 *
 * A patch is received into memory of its own, and decoded into the new version's buffer, so that the
 * running version does not change. The result is checked against the digest like any version.
 */

import type { Effect } from "./effects.js";
import { asText, dataTopic, patchTopic } from "./headers.js";
import type { Keyring } from "./keyring.js";
import { LABEL_MAX, type Timing } from "./limits.js";
import { DELTA, type Patch, type Refuse, type Running } from "./messages.js";
import * as reports from "./reports.js";
import type { Base } from "./staging.js";
import { Transfer } from "./transfer.js";
import type { VersionEntry, VersionStore } from "./version_store.js";

/** The patches of one model. */
export class Patches {
  #ofPatches = false; // whether `topic` is that of patches, instead of whole versions

  constructor(
    readonly model: string,
    readonly versions: VersionStore,
    readonly timing: Timing,
    readonly keyring: Keyring | null,
    /** Whether patches are accepted. */
    readonly accepted: boolean,
  ) {}

  /** The topic of the chunks that this worker receives by push. */
  get topic(): string {
    return this.#ofPatches ? patchTopic(this.model) : dataTopic(this.model);
  }

  /**
   * Subscribe to the pushed chunks of patches if the transfer receives a patch, otherwise to those
   * of whole versions. While the worker is catching up, only set `topic`.
   */
  listen({ patch }: Transfer): Effect[] {
    const before = this.topic; // D7
    this.#ofPatches = patch !== null;
    if (this.topic === before || this.versions.mode === "catching-up") return [];
    return [
      { do: "subscribe", topic: before, on: false },
      { do: "subscribe", topic: this.topic, on: true },
    ];
  }

  /** Return a transfer of a patch on the running version, or of the whole version. */
  transfer(entry: VersionEntry, now: number): Transfer {
    const { announce } = entry; // D4
    if (!this.accepted || announce.patches.length === 0) return this.#whole(entry, now);
    const base = this.#base(announce.layout);
    const patch = base && announce.patches.find((offered) => buildsOn(offered, base.running));
    if (!patch || patch.nbytes > announce.nbytes)
      return this.#whole(entry, now, this.#unfit(entry));
    try {
      const memory = new Uint8Array(patch.nbytes);
      const by = { patch, base };
      const transfer = new Transfer(announce, memory, now, this.timing, this.keyring, by);
      if (patch !== announce.patches[0]) transfer.pull(); // only the first patch is pushed
      return transfer;
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      return this.#whole(entry, now, `there is no memory for a patch of ${patch.nbytes} bytes`);
    }
  }

  /** Return the running version if its bytes were kept and its layout has this id; else null. */
  #base(layout: string): Base | null {
    const { base } = this.versions;
    const runs = base !== null && base.running === this.versions.inPhase("running")?.running;
    return runs && base.layout.id === layout ? base : null;
  }

  /** Return the reason that no offered patch can be used. */
  #unfit({ announce }: VersionEntry): string {
    const runs = this.versions.inPhase("running");
    const here = runs ? `version ${runs.version} of epoch ${runs.epoch} runs` : "nothing runs";
    const kept = this.versions.base === null ? ", and its bytes were not kept" : "";
    const offered = announce.patches.map(({ version }) => version).join(", ");
    return `${here} here${kept}; there are patches on ${offered}`;
  }

  /** Return a transfer of the whole version. `why` is the reason that no patch is used. */
  #whole({ announce, buffer }: VersionEntry, now: number, why = ""): Transfer {
    const memory = buffer as Uint8Array;
    const unpatched = asText(why, LABEL_MAX);
    return new Transfer(announce, memory, now, this.timing, this.keyring, null, unpatched);
  }

  /** Start to decode a complete patch, unless its decoding has started already. */
  decode({ transfer, buffer }: VersionEntry): Effect[] {
    const job = transfer.decode(buffer as Uint8Array); // D5
    return job === null ? [] : [{ do: "decode", job }];
  }

  /** Handle a refusal: the publisher does not have the requested patch. */
  refused(refuse: Refuse, now: number): Effect[] {
    const entry = this.versions.find(refuse, "arriving"); // D8
    if (entry === null || entry.transfer.patch === null || entry.transfer.arrival === "decoded")
      return [];
    return this.giveUp(entry, "the publisher does not have this patch", now);
  }

  /** Fetch the whole version instead of an unusable patch. */
  giveUp(entry: VersionEntry, why: string, now: number): Effect[] {
    const { transfer: old, version } = entry; // D5, D10
    old.revoke();
    const transfer = this.#whole(entry, now, why);
    entry.setTransfer(transfer);
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
