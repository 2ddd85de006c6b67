/**
 * Companions: versions of several models that are published as one. (C2)
 *
 * Each names the others in its announcement. It stays staged until it is committed, and so is each
 * of them that this worker wants, or a newer version of that model. Then they are ready at once,
 * and the user applies them at once.
 */

import type { Effect } from "./effects.js";
import type { Follower } from "./follower.js";
import { newer } from "./staging.js";
import type { VersionEntry } from "./version_store.js";

export class Companions {
  constructor(readonly followers: ReadonlyMap<string, Follower>) {}

  /** Make every committed version ready whose companions are here. */
  complete(now: number): Effect[] {
    const found = new Map<string, VersionEntry>();
    for (const [model, { versions }] of this.followers) {
      if (versions.held !== null) found.set(model, versions.held);
    }
    for (let some = true; some; ) {
      const lacking = [...found].filter(([, entry]) => this.#lacks(entry, found));
      for (const [model] of lacking) found.delete(model);
      some = lacking.length > 0;
    }
    const models = [...found.keys()].sort();
    if (models.length === 0) return [];
    const resumed = models.flatMap((model) => this.followers.get(model)?.release(now) ?? []);
    return [{ do: "ready", models }, ...resumed];
  }

  /** Whether a companion of a version is not here. */
  #lacks({ epoch, announce }: VersionEntry, found: ReadonlyMap<string, VersionEntry>): boolean {
    return [...announce.companions].some(([model, version]) => {
      const wanted = this.followers.get(model);
      const [companion, other] = [{ epoch, version }, found.get(model)];
      if (wanted === undefined || (other && !newer(companion, other))) return false;
      return !wanted.versions.offers(companion);
    });
  }
}
