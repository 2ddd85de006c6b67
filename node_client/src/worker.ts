/** What a user touches: a worker that receives the versions of some models and applies them. */

import { randomBytes } from "node:crypto";
import { EventEmitter } from "node:events";
import { endianness, hostname } from "node:os";
import { checkAddress } from "./endpoints.js";
import { ApplyError, ClosedError, RefusedError, TimeoutError } from "./errors.js";
import { LABEL_MAX, MODELS_MAX, STAGING_BYTES_MAX, timing } from "./limits.js";
import { now, type Told, WorkerLoop } from "./loop.js";
import { WorkerMachine } from "./machine.js";
import { asText, checkName, type Running } from "./messages.js";
import { type Registered, RegisteredTarget, SnapshotTarget, type Target } from "./target.js";
import type { Tensor } from "./tensor.js";
import { type Deadline, Waiters } from "./waiters.js";

const CLIENT = `weightbus-node/0.1.0 node/${process.versions.node}`;
const JOIN_MS = 30_000;

export interface WorkerOptions {
  /**
   * The models that it wants. By name: memory into which every version is copied, or `"snapshot"`
   * for new tensors with every version. A list of names asks for snapshots of all.
   */
  readonly models: readonly string[] | Readonly<Record<string, Registered | "snapshot">>;
  /** What the worker is called, unique among the publisher's; by default host, process, chance. */
  readonly name?: string | undefined;
  /** The largest version to take, in bytes. */
  readonly bytesMax?: number | undefined;
  /** Milliseconds between pings (1000). */
  readonly ping?: number | undefined;
  /** Milliseconds of silence after which the publisher is lost (5 times `ping`). */
  readonly lostAfter?: number | undefined;
}

/** A version that was just applied. */
export interface Update {
  readonly model: string;
  readonly epoch: number;
  readonly version: number;
  /** What its bytes hash to, as the publisher was told. */
  readonly digest: string;
  /** By name, aliases included: the registered memory, or the snapshot. */
  readonly tensors: ReadonlyMap<string, Tensor>;
  /** The texts that were published with it. */
  readonly metadata: ReadonlyMap<string, string>;
}

export interface WorkerEvents {
  /** The publisher of this epoch has let the worker in. */
  joined: [epoch: number];
  /** The publisher is silent. What runs goes on, and the worker looks for it. */
  lost: [];
  /** The publisher does not let the worker in. It goes on asking. */
  refused: [error: RefusedError];
  /** A version cannot be applied; the one before it still runs. */
  failed: [error: ApplyError];
  /** Something that an operator may want to know. */
  notice: [code: string, text: string];
}

export type State = "joining" | "joined" | "lost" | "refused" | "closed";

/**
 * A worker.
 *
 * It receives in the background, and applies a version only while somebody awaits `receive()` or
 * the next turn of `for await`: between those, the weights do not change.
 *
 * A version that cannot be applied, or a refusal, goes to those who listen for `failed` or
 * `refused`. If nobody does, the next `receive()` throws it.
 */
export class Worker extends EventEmitter<WorkerEvents> implements AsyncDisposable {
  readonly name: string;
  readonly #targets: ReadonlyMap<string, Target>;
  readonly #machine: WorkerMachine;
  readonly #loop: WorkerLoop;
  readonly #receivers = new Waiters<Update | undefined>();
  readonly #joiners = new Waiters<void>();
  readonly #ready = new Set<string>(); // models, the one that waits for longest first
  #errors: (ApplyError | RefusedError)[] = [];
  #refusal: RefusedError | null = null;
  #state: State = "joining";
  #closed: unknown; // why nothing will come any more

  /**
   * Start a worker and wait until the publisher has let it in.
   *
   * @param deadline - how long to wait: 30 s, unless it says otherwise.
   * @throws RefusedError, TimeoutError, AddressError, or the signal's reason.
   */
  static async connect(address: string, options: WorkerOptions & Deadline): Promise<Worker> {
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
   * Start a worker. It joins in the background, whenever the publisher is there.
   *
   * @throws AddressError, RangeError, or TypeError, for an address, a name, or memory of no use.
   */
  constructor(
    readonly address: string,
    options: WorkerOptions,
  ) {
    super();
    if (endianness() !== "LE") throw new TypeError("weightbus needs a little-endian machine");
    this.name = checkName(options.name ?? defaultName(), "worker");
    this.#targets = targetsOf(options.models);
    const identity = {
      name: this.name,
      instance: randomBytes(16).toString("hex"),
      client: CLIENT,
      host: asText(hostname(), LABEL_MAX),
      pid: process.pid,
    };
    const bytesMax = options.bytesMax ?? STAGING_BYTES_MAX;
    const time = timing(options.ping, options.lostAfter);
    this.#machine = new WorkerMachine(identity, this.#targets, bytesMax, time);
    this.#loop = new WorkerLoop(checkAddress(address), this.#machine, {
      told: (effect) => this.#told(effect),
      ended: (reason) => this.#end(reason),
    });
  }

  get state(): State {
    return this.#state;
  }

  /** The publisher's epoch; 0 before the first session. */
  get epoch(): number {
    return this.#machine.epoch;
  }

  /** Return what a model runs; null before its first version. */
  running(model: string): Running | null {
    return this.#machine.running(model);
  }

  /**
   * Wait until the publisher has let this worker in.
   *
   * @throws RefusedError, TimeoutError, ClosedError, or the signal's reason.
   */
  async joined(deadline: Deadline = {}): Promise<void> {
    this.#checkOpen();
    if (this.#state === "joined") return;
    if (this.#refusal !== null) throw this.#refusal;
    const { timeout = JOIN_MS, signal } = deadline;
    await this.#joiners.wait({ timeout, signal }, (waiter) => {
      const text = `no publisher answered at ${this.address} within ${timeout} ms: is one there?`;
      waiter.reject(new TimeoutError(text));
    });
  }

  /**
   * Apply the newest version that has arrived, waiting for one if need be.
   *
   * @returns what was applied; undefined if nothing came before the timeout.
   * @throws ApplyError, RefusedError (see above), ClosedError, or the signal's reason.
   */
  async receive(deadline: Deadline = {}): Promise<Update | undefined> {
    deadline.signal?.throwIfAborted();
    if (this.#receivers.any) return this.#wait(deadline); // after those who came before
    const update = this.#applyNext();
    if (update !== null) return update;
    const error = this.#errors.shift();
    if (error !== undefined) throw error;
    this.#checkOpen();
    return this.#wait(deadline);
  }

  #wait(deadline: Deadline): Promise<Update | undefined> {
    return this.#receivers.wait(deadline, (waiter) => waiter.resolve(undefined));
  }

  /** Receive until the worker is closed. Leaving the loop does not close it. */
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

  /** Say goodbye and close the connections. Calling it twice is fine. */
  async close(): Promise<void> {
    this.#loop.close();
    this.#end(undefined);
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  // What the loop tells.

  #told(effect: Told): void {
    switch (effect.do) {
      case "ready":
        this.#ready.add(effect.model);
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
      case "rejected": {
        const { model, epoch, version, code, text } = effect;
        this.#fail(new ApplyError(model, epoch, version, code, text));
        break;
      }
      case "notice":
        this.#emit("notice", effect.code, effect.text);
    }
  }

  /** Listeners are the user's code: what they throw is no concern of the loop's. */
  #emit<K extends keyof WorkerEvents>(event: K, ...words: WorkerEvents[K]): void {
    process.nextTick(() => (this as EventEmitter).emit(event, ...words));
  }

  #enter(epoch: number): void {
    this.#state = "joined";
    this.#refusal = null;
    this.#errors = this.#errors.filter((error) => !(error instanceof RefusedError));
    for (const joiner of this.#joiners.all()) joiner.resolve();
    this.#emit("joined", epoch);
  }

  #refuse(code: string, text: string): void {
    this.#state = "refused";
    if (this.#refusal?.code === code && this.#refusal.reason === text) return; // said again
    const words = `the publisher at ${this.address} refuses worker ${this.name} (${code}): ${text}`;
    this.#refusal = new RefusedError(code, text, words);
    for (const joiner of this.#joiners.all()) joiner.reject(this.#refusal);
    if (this.listenerCount("refused") > 0) this.#emit("refused", this.#refusal);
    else this.#throwLater(this.#refusal);
  }

  #fail(error: ApplyError): void {
    if (this.listenerCount("failed") > 0) this.#emit("failed", error);
    else this.#throwLater(error);
  }

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

  #serve(): void {
    for (let receiver = this.#receivers.next(); receiver; receiver = this.#receivers.next()) {
      try {
        const update = this.#applyNext();
        if (update === null) return;
        receiver.resolve(update);
      } catch (error) {
        receiver.reject(error);
      }
    }
  }

  /** Apply the version that waits for longest; null if there is none. */
  #applyNext(): Update | null {
    for (const model of this.#ready) {
      this.#ready.delete(model);
      const update = this.#apply(model);
      if (update !== null) return update;
    }
    return null;
  }

  /** All of it happens in one turn of the event loop: nobody else can see half of it. */
  #apply(model: string): Update | null {
    const target = this.#targets.get(model);
    if (target === undefined || this.#state === "closed") return null;
    const staged = this.#machine.taken(model);
    if (staged === null) return null;
    const { epoch, version, digest, layout } = staged;
    let tensors: Update["tensors"];
    try {
      tensors = target.apply(staged);
    } catch (error) {
      this.#loop.perform(this.#machine.failed(model, String(error), now()));
      return null;
    }
    this.#loop.perform(this.#machine.applied(model, now(), target.keeps));
    return { model, epoch, version, digest, tensors, metadata: layout.metadata };
  }
}

function targetsOf(models: WorkerOptions["models"]): Map<string, Target> {
  const entries: [string, Registered | "snapshot"][] = Array.isArray(models)
    ? models.map((model) => [model, "snapshot"])
    : Object.entries(models);
  if (entries.length < 1 || entries.length > MODELS_MAX) {
    throw new RangeError(`${entries.length} models; a worker takes 1 to ${MODELS_MAX}`);
  }
  const targets = new Map<string, Target>();
  for (const [model, into] of entries) {
    const target = into === "snapshot" ? new SnapshotTarget() : new RegisteredTarget(into);
    targets.set(checkName(model, "model"), target);
  }
  return targets;
}

function defaultName(): string {
  const host = hostname()
    .replace(/[^A-Za-z0-9._-]/g, "-")
    .slice(0, 80);
  return `${host}-${process.pid}-${randomBytes(3).toString("hex")}`;
}
