/** Makes the functions `apply` and `beforeApply` that the options of the command line ask for. */

import { setTimeout as sleep } from "node:timers/promises";
import type { Hook, Update } from "../src/index.js";

export interface PartOptions {
  /** Versions that fail before a byte has changed. */
  readonly turnDown: ReadonlySet<number>;
  /** Versions that fail after bytes have changed. */
  readonly breaks: ReadonlySet<number>;
  /** How many seconds `apply` takes: `S` for all versions, or `S:N,...` for the versions `N`. */
  readonly seconds: string;
}

/**
 * Return the hooks for a worker. `beforeApply` rejects versions of models in registered memory,
 * `apply` those of snapshots.
 */
export function part(
  { turnDown, breaks, seconds }: PartOptions,
  inPlace: (model: string) => boolean,
  stopped: AbortSignal,
): { apply?: Hook; beforeApply?: Hook } {
  const [wait = "0", versions] = seconds.split(":");
  const slow = versions === undefined ? null : numbers(versions);
  if (Number(wait) === 0 && turnDown.size === 0 && breaks.size === 0) return {};
  const turnDownIfAsked = (update: Update) => {
    if (turnDown.has(update.version)) throw new Error("told to turn down");
  };
  return {
    beforeApply: (update) => inPlace(update.model) && turnDownIfAsked(update),
    apply: async (update) => {
      if (!inPlace(update.model)) turnDownIfAsked(update);
      if (breaks.has(update.version)) throw new Error("told to break");
      if (slow?.has(update.version) ?? true) {
        await sleep(Number(wait) * 1000, undefined, { signal: stopped });
      }
    },
  };
}

/** Parse a list of numbers such as `1,2,3`. */
export function numbers(words = ""): ReadonlySet<number> {
  return new Set(words.split(",").filter(Boolean).map(Number));
}
