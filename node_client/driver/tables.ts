/**
 * Lists the tables of phases by name, and changes one transition if the environment asks for it.
 *
 * `WEIGHTBUS_FLIP="version arriving whole dropped"` changes the phase to which a transition leads;
 * without the last word it removes the transition. Each such change must fail a test
 * (`tests/protocol/flip_arrows.py` at the root).
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

const [table = "", state = "", event = "", wrong] = process.env.WEIGHTBUS_FLIP?.split(" ") ?? [];
const arrows = TABLES[table]?.[state] ?? {};
delete arrows[event];
if (wrong !== undefined) arrows[event] = wrong;
