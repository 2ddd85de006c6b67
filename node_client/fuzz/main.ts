/**
 * Fuzzes everything that reads what others wrote, until the time is over.
 *
 *     node dist/fuzz/main.js [--seconds 20] [--seed N] [--only machine]
 *
 * Prints how many cases ran. A finding is printed with its seed, as small as it could be made, and
 * the exit status is 1.
 */

import { parseArgs } from "node:util";
import fc from "fast-check";
import { targets } from "./targets.js";

const ROUND = 200; // cases before the next target gets its turn

const { values } = parseArgs({
  options: {
    seconds: { type: "string", default: "20" },
    seed: { type: "string", default: String(Date.now() % 2 ** 31) },
    only: { type: "string" },
  },
});
const chosen = Object.entries(targets).filter(([name]) => (values.only ?? name) === name);
if (chosen.length === 0) throw new Error(`--only is one of ${Object.keys(targets).join(", ")}`);

const end = performance.now() + Number(values.seconds) * 1000;
const ran = new Map(chosen.map(([name]) => [name, 0]));
for (let seed = Number(values.seed); performance.now() < end; seed = (seed + 1) | 0) {
  for (const [name, property] of chosen) {
    const run = fc.check(property as fc.IProperty<unknown>, { seed, numRuns: ROUND });
    ran.set(name, (ran.get(name) ?? 0) + run.numRuns);
    if (!run.failed) continue;
    console.error(fc.defaultReportMessage(run as Parameters<typeof fc.defaultReportMessage>[0]));
    console.error(`found by: node dist/fuzz/main.js --only ${name} --seed ${seed}`);
    process.exit(1);
  }
}
for (const [name, cases] of ran) console.log(`${name}: ${cases} cases, nothing found`);
