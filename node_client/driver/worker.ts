/** A worker that tells on standard output what happens to it, one JSON line each. */

import { readFileSync } from "node:fs";
import { type IntervalHistogram, monitorEventLoopDelay } from "node:perf_hooks";
import { setTimeout as passed } from "node:timers/promises";
import { crc32c } from "../src/checksum.js";
import { type Update, Worker } from "../src/index.js";
import { bytesOf } from "../src/tensor.js";
import { memory } from "./memory.js";
import { type PartOptions, part } from "./part.js";

const LOOK_MS = 100; // between two looks at what runs
const TURN_MS = 3; // in which a timer of 1 ms has fired

export interface Options {
  readonly name: string | undefined;
  readonly models: readonly string[];
  readonly inPlace: string | undefined;
  readonly tensors: boolean;
  readonly bytesMax: number | undefined;
  readonly loopDelay: boolean;
  readonly part: PartOptions;
  readonly applyTimeout: number | undefined; // seconds
  readonly partial: boolean;
  readonly cast: boolean;
  readonly keys: string | undefined;
  readonly seconds: number;
}

/** Apply whatever comes until SIGTERM, or until the time is over. */
export async function worker(address: string, options: Options): Promise<void> {
  const { name, models, inPlace, bytesMax } = options;
  const registered = inPlace === undefined ? {} : memory(JSON.parse(readFileSync(inPlace, "utf8")));
  const targets = Object.fromEntries(models.map((m) => [m, registered[m] ?? "snapshot"] as const));
  const stopped = new AbortController();
  const worker = new Worker(address, {
    ...part(options.part, (model) => model in registered, stopped.signal),
    applyTimeout: options.applyTimeout && options.applyTimeout * 1000,
    name,
    models: targets,
    strict: !options.partial,
    cast: options.cast,
    keys: options.keys,
    bytesMax,
  });
  const stop = () => {
    stopped.abort();
    void worker.close();
  };
  process.once("SIGTERM", stop);
  const timer = setTimeout(stop, options.seconds * 1000);
  worker.on("joined", (epoch) => say({ event: "joined", epoch }));
  worker.on("lost", () => say({ event: "lost" }));
  worker.on("refused", ({ code, reason }) => say({ event: "refused", code, text: reason }));
  worker.on("failed", ({ model, epoch, version, code, reason }) =>
    say({ event: "failed", model, epoch, version, code, text: reason }),
  );
  worker.on("notice", (code, text) => console.error(`${code}: ${text}`));
  const told = new Map<string, string>(); // what was said to run, by model
  const looking = setInterval(() => look(worker, models, told), LOOK_MS);
  const delays = monitorEventLoopDelay({ resolution: 1 });
  if (options.loopDelay) delays.enable();
  for await (const update of worker) {
    const { model, epoch, version, digest } = update;
    told.set(model, keyOf(update));
    const tensors = options.tensors ? { tensors: checksums(update) } : {};
    const metadata = Object.fromEntries(update.metadata);
    const row = { event: "applied", model, epoch, version, digest, metadata, ...tensors };
    if (!options.loopDelay) say(row);
    else void longest(delays).then((delay_ms) => say({ ...row, delay_ms })); // the next may be here
  }
  delays.disable();
  clearTimeout(timer);
  clearInterval(looking);
  process.off("SIGTERM", stop);
}

/** Say what runs by another name than was said last. */
function look(worker: Worker, models: readonly string[], told: Map<string, string>): void {
  for (const model of models) {
    const runs = worker.running(model);
    if (runs === null || keyOf(runs) === told.get(model)) continue;
    told.set(model, keyOf(runs));
    const { epoch, version } = runs;
    say({ event: "runs", model, epoch, version, metadata: Object.fromEntries(runs.metadata) });
  }
}

function keyOf({ epoch, version }: { epoch: number; version: number }): string {
  return `${epoch}/${version}`;
}

/** Return the longest delay so far, in milliseconds, that of this turn of the loop included. */
async function longest(delays: IntervalHistogram): Promise<number> {
  await passed(TURN_MS); // only a timer that fires late tells of a delay
  const found = delays.max / 1e6;
  delays.reset();
  return found;
}

function say(row: object): void {
  process.stdout.write(`${JSON.stringify(row)}\n`);
}

/** Return the CRC-32C of every tensor's memory, each once: an alias has the memory of another. */
function checksums({ tensors, aliases }: Update): Record<string, number> {
  const rows = [...tensors].filter(([name]) => !aliases.has(name));
  return Object.fromEntries(rows.map(([name, tensor]) => [name, crc32c(bytesOf(tensor))]));
}
