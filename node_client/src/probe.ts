/** Finds out whether a publisher answers at an address, without joining that publisher. */

import { connect } from "node:net";
import type { Destination } from "./endpoints.js";
import { PROBE_MS } from "./limits.js";
import { SIGNATURE } from "./zmtp.js";

/**
 * Return whether a peer at an address begins a ZMTP greeting within `PROBE_MS`. Only the beginning
 * of the greeting is exchanged.
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
