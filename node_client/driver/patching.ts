/** How long a patch takes to apply, for `benchmarks/deltas.py`. */

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { Layout } from "../src/layout.js";
import { Patch } from "../src/patch.js";

/** Return the least seconds of some rounds: for the blocks alone, and with the target's digest. */
export function patching(folder: string, rounds: number): { blocks: number; digest: number } {
  const [header, base, bytes] = ["layout", "base", "patch"].map((name) =>
    readFileSync(join(folder, name)),
  ) as [Buffer, Buffer, Buffer];
  const layout = Layout.parse(header);
  const seconds = (digest: boolean): number => {
    const data = Uint8Array.from(base);
    const begun = performance.now();
    const patch = new Patch(layout, bytes);
    if (digest) patch.apply(data, patch.base);
    else patch.put(data);
    return (performance.now() - begun) / 1000;
  };
  const best = (digest: boolean): number =>
    Math.min(...Array.from({ length: rounds }, () => seconds(digest)));
  return { blocks: best(false), digest: best(true) };
}
