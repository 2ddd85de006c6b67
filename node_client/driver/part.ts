/** The user's part of applying, which does what the command line wants of it. */

import { setTimeout as passed } from "node:timers/promises";
import type { Hook, Update } from "../src/index.js";

export interface PartOptions {
  /** Versions that fail before a byte has changed, where that is possible. */
  readonly turnDown: ReadonlySet<number>;
  /** Versions that fail after bytes have changed. */
  readonly breaks: ReadonlySet<number>;
  /** Seconds that it takes, `S`, or `S:N,...` for some versions. */
  readonly seconds: string;
}

/** Return what a worker takes; a version in place is turned down before a byte of it is written. */
export function part(
  { turnDown, breaks, seconds }: PartOptions,
  inPlace: (model: string) => boolean,
  stopped: AbortSignal,
): { apply?: Hook; beforeApply?: Hook } {
  const [wait = "0", some] = seconds.split(":");
  const slow = some === undefined ? null : numbers(some);
  if (Number(wait) === 0 && turnDown.size === 0 && breaks.size === 0) return {};
  const turn = (update: Update) => {
    if (turnDown.has(update.version)) throw new Error("told to turn down");
  };
  return {
    beforeApply: (update) => inPlace(update.model) && turn(update),
    apply: async (update) => {
      if (!inPlace(update.model)) turn(update);
      if (breaks.has(update.version)) throw new Error("told to break");
      if (slow?.has(update.version) ?? true) {
        await passed(Number(wait) * 1000, undefined, { signal: stopped });
      }
    },
  };
}

/** Read `1,2,3`. */
export function numbers(words = ""): ReadonlySet<number> {
  return new Set(words.split(",").filter(Boolean).map(Number));
}
