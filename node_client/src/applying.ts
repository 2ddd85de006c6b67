/**
 * Applies versions: calls the user's functions, writes the bytes, and reports the outcome.
 *
 *     taken ──> beforeApply ──> bytes are written ──> apply ──> applied
 *                    │                  │               │
 *                    └──────────────────┴───────────────┴──> failed
 *
 * A large version is written in slices, and the event loop runs between the slices, so that pings
 * are answered. A small version is applied within one turn of the event loop if there are no user
 * functions. If a function does not return in time, its version fails, and its model applies no
 * other version until the function returns.
 */

import { setTimeout as passed } from "node:timers/promises";
import type { Effect } from "./effects.js";
import { TornError } from "./errors.js";
import { Gate } from "./gate.js";
import { now } from "./loop.js";
import type { WorkerMachine } from "./machine.js";
import { atOnce, inSlices } from "./slices.js";
import type { StagedVersion } from "./staging.js";
import { type Target, views, type Writing } from "./target.js";
import type { Tensor } from "./tensor.js";
import type { Deadline } from "./waiters.js";

/** A version that was applied, or that a user function decides on. */
export interface Update {
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /** The digest of the version, as reported to the publisher. */
  readonly digest: string;
  /**
   * How the version was received: `raw` as a whole version, `delta-1` as a patch on the previous
   * version.
   */
  readonly encoding: string;
  /** The tensors by name, aliases included: registered memory, or the snapshot. */
  readonly tensors: ReadonlyMap<string, Tensor>;
  /** The aliases of tied tensors, each with the name under which the tensor was published. */
  readonly aliases: ReadonlyMap<string, string>;
  /** The metadata that was published with the version, such as a step or a reward. */
  readonly metadata: ReadonlyMap<string, string>;
}

/** A user function that is called with a version. If it throws or rejects, the version fails. */
export type Hook = (update: Update) => unknown;

export interface Hooks {
  readonly beforeApply: Hook | undefined;
  readonly apply: Hook | undefined;
  /** Milliseconds for each call. */
  readonly timeout: number;
}

export interface ApplierHandlers {
  readonly perform: (effects: readonly Effect[]) => void;
  /**
   * Called when a model may be free for an apply: a late function has returned, or `reading` has
   * ended.
   */
  readonly freed: () => void;
  /** Called when a function has returned after its deadline. Its result is ignored. */
  readonly late: (text: string) => void;
}

/**
 * The error of a user function that did not return in time: it may still use the tensors that it
 * received.
 */
class LateError extends Error {}

export class Applier {
  readonly #busy = new Set<string>(); // models with an apply in progress
  readonly #hung = new Set<string>(); // models with a function that is past its deadline
  readonly #gates = new Map<string, Gate>();
  readonly #writes = new Set<Promise<void>>();
  readonly #calls = new Set<AbortController>(); // calls in progress
  #closed = false;

  constructor(
    readonly machine: WorkerMachine,
    readonly targets: ReadonlyMap<string, Target>,
    readonly hooks: Hooks,
    readonly handlers: ApplierHandlers,
  ) {
    for (const model of targets.keys()) this.#gates.set(model, new Gate());
  }

  /** Reserve a model for an apply. Return false if the model is in use. */
  claim(model: string): boolean {
    if (this.#busy.has(model) || this.#hung.has(model)) return false;
    if (!this.#gates.get(model)?.shut()) return false; // readers use the model
    this.#busy.add(model);
    return true;
  }

  /**
   * Apply the ready version of a model that is marked as busy, and end the mark. Return null if no
   * version was applied.
   */
  async apply(model: string): Promise<Update | null> {
    const target = this.targets.get(model);
    const staged = this.#closed ? null : this.machine.taken(model);
    const update = target && staged && (await this.#attempt(target, staged));
    this.#busy.delete(model);
    this.#gates.get(model)?.open();
    return update ?? null;
  }

  async #attempt(target: Target, staged: StagedVersion): Promise<Update | null> {
    const { model } = staged;
    let intact = true;
    let update: Update;
    let note: string;
    try {
      const { beforeApply, apply } = this.hooks; // W24: their errors are reported
      if (beforeApply)
        await this.#call("beforeApply", beforeApply, updateOf(staged, views(staged)));
      const writing = target.begin(staged);
      intact = target.keeps;
      await this.#written(writing);
      note = writing.note();
      update = updateOf(staged, writing.tensors);
      if (apply && !this.#closed) await this.#call("apply", apply, update);
    } catch (error) {
      const kept = target.keeps || error instanceof LateError;
      this.#perform(this.machine.failed(model, textOf(error), now(), intact, kept));
      return null;
    }
    this.#perform(this.machine.applied(model, now(), target.keeps, note)); // W16
    return update;
  }

  #perform(effects: readonly Effect[]): void {
    if (!this.#closed) this.handlers.perform(effects);
  }

  async #written(writing: Writing): Promise<void> {
    if (!writing.large) return atOnce(writing.pieces);
    const write = inSlices(writing.pieces);
    this.#writes.add(write);
    try {
      await write;
    } finally {
      this.#writes.delete(write);
    }
  }

  /** Call a user function and wait until it returns. Throws LateError if it misses the deadline. */
  async #call(name: string, hook: Hook, update: Update): Promise<void> {
    const { timeout } = this.hooks;
    const over = new AbortController();
    this.#calls.add(over);
    const returned = (async () => void (await hook(update)))();
    const deadline = passed(timeout, "late", { signal: over.signal });
    try {
      if ((await Promise.race([returned, deadline])) !== "late") return;
    } finally {
      this.#calls.delete(over);
      over.abort(); // stops the timer
    }
    this.#awaitLate(`${name} of ${update.model}`, update.model, returned);
    throw new LateError(`${name} did not return within ${timeout / 1000} s`);
  }

  /** Keep the model reserved until a late function has returned, and then report that. */
  #awaitLate(what: string, model: string, returned: Promise<void>): void {
    this.#hung.add(model);
    const free = (how: string) => {
      this.#hung.delete(model);
      if (this.#closed) return;
      this.handlers.late(`${what} ${how}, too late: the version was reported as failed`);
      this.handlers.freed();
    };
    returned.then(
      () => free("has returned"),
      (error) => free(`has failed with ${textOf(error)}`),
    );
  }

  /** Call `use` while no version of the model is being written, and return its result. */
  async reading<T>(model: string, use: () => T | Promise<T>, deadline: Deadline): Promise<T> {
    const gate = this.#gates.get(model);
    if (gate === undefined) throw new RangeError(`no model ${JSON.stringify(model)} here`);
    const { timeout = this.hooks.timeout, signal } = deadline;
    await gate.enter({ timeout, signal }, `${model} was being applied for ${timeout} ms`);
    try {
      if (this.machine.torn(model)) {
        throw new TornError(
          `an apply of ${model} failed half-way: it runs no version until the next`,
        );
      }
      return await use();
    } finally {
      gate.leave();
      this.handlers.freed();
      gate.admit();
    }
  }

  /** Stop applying and reporting, and wait for the writes in progress. */
  async close(): Promise<void> {
    this.#closed = true;
    for (const call of this.#calls) call.abort();
    await Promise.allSettled(this.#writes);
  }
}

function updateOf(staged: StagedVersion, tensors: Update["tensors"]): Update {
  const { model, epoch, version, digest, layout, patch, metadata } = staged;
  const encoding = patch?.encoding ?? "raw";
  const { aliases } = layout;
  return { model, epoch, version, digest, encoding, tensors, aliases, metadata: new Map(metadata) };
}

/** Return the text of a thrown value of any type. */
function textOf(error: unknown): string {
  if (error instanceof LateError) return error.message;
  try {
    return String(error);
  } catch {
    return "something without a text was thrown";
  }
}
