/**
 * The tables of phases, by what they are of.
 *
 * `WEIGHTBUS_FLIP="version arriving whole dropped"` leads an arrow elsewhere, or takes it away if it
 * leads nowhere: tests must notice (`tests/protocol/flip_arrows.py` at the root).
 */

import { ARROWS, COMING, LACKS, MODES, SESSIONS } from "../src/phases.js";

export const TABLES: Record<string, Record<string, Record<string, string>>> = {
  version: ARROWS,
  announced: LACKS,
  arriving: COMING,
  model: MODES,
  worker: SESSIONS,
};

const [of = "", state = "", event = "", wrong] = process.env.WEIGHTBUS_FLIP?.split(" ") ?? [];
const arrows = TABLES[of]?.[state] ?? {};
delete arrows[event];
if (wrong !== undefined) arrows[event] = wrong;
