/**
 * A worker that predicts with the newest weights, and says which version it runs.
 *
 *     worker tcp://localhost:5555 --name n0    (or several addresses, separated by commas)
 */

import { parseArgs } from "node:util";
import { tensor, Worker } from "weightbus";

const { positionals, values } = parseArgs({
  allowPositionals: true,
  options: {
    name: { type: "string" },
    patience: { type: "string", default: "30" }, // seconds without a version
  },
});
const [address] = positionals;
const patience = Number(values.patience) * 1000;
if (address === undefined || !(patience > 0)) {
  console.error("usage: worker ADDRESS [--name N] [--patience SECONDS]");
  process.exit(2);
}

const slope = new Float32Array(3);
const offset = new Float32Array(1);
const line = { slope, offset: tensor(offset, []) };
const stopped = new AbortController();
process.once("SIGTERM", () => stopped.abort());

const worker = new Worker(address, { models: { line }, name: values.name });
try {
  for (;;) {
    const update = await worker.receive({ timeout: patience, signal: stopped.signal });
    if (update === undefined) break;
    const [a = 0, b = 0, c = 0] = slope;
    const prediction = Number((a + 2 * b + 3 * c + (offset[0] ?? 0)).toFixed(4));
    const { version, digest } = update;
    console.log(JSON.stringify({ worker: worker.name, version, prediction, digest }));
  }
} catch (error) {
  if (!stopped.signal.aborted) throw error;
} finally {
  await worker.close();
}
