/** Defines the public class `Worker`, which receives versions of models and applies them. */

import { randomBytes } from "node:crypto";
import { EventEmitter } from "node:events";
import { endianness, hostname } from "node:os";
import { Applier, type Hook, type Update } from "./applying.js";
import { controlAddresses } from "./endpoints.js";
import { ApplyError, ClosedError, RefusedError, TimeoutError } from "./errors.js";
import { asText, checkName } from "./headers.js";
import { Keyring } from "./keyring.js";
import { keysOfEach, type WorkerKeys } from "./keys.js";
import {
  APPLY_MS,
  APPLY_MS_MAX,
  LABEL_MAX,
  MODELS_MAX,
  STAGING_BYTES_MAX,
  timing,
} from "./limits.js";
import { type Moved, type Reported, WorkerLoop } from "./loop.js";
import { WorkerMachine } from "./machine.js";
import type { Running as OnWire } from "./messages.js";
import { type Registered, RegisteredTarget, SnapshotTarget, type Target } from "./target.js";
import { type Deadline, Waiters } from "./waiters.js";

const CLIENT = `weightbus-node/0.1.0 node/${process.versions.node}`;
const JOIN_MS = 30_000;

export interface WorkerOptions {
  /**
   * The models to receive, by name. A value is the memory into which every version is copied, or
   * `"snapshot"` for new tensors with every version. A list of names means snapshots of all these
   * models.
   */
  readonly models: readonly string[] | Readonly<Record<string, Registered | "snapshot">>;
  /**
   * Called with each version after its bytes are written, before it is reported as applied. If the
   * function throws or rejects, the version is reported as failed with that error. A snapshot is
   * then dropped, and the previous version still runs. Registered memory already holds the new
   * bytes, so its model runs no version until another version is applied.
   */
  readonly apply?: Hook | undefined;
  /**
   * Called with each version before any byte is written. If the function throws or rejects, the
   * version is rejected, and the previous version still runs. The tensors are the version's own
   * memory, which may be read only until the function returns.
   */
  readonly beforeApply?: Hook | undefined;
  /**
   * The deadline of a call of `apply` or `beforeApply` in milliseconds (60000). If a call takes
   * longer, the version fails.
   */
  readonly applyTimeout?: number | undefined;
  /** If false, published tensors that are not registered are ignored. Otherwise the version fails. */
  readonly strict?: boolean | undefined;
  /** If true, floats of 16, 32 and 64 bits are converted to the dtype of the registered tensor. */
  readonly cast?: boolean | undefined;
  /** The worker's name, unique at its publisher; by default host, process id and a random part. */
  readonly name?: string | undefined;
  /**
   * The path of a file that `weightbus keygen` wrote, the path of its folder (then `name` selects
   * the file), or the parsed file. With keys the worker connects only to the publisher that the
   * file names. By default the path is the value of the environment variable WEIGHTBUS_KEYS; if it
   * is not set, there are no keys. `""` ignores the variable. A list has an item for each address.
   */
  readonly keys?: WorkerKeys | string | readonly (WorkerKeys | string)[] | undefined;
  /** The largest version to accept, in bytes. */
  readonly bytesMax?: number | undefined;
  /**
   * If false, every version is received whole. Otherwise the publisher may send patches on the
   * running version, for which the worker keeps another copy of the registered tensors.
   */
  readonly patches?: boolean | undefined;
  /**
   * If true, the worker connects to any data endpoint that the publisher names. By default the
   * endpoint must be on the host of the control address, so that a hostile publisher cannot make
   * the worker connect to other hosts.
   */
  readonly anyDataHost?: boolean | undefined;
  /** Milliseconds between pings (1000). */
  readonly ping?: number | undefined;
  /** Milliseconds without a message after which the publisher is lost (5 times `ping`). */
  readonly lostAfter?: number | undefined;
}

export interface WorkerEvents {
  /** The publisher of this epoch has accepted the worker. */
  joined: [epoch: number];
  /**
   * The publisher no longer responds. Running versions do not change, and the worker reconnects.
   */
  lost: [];
  /** The publisher refused the worker, which keeps trying to join. */
  refused: [error: RefusedError];
  /**
   * A version cannot be applied. The error's `intact` is true if the previous version still runs.
   */
  failed: [error: ApplyError];
  /** An event that an operator may want to know about. */
  notice: [code: string, text: string];
}

/** The version that a model runs. */
export interface Running extends OnWire {
  /** The metadata that was published with the version. */
  readonly metadata: ReadonlyMap<string, string>;
}

export type State = "joining" | "joined" | "lost" | "refused" | "closed";

/**
 * A worker.
 *
 * It receives versions in the background. It applies a version only while `receive()` or an
 * iteration of `for await` is pending; at any other time the weights do not change.
 *
 * A version that cannot be applied causes the event `failed`, a refusal the event `refused`.
 * Without a listener for that event, the next `receive()` throws the error.
 */
export class Worker extends EventEmitter<WorkerEvents> implements AsyncDisposable {
  readonly name: string;
  /** The addresses, in order of preference. */
  readonly addresses: readonly string[];
  readonly #targets: ReadonlyMap<string, Target>;
  readonly #machine: WorkerMachine;
  readonly #loop: WorkerLoop;
  readonly #applier: Applier;
  readonly #receivers = new Waiters<Update | undefined>();
  readonly #joiners = new Waiters<void>();
  // Models with ready versions, the longest waiting first. Each group is applied at once.
  #ready: (readonly string[])[] = [];
  #applying = 0; // number of versions being applied, at most one per pending `receive()`
  #updates: Update[] = []; // applied versions that no `receive()` has returned yet
  #errors: (ApplyError | RefusedError)[] = [];
  readonly #refusals = new Map<string, RefusedError>(); // the last refusal by each address
  #turnedAway: RefusedError | null = null; // the last refusal in this round of the addresses
  #refusal: RefusedError | null = null; // the refusal that `joined` throws: no address is left
  #state: State = "joining";
  #closed: unknown; // the reason that the worker closed; undefined after `close()`

  /**
   * Start a worker and wait until the publisher has accepted it.
   *
   * @param options - with `timeout` in milliseconds (30000) and `signal`, as for `joined`.
   * @throws RefusedError, TimeoutError, the errors of the constructor, or the signal's reason.
   */
  static async connect(
    address: string | readonly string[],
    options: WorkerOptions & Deadline,
  ): Promise<Worker> {
    const worker = new Worker(address, options);
    try {
      await worker.joined(options);
      return worker;
    } catch (error) {
      await worker.close();
      throw error;
    }
  }

  /**
   * Start a worker. It joins in the background as soon as the publisher is reachable.
   *
   * @param address - `tcp://HOST:PORT` or `ipc://PATH`; or several addresses in order of preference,
   * as a list or separated by commas, of publishers of the same versions, such as several relays.
   * The worker connects to one address at a time. If its publisher is lost or refuses the worker,
   * the worker tries the next address, and after the last one the first. From another address it
   * returns to the first one as soon as a publisher answers there.
   * @throws AddressError, KeysError, RangeError, or TypeError, if the address, the keys, a name, or
   * registered memory is invalid.
   */
  constructor(address: string | readonly string[], options: WorkerOptions) {
    super();
    if (endianness() !== "LE") throw new TypeError("weightbus needs a little-endian machine");
    this.addresses = controlAddresses(address);
    const each = keysOfEach(options.keys, this.addresses, options.name);
    const [keys] = each;
    this.name = checkName(options.name ?? defaultName(keys?.name), "worker");
    this.#targets = targetsOf(options);
    const identity = {
      name: this.name,
      instance: randomBytes(16).toString("hex"),
      client: CLIENT,
      host: asText(hostname(), LABEL_MAX),
      pid: process.pid,
    };
    const bytesMax = options.bytesMax ?? STAGING_BYTES_MAX;
    const time = timing(options.ping, options.lostAfter);
    const keyring = keys && new Keyring();
    const { patches } = options;
    this.#machine = new WorkerMachine(identity, this.#targets, bytesMax, time, keyring, patches);
    const handlers = {
      reported: (effect: Reported) => this.#reported(effect),
      ended: (reason: unknown) => this.#end(reason),
    };
    const sites = this.addresses.map((one, index) => ({ address: one, keys: each[index] ?? null }));
    this.#loop = new WorkerLoop(sites, this.#machine, handlers, options.anyDataHost);
    const { apply, beforeApply } = options;
    const hooks = { apply, beforeApply, timeout: checkTimeout(options.applyTimeout) };
    this.#applier = new Applier(this.#machine, this.#targets, hooks, {
      perform: (effects) => this.#loop.perform(effects),
      freed: () => this.#serve(),
      late: (text) => this.#emit("notice", "apply-late", text),
    });
  }

  /** The address to which the worker is connected, or tries to connect. */
  get address(): string {
    return this.#loop.address;
  }

  get state(): State {
    return this.#state;
  }

  /** The publisher's epoch; 0 before the first session. */
  get epoch(): number {
    return this.#machine.epoch;
  }

  /** Return the version that a model runs, with its current key; null before its first version. */
  running(model: string): Running | null {
    const running = this.#machine.running(model);
    return running && { ...running, metadata: new Map(this.#machine.metadata(model)) };
  }

  /**
   * Wait until the publisher has accepted this worker.
   *
   * @throws RefusedError, TimeoutError, ClosedError, or the signal's reason.
   */
  async joined(deadline: Deadline = {}): Promise<void> {
    this.#checkOpen();
    if (this.#state === "joined") return;
    if (this.#refusal !== null) throw this.#refusal;
    const { timeout = JOIN_MS, signal } = deadline;
    await this.#joiners.wait({ timeout, signal }, (waiter) => {
      const at = this.addresses.join(", ");
      const text = `no publisher answered at ${at} within ${timeout} ms: is one running there?`;
      waiter.reject(new TimeoutError(text));
    });
  }

  /**
   * Apply the newest version that has arrived, or wait for a version if none has arrived.
   *
   * If the timeout expires while a version is being applied, the apply continues, and the next call
   * returns that version.
   *
   * Versions of several models that are published as one are applied by one call, which returns the
   * first of them; later calls return the others. Meanwhile `reading` waits for each of the models.
   * `beforeApply` is called for all versions, then `apply` for all, before any version is reported.
   * If one version fails, so do the others.
   *
   * @returns the applied version; undefined if none was applied before the timeout.
   * @throws ApplyError, RefusedError (see above), ClosedError, or the signal's reason.
   */
  async receive(deadline: Deadline = {}): Promise<Update | undefined> {
    deadline.signal?.throwIfAborted();
    if (this.#receivers.count === 0) {
      const update = this.#updates.shift();
      if (update !== undefined) return update;
      const error = this.#errors.shift();
      if (error !== undefined) throw error;
      this.#checkOpen();
    }
    const update = this.#receivers.wait(deadline, (waiter) => waiter.resolve(undefined));
    this.#serve();
    return update;
  }

  /**
   * Call `use` while no version is written into the model's registered memory, and return its
   * result. Code that runs concurrently with `receive()` needs this: a large version is written in
   * slices, and other tasks run between the slices. A ready version waits until `use` has returned.
   * `use` must not call `reading`.
   *
   * @param deadline - how long to wait for an apply in progress; by default `applyTimeout`.
   * @throws TornError - if the memory holds no version, because an apply failed half-way.
   * @throws TimeoutError, RangeError (no such model), or the signal's reason.
   */
  reading<T>(model: string, use: () => T | Promise<T>, deadline: Deadline = {}): Promise<T> {
    return this.#applier.reading(model, use, deadline);
  }

  /** Yield each applied version until the worker is closed. Leaving the loop closes nothing. */
  async *[Symbol.asyncIterator](): AsyncGenerator<Update, void, undefined> {
    while (this.#state !== "closed") {
      try {
        const update = await this.receive();
        if (update !== undefined) yield update;
      } catch (error) {
        if (error instanceof ClosedError && error.cause === undefined) return;
        throw error;
      }
    }
  }

  /**
   * Send `bye` and close the connections. Waits for a write in progress, but not for user functions
   * that have not returned. A second call has no effect.
   */
  async close(): Promise<void> {
    this.#loop.close();
    this.#end(undefined);
    await this.#applier.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  // Effects from the loop.

  #reported(effect: Reported): void {
    switch (effect.do) {
      case "ready":
        this.#addReady(effect.models);
        this.#serve();
        break;
      case "joined":
        this.#enter(effect.epoch);
        break;
      case "lost":
        this.#state = "lost";
        this.#emit("lost");
        break;
      case "refused":
        this.#refuse(effect.code, effect.text);
        break;
      case "moved":
        this.#move(effect);
        break;
      case "rejected": {
        const { model, epoch, version, code, text, intact } = effect;
        this.#fail(new ApplyError(model, epoch, version, code, text, intact));
        break;
      }
      case "notice":
        this.#emit("notice", effect.code, effect.text);
    }
  }

  /**
   * Emit an event in a later turn of the event loop, so that exceptions of its listeners do not
   * reach `WorkerLoop`.
   */
  #emit<K extends keyof WorkerEvents>(event: K, ...words: WorkerEvents[K]): void {
    process.nextTick(() => (this as EventEmitter).emit(event, ...words));
  }

  #enter(epoch: number): void {
    this.#state = "joined";
    this.#refusal = this.#turnedAway = null;
    this.#refusals.clear();
    this.#errors = this.#errors.filter((error) => !(error instanceof RefusedError));
    for (const joiner of this.#joiners.all()) joiner.resolve();
    this.#emit("joined", epoch);
  }

  #refuse(code: string, text: string): void {
    this.#state = "refused";
    const { address } = this;
    const last = this.#refusals.get(address);
    if (last?.code === code && last.reason === text) {
      this.#turnedAway = last; // reported already
      return;
    }
    const words = `the publisher at ${address} refuses worker ${this.name} (${code}): ${text}`;
    const refusal = new RefusedError(code, text, words);
    this.#refusals.set(address, refusal);
    this.#turnedAway = refusal;
    if (this.listenerCount("refused") > 0) this.#emit("refused", refusal);
    if (this.addresses.length === 1) this.#turnAway(refusal);
  }

  #move({ from, to, why, exhausted }: Moved): void {
    if (this.#state === "joined") this.#state = "joining";
    if (exhausted && this.#turnedAway !== null) {
      const { code, reason, message } = this.#turnedAway;
      const at = this.addresses.join(", ");
      const words = `${message}; no publisher at ${at} has accepted this worker`;
      if (this.#refusal?.message !== words) this.#turnAway(new RefusedError(code, reason, words));
    }
    if (exhausted) this.#turnedAway = null;
    this.#emit("notice", "moved", `this worker changes over from ${from} to ${to}: ${why}`);
  }

  /** Reject all calls of `joined` and, unless the event `refused` has a listener, `receive()`. */
  #turnAway(refusal: RefusedError): void {
    this.#refusal = refusal;
    for (const joiner of this.#joiners.all()) joiner.reject(refusal);
    if (this.listenerCount("refused") === 0) this.#throwLater(refusal);
  }

  #fail(error: ApplyError): void {
    if (this.listenerCount("failed") > 0) this.#emit("failed", error);
    else this.#throwLater(error);
  }

  /** Make a pending `receive()` throw an error, or else the next one. */
  #throwLater(error: ApplyError | RefusedError): void {
    const receiver = this.#receivers.next();
    if (receiver !== undefined) receiver.reject(error);
    else this.#errors = [...this.#errors, error].slice(-MODELS_MAX);
  }

  #end(reason: unknown): void {
    if (this.#state === "closed") return;
    this.#state = "closed";
    this.#closed = reason;
    for (const waiter of [...this.#receivers.all(), ...this.#joiners.all()]) {
      waiter.reject(this.#closedError());
    }
  }

  #closedError(): ClosedError {
    const failed = this.#closed !== undefined;
    return failed
      ? new ClosedError(`worker ${this.name} failed: ${this.#closed}`, { cause: this.#closed })
      : new ClosedError(`worker ${this.name} is closed: close() was called`);
  }

  #checkOpen(): void {
    if (this.#state === "closed") throw this.#closedError();
  }

  // Applying.

  /**
   * Add models whose versions are ready, to be applied at once. Waiting groups that have one of these
   * models are merged into the new group.
   */
  #addReady(models: readonly string[]): void {
    const overlaps = (group: readonly string[]) => group.some((model) => models.includes(model));
    const first = this.#ready.findIndex(overlaps);
    const others = this.#ready.filter((group) => !overlaps(group));
    const merged = this.#ready.filter(overlaps);
    const group = [...new Set([...models, ...merged.flat()])].sort();
    others.splice(first < 0 ? others.length : first, 0, group);
    this.#ready = others;
  }

  /** Apply ready versions, at most one model or group of models per pending `receive()`. */
  #serve(): void {
    while (this.#state !== "closed" && this.#receivers.count > this.#applying) {
      const group = this.#ready.find((ready) => this.#applier.claim(ready));
      if (group === undefined) return;
      this.#ready = this.#ready.filter((other) => other !== group);
      this.#applying += 1;
      this.#applier.apply(group).then(
        (updates) => this.#applied(updates),
        (error) => this.#end(error),
      );
    }
  }

  #applied(updates: readonly Update[]): void {
    this.#applying -= 1;
    for (const update of updates) {
      const receiver = this.#receivers.next();
      if (receiver !== undefined) receiver.resolve(update);
      else this.#updates.push(update);
    }
    this.#serve();
  }
}

function checkTimeout(milliseconds = APPLY_MS): number {
  if (milliseconds > 0 && milliseconds <= APPLY_MS_MAX) return milliseconds;
  throw new RangeError(
    `applyTimeout ${milliseconds}: milliseconds, above zero and at most a day (${APPLY_MS_MAX})`,
  );
}

function targetsOf({ models, strict = true, cast = false }: WorkerOptions): Map<string, Target> {
  const entries: [string, Registered | "snapshot"][] = Array.isArray(models)
    ? models.map((model) => [model, "snapshot"])
    : Object.entries(models);
  if (entries.length < 1 || entries.length > MODELS_MAX) {
    throw new RangeError(`${entries.length} models; a worker takes 1 to ${MODELS_MAX}`);
  }
  const targets = new Map<string, Target>();
  for (const [model, into] of entries) {
    const target =
      into === "snapshot" ? new SnapshotTarget() : new RegisteredTarget(into, { strict, cast });
    targets.set(checkName(model, "model"), target);
  }
  return targets;
}

/** Return a worker name that fits a key's pattern: its `*` becomes host, process id, random part. */
function defaultName(pattern = "*"): string {
  const host = hostname()
    .replace(/[^A-Za-z0-9._-]/g, "-")
    .slice(0, 80);
  const unique = `${host}-${process.pid}-${randomBytes(3).toString("hex")}`;
  return pattern.replace("*", unique);
}
