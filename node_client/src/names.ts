/**
 * Finds out, while there is no session, whether the publisher's host name has no address.
 *
 * ZeroMQ does not report a failed name lookup, so this module looks up the name itself.
 */

import { lookup } from "node:dns/promises";
import { isIP } from "node:net";

const PATIENCE_MS = 2_000; // without a session, before the first lookup; then for each lookup
const AGAIN_MS = 1_000; // between two lookups
const NEWS_MS = 60_000; // between two reports

export type Resolve = (host: string) => Promise<unknown>;

export class Names {
  readonly #host: string;
  readonly #resolve: Resolve;
  #since: number | null = null; // since when there is no session
  #pending = false; // a lookup is in progress
  #why: string | null = null; // error of the last lookup; null if it succeeded, or there was none
  #due = 0; // when the next lookup may start
  #reportedAt = Number.NEGATIVE_INFINITY;

  constructor(address: string, resolve: Resolve = lookup) {
    const host = /^tcp:\/\/(.*):\d+$/.exec(address)?.[1] ?? "";
    this.#host = host.startsWith("[") || isIP(host) !== 0 ? "" : host;
    this.#resolve = resolve;
  }

  /**
   * Start a lookup if one is due. Return the text of a report if the host has no address and a
   * report is due, else null.
   *
   * @param inside - whether there is a session: then the host has an address.
   */
  poll(inside: boolean, now: number): string | null {
    if (inside || this.#host === "") {
      this.#since = this.#why = null;
      return null;
    }
    this.#since ??= now;
    if (now < this.#since + PATIENCE_MS) return null;
    if (!this.#pending && now >= this.#due) this.#lookUp(now);
    const silent = this.#pending && now >= this.#due - AGAIN_MS + PATIENCE_MS;
    const why = silent ? "its name server does not answer" : this.#why;
    if (why === null || now < this.#reportedAt + NEWS_MS) return null;
    this.#reportedAt = now;
    return (
      `no address of the publisher's host ${JSON.stringify(this.#host)} is found (${why}): check ` +
      "the name, and the name service of this host or container; it is looked up again and again"
    );
  }

  #lookUp(now: number): void {
    this.#pending = true;
    this.#due = now + AGAIN_MS;
    const answered = (why: string | null) => {
      this.#pending = false;
      this.#why = why;
    };
    this.#resolve(this.#host).then(
      () => answered(null),
      (error) => answered((error as Error).message),
    );
  }
}
