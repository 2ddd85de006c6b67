/** What a machine wants done. `loop.ts` does it; tests look at it. */

import type { WorkerMessage } from "./messages.js";
import type { Patching } from "./patching.js";

export type Effect =
  /** Send a message to the publisher. */
  | { readonly do: "send"; readonly message: WorkerMessage }
  /** Take published messages from this endpoint, in place of any before, by this ticket if any. */
  | { readonly do: "connect"; readonly endpoint: string; readonly ticket: string }
  /** Make both connections anew: those that there are may lead nowhere. */
  | { readonly do: "redial" }
  /** Ask for a topic, or no longer. */
  | { readonly do: "subscribe"; readonly topic: string; readonly on: boolean }
  /** Have the kernel find the pages of fresh memory while it is unused: the first version is faster. */
  | { readonly do: "touch"; readonly memory: Uint8Array; readonly unused: () => boolean }
  /** Decode a patch that is here, and tell the machine what came of it. */
  | { readonly do: "decode"; readonly job: Patching }
  /** A version of a model waits to be applied. */
  | { readonly do: "ready"; readonly model: string }
  /** A version cannot be taken; if `intact`, what ran before still runs, else nothing does. */
  | {
      readonly do: "rejected";
      readonly model: string;
      readonly epoch: number;
      readonly version: number;
      readonly code: string;
      readonly text: string;
      readonly intact: boolean;
    }
  /** The publisher has let this worker in. */
  | { readonly do: "joined"; readonly epoch: number }
  /** The publisher is silent. */
  | { readonly do: "lost" }
  /** The publisher refuses this worker, which goes on asking. */
  | { readonly do: "refused"; readonly code: string; readonly text: string }
  /** The publisher says something that its user should know. */
  | { readonly do: "notice"; readonly code: string; readonly text: string };

export function send(message: WorkerMessage): Effect {
  return { do: "send", message };
}
