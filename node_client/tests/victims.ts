/** Starts `victim.ts`, and keeps what it tells. */

import { type ChildProcess, fork } from "node:child_process";
import { EventEmitter, once } from "node:events";
import type { Told } from "./victim.js";

const PROGRAM = new URL("./victim.js", import.meta.url);

/** A worker in a process of its own. */
export class Victim implements Disposable {
  readonly #events: (readonly [event: string, text: string])[] = [];
  readonly #process: ChildProcess;
  #memory = 0;
  #stood = 0;
  #looked = 0;
  readonly #news = new EventEmitter();

  constructor(address: string, options: object = {}) {
    this.#process = fork(PROGRAM, [address, JSON.stringify(options)]);
    this.#process.on("message", (told: Told) => {
      if ("event" in told) this.#events.push([told.event, told.text]);
      else {
        this.#memory = told.memory;
        this.#stood = told.stood;
        this.#looked += 1;
      }
      this.#news.emit("told");
    });
    this.#process.on("exit", () => this.#news.emit("told"));
  }

  get alive(): boolean {
    return this.#process.exitCode === null && this.#process.signalCode === null;
  }

  get events(): readonly (readonly [event: string, text: string])[] {
    return this.#events;
  }

  /** The most memory that it has had, once it has looked again. */
  async memory(): Promise<number> {
    const looks = this.#looked + 2; // one may be on its way
    await this.until(() => this.#looked >= looks);
    return this.#memory;
  }

  /** For how long its event loop stood still at most, in milliseconds. */
  get stood(): number {
    return this.#stood;
  }

  /** Wait for an event, and return its text. */
  async tells(event: string): Promise<string> {
    const find = () => this.#events.find(([told]) => told === event);
    await this.until(() => find() !== undefined);
    return find()?.[1] ?? "";
  }

  /** Wait until something holds, which is looked at whenever it tells something. */
  async until(versions: () => boolean): Promise<void> {
    while (!versions()) {
      if (!this.alive) throw new Error(`the worker has ended: ${JSON.stringify(this.#events)}`);
      await once(this.#news, "told");
    }
  }

  [Symbol.dispose](): void {
    this.#process.kill("SIGKILL");
  }
}
