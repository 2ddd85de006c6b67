/** Runs a worker that prints each of its events as a line of JSON. */

import { readFileSync } from "node:fs";
import { type IntervalHistogram, monitorEventLoopDelay } from "node:perf_hooks";
import { setTimeout as sleep } from "node:timers/promises";
import { crc32c } from "../src/checksum.js";
import { type Update, Worker } from "../src/index.js";
import { bytesOf } from "../src/tensor.js";
import { memory } from "./memory.js";
import { type PartOptions, part } from "./part.js";

const LOOK_MS = 100; // between two checks of which versions run
const TURN_MS = 3; // long enough for a timer of 1 ms to fire

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

/** Apply all versions that arrive until SIGTERM, or for `options.seconds`. */
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
  worker.on("joined", (epoch) => print({ event: "joined", epoch }));
  worker.on("lost", () => print({ event: "lost" }));
  worker.on("refused", ({ code, reason }) => print({ event: "refused", code, text: reason }));
  worker.on("failed", ({ model, epoch, version, code, reason }) =>
    print({ event: "failed", model, epoch, version, code, text: reason }),
  );
  worker.on("notice", (code, text) => console.error(`${code}: ${text}`));
  const reported = new Map<string, string>(); // by model, the key that was last reported as running
  const looking = setInterval(() => reportRenamed(worker, models, reported), LOOK_MS);
  const delays = monitorEventLoopDelay({ resolution: 1 });
  if (options.loopDelay) delays.enable();
  for await (const update of worker) {
    const { model, epoch, version, digest } = update;
    reported.set(model, keyOf(update));
    const tensors = options.tensors ? { tensors: checksums(update) } : {};
    const metadata = Object.fromEntries(update.metadata);
    const row = { event: "applied", model, epoch, version, digest, metadata, ...tensors };
    if (!options.loopDelay) print(row);
    else void longest(delays).then((delay_ms) => print({ ...row, delay_ms })); // do not delay the next update
  }
  delays.disable();
  clearTimeout(timer);
  clearInterval(looking);
  process.off("SIGTERM", stop);
}

/** Report the running versions whose keys have changed since the last report. */
function reportRenamed(worker: Worker, models: readonly string[], reported: Map<string, string>) {
  for (const model of models) {
    const runs = worker.running(model);
    if (runs === null || keyOf(runs) === reported.get(model)) continue;
    reported.set(model, keyOf(runs));
    const { epoch, version } = runs;
    print({ event: "runs", model, epoch, version, metadata: Object.fromEntries(runs.metadata) });
  }
}

function keyOf({ epoch, version }: { epoch: number; version: number }): string {
  return `${epoch}/${version}`;
}

/** Return the event loop's longest delay since the last call, in milliseconds, with this turn. */
async function longest(delays: IntervalHistogram): Promise<number> {
  await sleep(TURN_MS); // a delay is recorded only when a late timer fires
  const found = delays.max / 1e6;
  delays.reset();
  return found;
}

function print(row: object): void {
  process.stdout.write(`${JSON.stringify(row)}\n`);
}

/** Return the CRC-32C of each tensor, without aliases, which share a tensor's memory. */
function checksums({ tensors, aliases }: Update): Record<string, number> {
  const rows = [...tensors].filter(([name]) => !aliases.has(name));
  return Object.fromEntries(rows.map(([name, tensor]) => [name, crc32c(bytesOf(tensor))]));
}
