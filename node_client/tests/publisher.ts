/** Drives a publisher in a process of its own: `publisher.py`, with the Python that runs this bus. */

import { type ChildProcess, spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { createInterface } from "node:readline";

const ROOT = new URL("../../../", import.meta.url).pathname;
const SCRIPT = `${ROOT}node_client/tests/publisher.py`;
export const PYTHON = process.env.WEIGHTBUS_PYTHON ?? `${ROOT}.venv/bin/python`;

/** Why tests with a publisher cannot run here; false if they can. */
export const NO_PUBLISHER = existsSync(PYTHON)
  ? false
  : `there is no ${PYTHON}: run make at the root, or set WEIGHTBUS_PYTHON`;

type Answer = Record<string, unknown>;

export interface Options {
  /** A folder of keys. */
  readonly keys?: string;
  /** Whose keys to make there first. */
  readonly names?: readonly string[];
  /** Seconds after which another group key takes the place of one. */
  readonly rekey?: number;
  readonly chunk_bytes?: number;
}

export class Publisher implements AsyncDisposable {
  private constructor(
    readonly process: ChildProcess,
    readonly lines: AsyncIterator<string>,
    readonly address: string,
    readonly epoch: number,
  ) {}

  static start(address = "tcp://127.0.0.1:0", options: Options = {}): Promise<Publisher> {
    return Publisher.#run([SCRIPT, address, JSON.stringify(options)]);
  }

  /** Start a publisher with two relays; `address` has those of the relays, with a comma between. */
  static relays(): Promise<Publisher> {
    return Publisher.#run(["-m", "weightbus.tests.relay.steered"]);
  }

  static async #run(args: readonly string[]): Promise<Publisher> {
    const python = spawn(PYTHON, args, { stdio: ["pipe", "pipe", "inherit"] });
    const lines = createInterface({ input: python.stdout })[Symbol.asyncIterator]();
    const hello = JSON.parse(String((await lines.next()).value));
    return new Publisher(python, lines, hello.address, hello.epoch);
  }

  async ask(command: Answer): Promise<Answer> {
    this.process.stdin?.write(`${JSON.stringify(command)}\n`);
    const answer = JSON.parse(String((await this.lines.next()).value)) as Answer;
    if ("error" in answer) throw new Error(String(answer.error));
    return answer;
  }

  /** Publish tensors whose every element is `value`. */
  publish(value: number, how: Answer = {}, shapes: Answer = { w: [2, 3], b: [] }): Promise<Answer> {
    return this.ask({ do: "publish", model: "m", shapes, value, how });
  }

  /** Publish `w`, 300,000 floats of 16 bits, of which each step has changed one in a hundred. */
  publishTrained(steps: number, how: Answer = { encoding: "delta" }): Promise<Answer> {
    const shapes = { w: [300_000] };
    return this.ask({ do: "publish", model: "m", shapes, value: 1, dtype: "float16", steps, how });
  }

  /** Wait until so many workers have joined. */
  workers(count: number): Promise<Answer> {
    return this.ask({ do: "wait", count });
  }

  /** End the process, as a crash does. */
  async kill(): Promise<void> {
    const ended = new Promise((resolve) => this.process.once("exit", resolve));
    if (this.process.kill("SIGKILL")) await ended;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill();
  }
}
