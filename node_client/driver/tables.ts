/**
 * The tables of phases, by what they are of.
 *
 * `WEIGHTBUS_FLIP="version arriving whole dropped"` leads an arrow elsewhere, or takes it away if it
 * leads nowhere: tests must notice (`tests/protocol/flip_arrows.py` at the root).
 */

import {
  ANNOUNCED_ARROWS,
  ARRIVING_ARROWS,
  MODEL_ARROWS,
  SESSION_ARROWS,
  VERSION_ARROWS,
} from "../src/phases.js";

export const TABLES: Record<string, Record<string, Record<string, string>>> = {
  version: VERSION_ARROWS,
  announced: ANNOUNCED_ARROWS,
  arriving: ARRIVING_ARROWS,
  model: MODEL_ARROWS,
  worker: SESSION_ARROWS,
};

const [of = "", state = "", event = "", wrong] = process.env.WEIGHTBUS_FLIP?.split(" ") ?? [];
const arrows = TABLES[of]?.[state] ?? {};
delete arrows[event];
if (wrong !== undefined) arrows[event] = wrong;
