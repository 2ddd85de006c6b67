/**
 * A worker in a process of its own, so that what it takes can be measured.
 *
 *     node victim.js ADDRESS OPTIONS
 *
 * With the option `small` it has memory of 16 bytes, else it takes snapshots. It tells its parent what happens to it, and a few times a second how much memory it has had at most
 * and for how long its event loop stood still.
 */

import { readFileSync } from "node:fs";
import { monitorEventLoopDelay } from "node:perf_hooks";
import { Worker } from "../src/index.js";

const LOOK_MS = 50;

/** What the process tells. */
export type Told =
  | { readonly memory: number; readonly stood: number }
  | { readonly event: string; readonly text: string };

/** The most memory that this process has had. (`maxRSS` has that of its parent in it, too.) */
function peak(): number {
  const status = readFileSync("/proc/self/status", "utf8");
  return Number(/^VmHWM:\s+(\d+) kB$/m.exec(status)?.[1]) * 1024;
}

const [address = "", options = "{}"] = process.argv.slice(2);
const delay = monitorEventLoopDelay({ resolution: 5 });
delay.enable();
const tell = (told: Told) => process.send?.(told);
setInterval(() => {
  tell({ memory: peak(), stood: delay.max / 1e6 });
}, LOOK_MS);
process.on("disconnect", () => process.exit());
const { small, ...others } = JSON.parse(options);
const models = small ? { m: { w: new Float32Array(4) } } : ["m"];
const worker = new Worker(address, { models, ...others });
worker.on("joined", () => tell({ event: "joined", text: "" }));
worker.on("lost", () => tell({ event: "lost", text: "" }));
worker.on("refused", (error) => tell({ event: "refused", text: error.message }));
worker.on("failed", (error) => tell({ event: "failed", text: error.message }));
worker.on("notice", (code, text) => tell({ event: code, text }));
for await (const update of worker) tell({ event: "applied", text: String(update.version) });
