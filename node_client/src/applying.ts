/**
 * Applies versions: calls the user's functions, writes the bytes, and reports the outcome.
 *
 *     taken ──> beforeApply ──> bytes are written ──> apply ──> applied
 *                    │                  │               │
 *                    └──────────────────┴───────────────┴──> failed
 *
 * A large version is written in slices, and the event loop runs between the slices, so that pings
 * are answered. A small version is applied within one turn of the event loop if there are no user
 * functions. If a user function misses its deadline, its version fails, and the worker applies no
 * other version to that model until the function returns.
 */

import { setTimeout as sleep } from "node:timers/promises";
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
   * How the version was received: `raw` as a whole version, `delta-1` as a patch on the version that
   * ran before.
   */
  readonly encoding: string;
  /** The tensors by name and by alias. Their memory is the registered one, or a snapshot. */
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
  /** The deadline of each call, in milliseconds. */
  readonly timeout: number;
}

export interface ApplierHandlers {
  readonly perform: (effects: readonly Effect[]) => void;
  /**
   * Called when an apply of a model may have become possible: a function that was past its deadline
   * has returned, or a `reading` has ended.
   */
  readonly freed: () => void;
  /** Called when a function has returned after its deadline. Its result is ignored. */
  readonly late: (text: string) => void;
}

/** A user function missed its deadline. The function may still use the tensors that it received. */
class LateError extends Error {}

/** A version that is being applied. */
interface Work {
  readonly model: string;
  readonly target: Target;
  readonly staged: StagedVersion;
  /** Whether the previous version still runs if this version fails. */
  intact: boolean;
  /** The result of writing the version; null until it is written. */
  done: { readonly update: Update; readonly note: string } | null;
}

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

  /** Reserve models for an apply. Return false, and reserve none, if one of them is in use. */
  claim(models: readonly string[]): boolean {
    if (models.some((model) => this.#busy.has(model) || this.#hung.has(model))) return false;
    const locked = models.filter((model) => this.#gates.get(model)?.shut());
    if (locked.length < models.length) {
      for (const model of locked) this.#gates.get(model)?.open(); // another model has readers
      return false;
    }
    for (const model of models) this.#busy.add(model);
    return true;
  }

  /**
   * Apply the ready versions of models that `claim` has reserved, all at once, and end the
   * reservation. Return the applied versions; none if one version fails.
   */
  async apply(models: readonly string[]): Promise<Update[]> {
    const works = this.#closed ? [] : models.flatMap((model) => this.#take(model));
    const updates = await this.#attempt(works);
    for (const model of models) this.#busy.delete(model);
    for (const model of models) this.#gates.get(model)?.open();
    return updates;
  }

  #take(model: string): Work[] {
    const target = this.targets.get(model);
    const staged = this.machine.takeReady(model);
    return target && staged ? [{ model, target, staged, intact: true, done: null }] : [];
  }

  async #attempt(works: readonly Work[]): Promise<Update[]> {
    let current = works[0]; // the version that is at fault if an error is thrown
    try {
      const { beforeApply, apply } = this.hooks; // W24: the errors of both are reported
      for (const work of beforeApply ? works : []) {
        current = work;
        const { staged } = work;
        if (beforeApply)
          await this.#call("beforeApply", beforeApply, updateOf(staged, views(staged)));
      }
      const writings = works.map((work) => {
        current = work;
        return [work, work.target.begin(work.staged)] as const;
      });
      for (const [work, writing] of writings) {
        current = work;
        work.intact = work.target.keeps;
        await this.#write(writing);
        work.done = { update: updateOf(work.staged, writing.tensors), note: writing.note() };
      }
      for (const work of works) {
        current = work;
        if (apply && !this.#closed && work.done) await this.#call("apply", apply, work.done.update);
      }
    } catch (error) {
      if (current) this.#reportFailure(works, current, error);
      return [];
    }
    const time = now();
    const reports = works.map(({ model, target, done }) => {
      return this.machine.applied(model, time, target.keeps, done?.note); // W16
    });
    this.#perform(reports.flat()); // only after all versions run
    return works.flatMap(({ done }) => done?.update ?? []);
  }

  /** Report that no version of `works` was applied, since `faulty` failed with `error`. */
  #reportFailure(works: readonly Work[], faulty: Work, error: unknown): void {
    const [text, time] = [textOf(error), now()];
    const { epoch, version } = faulty.staged;
    const beside = `version ${version} of ${faulty.model}, which is published as one with it, failed: ${text}`;
    const torn = works.some(({ intact }) => !intact);
    for (const work of works) {
      const { model, target, intact } = work;
      const kept = target.keeps || (work === faulty && error instanceof LateError);
      const again = torn && intact;
      if (work === faulty && !again) {
        this.#perform(this.machine.failed(model, text, time, intact, kept));
      } else {
        const words = work === faulty ? text : beside;
        this.#perform(this.machine.failedBeside(model, words, time, intact, again, kept));
      }
      if (work === faulty && again) {
        this.#perform([
          { do: "rejected", model, epoch, version, code: "apply", text, intact: true },
        ]);
      }
    }
  }

  #perform(effects: readonly Effect[]): void {
    if (!this.#closed) this.handlers.perform(effects);
  }

  async #write(writing: Writing): Promise<void> {
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
    const ended = new AbortController();
    this.#calls.add(ended);
    const returned = (async () => void (await hook(update)))();
    const deadline = sleep(timeout, "late", { signal: ended.signal });
    try {
      if ((await Promise.race([returned, deadline])) !== "late") return;
    } finally {
      this.#calls.delete(ended);
      ended.abort(); // stops the timer
    }
    this.#awaitLate(`${name} of ${update.model}`, update.model, returned);
    throw new LateError(`${name} did not return within ${timeout / 1000} s`);
  }

  /**
   * Apply nothing to the model until a function that missed its deadline has returned, and then
   * report its return.
   */
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
          `an apply of ${model} failed half-way: ${model} runs no version until one is applied`,
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

/** Return the text of a thrown value, which may have any type. */
function textOf(error: unknown): string {
  if (error instanceof LateError) return error.message;
  try {
    return String(error);
  } catch {
    return "something without a text was thrown";
  }
}
