/**
 * Makes companions ready: versions of several models that are published as one. (C2)
 *
 * The announcement of a version names its companions; a worker ignores those of models that it does
 * not receive. A committed version stays staged until, for each of its companions, this companion or
 * a newer version of the same model is committed. Then all are made ready together, and the user
 * applies them at once.
 */

import type { Effect } from "./effects.js";
import type { Follower } from "./follower.js";
import { newer } from "./staging.js";
import type { VersionEntry } from "./version_store.js";

export class Companions {
  constructor(readonly followers: ReadonlyMap<string, Follower>) {}

  /** Make ready each committed version that no longer waits for a companion. */
  complete(now: number): Effect[] {
    const committed = new Map<string, VersionEntry>();
    for (const [model, { versions }] of this.followers) {
      if (versions.held !== null) committed.set(model, versions.held);
    }
    for (let changed = true; changed; ) {
      const incomplete = [...committed].filter(([, entry]) => this.#lacks(entry, committed));
      for (const [model] of incomplete) committed.delete(model);
      changed = incomplete.length > 0;
    }
    const models = [...committed.keys()].sort();
    if (models.length === 0) return [];
    const resumed = models.flatMap((model) => this.followers.get(model)?.release(now) ?? []);
    return [{ do: "ready", models }, ...resumed];
  }

  /** Whether a version waits for a companion that is neither in `committed`, nor ready, nor runs. */
  #lacks({ epoch, announce }: VersionEntry, committed: ReadonlyMap<string, VersionEntry>): boolean {
    return [...announce.companions].some(([model, version]) => {
      const follower = this.followers.get(model);
      const [companion, other] = [{ epoch, version }, committed.get(model)];
      if (follower === undefined || (other && !newer(companion, other))) return false;
      return !follower.versions.offers(companion);
    });
  }
}
