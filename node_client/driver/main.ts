/**
 * Runs the vectors or a worker for the conformance suite (tests/conformance/README.md at the root).
 *
 *     driver vectors DIR
 *     driver worker ADDRESS --name NAME --models m1,m2 [--in-place SPEC.json] [--no-tensors]
 *         [--bytes-max N] [--network] [--loop-delay] [--seconds S]
 *         [--turn-down N,...] [--break N,...] [--apply-seconds S[:N,...]] [--apply-timeout S]
 *         [--partial] [--cast] [--keys FILE]
 */

import { parseArgs } from "node:util";
import { numbers } from "./part.js";
import { vectors } from "./vectors.js";
import { worker } from "./worker.js";

const { positionals, values } = parseArgs({
  allowPositionals: true,
  options: {
    name: { type: "string" },
    models: { type: "string" },
    "in-place": { type: "string" },
    "no-tensors": { type: "boolean", default: false },
    "bytes-max": { type: "string" },
    network: { type: "boolean", default: false }, // no effect: this client has no other transport
    "loop-delay": { type: "boolean", default: false },
    seconds: { type: "string", default: "120" },
    "turn-down": { type: "string" },
    break: { type: "string" },
    "apply-seconds": { type: "string", default: "0" },
    "apply-timeout": { type: "string" },
    partial: { type: "boolean", default: false },
    cast: { type: "boolean", default: false },
    keys: { type: "string" },
  },
});

const [command, argument] = positionals;
if (command === "vectors" && argument !== undefined) {
  for (const line of vectors(argument)) console.log(JSON.stringify(line));
} else if (command === "worker" && argument !== undefined) {
  await worker(argument, {
    name: values.name,
    models: (values.models ?? "").split(",").filter(Boolean),
    inPlace: values["in-place"],
    tensors: !values["no-tensors"],
    bytesMax: values["bytes-max"] === undefined ? undefined : Number(values["bytes-max"]),
    part: {
      turnDown: numbers(values["turn-down"]),
      breaks: numbers(values.break),
      seconds: values["apply-seconds"],
    },
    applyTimeout:
      values["apply-timeout"] === undefined ? undefined : Number(values["apply-timeout"]),
    partial: values.partial,
    cast: values.cast,
    keys: values.keys,
    loopDelay: values["loop-delay"],
    seconds: Number(values.seconds),
  });
} else {
  console.error("usage: driver vectors DIR | driver worker ADDRESS --name NAME --models m1,m2");
  process.exitCode = 2;
}
