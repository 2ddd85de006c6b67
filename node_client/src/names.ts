/**
 * The publisher's host by its name: whether the system finds an address, told where nothing connects.
 *
 * ZeroMQ looks names up by itself, and says nothing where it finds none. So they are asked for here
 * once more.
 */

import { lookup } from "node:dns/promises";
import { isIP } from "node:net";

const PATIENCE_MS = 2_000; // without a session, after which the name is looked up
const AGAIN_MS = 1_000; // between two look-ups
const NEWS_MS = 60_000; // after which the same is told again

export type Resolve = (host: string) => Promise<unknown>;

export class Names {
  readonly #host: string;
  readonly #resolve: Resolve;
  #since: number | null = null; // there is no session
  #asked = false; // and not answered
  #why: string | null = null; // what came of the last look-up; null: it was found, or never asked for
  #due = 0;
  #told = Number.NEGATIVE_INFINITY;

  constructor(address: string, resolve: Resolve = lookup) {
    const host = /^tcp:\/\/(.*):\d+$/.exec(address)?.[1] ?? "";
    this.#host = host.startsWith("[") || isIP(host) !== 0 ? "" : host;
    this.#resolve = resolve;
  }

  /**
   * Return why the host is not found, once in a while; else null.
   *
   * @param inside - there is a session, so it was found.
   */
  process_events(inside: boolean, now: number): string | null {
    if (inside || this.#host === "") {
      this.#since = this.#why = null;
      return null;
    }
    this.#since ??= now;
    if (now < this.#since + PATIENCE_MS) return null;
    if (!this.#asked && now >= this.#due) this.#ask(now);
    const silent = this.#asked && now >= this.#due - AGAIN_MS + PATIENCE_MS;
    const why = silent ? "its name server does not answer" : this.#why;
    if (why === null || now < this.#told + NEWS_MS) return null;
    this.#told = now;
    return (
      `no address of the publisher's host ${JSON.stringify(this.#host)} is found (${why}): check ` +
      "the name, and the name service of this host or container; it is looked up again and again"
    );
  }

  #ask(now: number): void {
    this.#asked = true;
    this.#due = now + AGAIN_MS;
    const answered = (why: string | null) => {
      this.#asked = false;
      this.#why = why;
    };
    this.#resolve(this.#host).then(
      () => answered(null),
      (error) => answered((error as Error).message),
    );
  }
}
