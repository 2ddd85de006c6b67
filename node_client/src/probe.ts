/** Finds out whether a publisher answers at an address, without joining it. */

import { connect } from "node:net";
import type { Destination } from "./endpoints.js";
import { PROBE_MS } from "./limits.js";
import { SIGNATURE } from "./zmtp.js";

/**
 * Return whether a ZMTP peer greets at an address, within `PROBE_MS`. Nothing but the beginning of
 * the greeting is exchanged.
 */
export function answers(destination: Destination, signal: AbortSignal): Promise<boolean> {
  return new Promise((resolve) => {
    const within = AbortSignal.any([signal, AbortSignal.timeout(PROBE_MS)]);
    const socket = connect({ ...destination, signal: within }, () => socket.write(SIGNATURE));
    let greeted = false;
    socket.once("data", ([first]) => {
      greeted = first === SIGNATURE[0];
      socket.destroy();
    });
    socket.on("error", () => {}); // `close` follows
    socket.once("close", () => resolve(greeted));
  });
}
