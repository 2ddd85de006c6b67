/** Defines the effects that `WorkerMachine` returns, and that `loop.ts` carries out. */

import type { WorkerMessage } from "./messages.js";
import type { Patching } from "./patching.js";

export type Effect =
  /** Send a message to the publisher. */
  | { readonly do: "send"; readonly message: WorkerMessage }
  /** Connect to this data endpoint instead of the current one, with `ticket` unless it is empty. */
  | { readonly do: "connect"; readonly endpoint: string; readonly ticket: string }
  /** Reconnect both channels: the current connections may be dead. */
  | { readonly do: "redial" }
  /** Subscribe to a topic, or unsubscribe if `on` is false. */
  | { readonly do: "subscribe"; readonly topic: string; readonly on: boolean }
  /** Prefault new memory, as long as `unused` returns true, so that the first version arrives faster. */
  | { readonly do: "touch"; readonly memory: Uint8Array; readonly unused: () => boolean }
  /** Decode a patch, and pass the outcome to the machine. */
  | { readonly do: "decode"; readonly job: Patching }
  /** One version of each of these models is ready; the versions are to be applied together. */
  | { readonly do: "ready"; readonly models: readonly string[] }
  /**
   * A version cannot be applied. If `intact`, the previous version still runs; otherwise none does.
   */
  | {
      readonly do: "rejected";
      readonly model: string;
      readonly epoch: number;
      readonly version: number;
      readonly code: string;
      readonly text: string;
      readonly intact: boolean;
    }
  /** The publisher has accepted the worker. */
  | { readonly do: "joined"; readonly epoch: number }
  /** The publisher no longer responds. */
  | { readonly do: "lost" }
  /** The publisher refused the worker, which keeps trying to join. */
  | { readonly do: "refused"; readonly code: string; readonly text: string }
  /** An event that the user should know about. */
  | { readonly do: "notice"; readonly code: string; readonly text: string };

export function send(message: WorkerMessage): Effect {
  return { do: "send", message };
}
