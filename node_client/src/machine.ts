/**
 * Runs the worker's state machine, without sockets or clocks: received messages and the time go in,
 * effects (`effects.ts`) come out. Times are in milliseconds of any monotonic clock.
 *
 * The worker's session is `outside` or `inside` (`SESSION_ARROWS` of `phases.ts`; `probing` does not
 * occur, since this worker opens no shared memory). Inside, each message is passed to the follower of
 * its model (`follower.ts`). Outside, the worker keeps its staged and running versions, and repeats
 * `hello`, so that it rejoins a publisher that restarts.
 */

import { Ages } from "./ages.js";
import { TURNED_AWAY } from "./codes.js";
import { Companions } from "./companions.js";
import { type Effect, send } from "./effects.js";
import { ProtocolError } from "./errors.js";
import { Follower } from "./follower.js";
import { controlTopic, type Decoded, decode, ticketOf } from "./headers.js";
import type { Keyring } from "./keyring.js";
import type { Layout } from "./layout.js";
import type { Timing } from "./limits.js";
import type {
  Announce,
  Chunk,
  Pong,
  PublisherMessage,
  Refuse,
  Running,
  SealedChunk,
  Welcome,
} from "./messages.js";
import type { Patching } from "./patching.js";
import { SESSION_ARROWS, type SessionEvent, type SessionState } from "./phases.js";
import type { Identity } from "./reports.js";
import * as reports from "./reports.js";
import { AES_256_GCM } from "./sealing.js";
import type { StagedVersion } from "./staging.js";
import { Lease } from "./transfer.js";
import { printable } from "./words.js";

export interface Model {
  /** Returns the reason that a layout cannot be applied; empty if it can be applied. */
  readonly fault: (layout: Layout) => string;
  /** The expected size of a version in bytes; 0 if unknown. */
  readonly nbytes: number;
  /** The largest layout in bytes; by default as large as the protocol allows. */
  readonly layoutBytesMax?: number;
}

type Frames = readonly Uint8Array[];
const NO_BYTES = new Uint8Array(0);

export class WorkerMachine {
  readonly followers: ReadonlyMap<string, Follower>;
  readonly #companions: Companions;
  #session: SessionState = "outside";
  #epoch = 0;
  #malformed = 0;
  readonly #ages = new Ages();
  #data = ""; // the publisher's data endpoint
  #subscribed = false; // a published message has arrived in this session
  #heardAt = 0; // when the last message of the session was received
  #helloAt = Number.NEGATIVE_INFINITY;
  #unheardSince: number | null = null; // start of the session; null once a published message arrives
  #answeredAt = 0; // when the last control message was received
  // When hello was sent or the control connection changed; null once a control message arrives.
  #unansweredSince: number | null = null;
  #pingedAt = Number.NEGATIVE_INFINITY;
  #pingEvery: number;
  #redialAt = Number.POSITIVE_INFINITY; // when to reconnect after a refusal because of keys

  constructor(
    readonly identity: Identity,
    readonly models: ReadonlyMap<string, Model>,
    readonly bytesMax: number,
    readonly timing: Timing,
    /** Decrypts published messages; null if this worker has no keys. */
    readonly keyring: Keyring | null = null,
    /** Whether versions may be received as patches. */
    readonly patches = true,
  ) {
    this.#pingEvery = timing.ping;
    const fault = (name: string, layout: Layout) => models.get(name)?.fault(layout) ?? "";
    const follower = (name: string, { layoutBytesMax }: Model) => {
      const most = { bytesMax, layoutBytesMax };
      return new Follower(name, fault, most, timing, keyring, patches);
    };
    this.followers = new Map([...models].map(([name, model]) => [name, follower(name, model)]));
    this.#companions = new Companions(this.followers);
  }

  get epoch(): number {
    return this.#epoch;
  }

  /** How many messages were dropped since they were malformed. */
  get malformed(): number {
    return this.#malformed;
  }

  get inSession(): boolean {
    return this.#session === "inside";
  }

  /** Apply an event to the session. Return false if its state has no transition for the event. */
  #changeSession(event: SessionEvent): boolean {
    const after = SESSION_ARROWS[this.#session][event];
    this.#session = after ?? this.#session;
    return after !== undefined;
  }

  // Received messages.

  /** Process a message of the control channel. A malformed message is dropped. */
  receive(frames: Frames, now: number): Effect[] {
    return this.#receive(this.#decode(frames, true), now, false);
  }

  /** Process a published message. The first frame is the topic. */
  receivePublished(frames: Frames, now: number): Effect[] {
    if (!this.inSession) return [];
    const effects: Effect[] = [];
    if (!this.#subscribed) {
      this.#subscribed = true; // W18: the first message shows that the subscription is active
      this.#unheardSince = null;
      effects.push(reports.ping(now, this.#subscribed));
    }
    const decoded = this.#decode(frames.slice(1), true);
    return [...effects, ...this.#receive(decoded && this.#published(decoded), now, true)];
  }

  /**
   * Return a lease to receive the payload of a published message, given its topic and header in
   * `frames`, and the payload's size.
   *
   * Return null if the payload is not wanted: the caller then drops the payload, and passes the
   * message on with an empty payload.
   */
  place(frames: Frames, size: number): Lease | null {
    const decoded = this.#decode([frames[1] ?? NO_BYTES, NO_BYTES], false);
    const message = this.inSession
      ? decoded && this.#published(decoded, false)?.message
      : undefined;
    if (message?.type !== "announce" && !isChunk(message)) return null;
    const follower = message.epoch === this.#epoch ? this.followers.get(message.model) : undefined;
    if (follower === undefined) return null;
    if (message.type !== "announce") return follower.place(message, size);
    return follower.wantsAnnounced(message, size) ? new Lease(new Uint8Array(size)) : null;
  }

  /**
   * Return a lease to receive the payload of a control message, given the header. Return null if the
   * payload is not wanted.
   *
   * The lease has memory of its own, since the same chunk may arrive as a published message, and
   * is then written into the version's buffer, at the same time.
   */
  placeControl(header: Uint8Array, size: number): Lease | null {
    const message = this.inSession ? this.#decode([header, NO_BYTES], false)?.message : undefined;
    if (message?.type !== "announce" && !isChunk(message)) return null;
    const follower = message.epoch === this.#epoch ? this.followers.get(message.model) : undefined;
    const wanted =
      message.type === "announce"
        ? follower?.wantsAnnounced(message, size)
        : follower?.wantsChunk(message, size);
    return wanted ? new Lease(new Uint8Array(size)) : null;
  }

  #decode(frames: Frames, counts: boolean): Decoded | null {
    try {
      return decode(frames);
    } catch (error) {
      if (!(error instanceof ProtocolError)) throw error;
      if (counts) this.#malformed += 1; // W21
      return null;
    }
  }

  /**
   * Return a published message, decrypted if there are keys; null if it must be ignored. `counts`
   * is as for `Keyring.published`.
   */
  #published(decoded: Decoded, counts = true): Decoded | null {
    return this.keyring === null ? decoded : this.keyring.published(decoded, counts); // E1
  }

  #receive(decoded: Decoded | null, now: number, pushed: boolean): Effect[] {
    if (decoded === null) return [];
    if (!pushed) {
      this.#answeredAt = now;
      this.#unansweredSince = null;
    }
    const { message } = decoded;
    if (message.type === "ping") return [send({ type: "pong", token: message.token })]; // W18
    if (message.type === "welcome") return pushed ? [] : this.#welcome(message, now);
    if (message.type === "refuse") return this.#refuse(message, now);
    if (!this.inSession || message.type === "sealed_message") return []; // not decrypted: no keys
    // The publisher restarted, or the welcome was damaged: the next welcome has the right epoch.
    if (message.epoch !== this.#epoch) return this.hello(now); // W3
    if (this.#isStray(message, pushed)) return []; // E4
    this.#heardAt = now;
    if (message.type === "pong") return this.#answered(message, now);
    if (message.type === "rekey") {
      this.keyring?.add(message.keys, now + this.timing.lostAfter); // E6
      return [];
    }
    const follower = this.followers.get(message.model);
    const decrypted = follower && this.#decrypted(decoded);
    return decrypted ? this.#completed(dispatch(follower, decrypted, now, pushed), now) : [];
  }

  /** Append the effects on committed versions whose companions have become complete. */
  #completed(effects: readonly Effect[] | undefined, now: number): Effect[] {
    return [...(effects ?? []), ...this.#companions.complete(now)];
  }

  #answered({ token, models }: Pong, now: number): Effect[] {
    for (const follower of this.followers.values()) follower.planner.answered(token); // W12
    return this.#noteLatest(models, now);
  }

  /**
   * Whether a message is a pushed, sealed chunk of a version that is not arriving. Only the transfer
   * of an arriving version can authenticate the sender of a sealed chunk.
   */
  #isStray(message: PublisherMessage, pushed: boolean): boolean {
    if (!pushed || message.type !== "sealed_chunk") return false;
    return !this.followers.get(message.model)?.versions.find(message, "arriving");
  }

  /**
   * Return a message about a model, with the payload of an announcement decrypted. Return null if
   * the message must be ignored.
   */
  #decrypted(decoded: Decoded): Decoded | null {
    const { message, payloads } = decoded;
    if (isChunk(message)) {
      return (message.type === "sealed_chunk") === (this.keyring !== null) ? decoded : null; // E1
    }
    const [sealed] = payloads;
    if (this.keyring === null || message.type !== "announce" || !sealed) return decoded;
    if (message.encryption !== AES_256_GCM) return { message, payloads: [] }; // declined later
    const payload = this.keyring.payload(message, sealed);
    return payload && { message, payloads: [payload] }; // if null, the layout is fetched later
  }

  /** Handle the latest version of each model, as a welcome or a pong names it. */
  #noteLatest(models: ReadonlyMap<string, number>, now: number): Effect[] {
    return [...models].flatMap(([model, version]) => {
      return (
        this.followers.get(model)?.planner.noteLatest({ epoch: this.#epoch, version }, now) ?? []
      );
    });
  }

  #refuse(refuse: Refuse, now: number): Effect[] {
    const { code, model } = refuse;
    const text = printable(refuse.text);
    this.#heardAt = now;
    switch (code) {
      case "unknown-worker":
        this.#changeSession("unknown"); // W20
        return this.hello(now);
      case "gone":
      case "range": {
        // W27
        const follower = this.inSession && model !== null ? this.followers.get(model) : undefined;
        return follower?.gone(refuse, now) ?? [{ do: "notice", code, text }];
      }
      case "no-patch": {
        // D8
        const follower = this.inSession && model !== null ? this.followers.get(model) : undefined;
        return follower?.patches.refused(refuse, now) ?? [{ do: "notice", code, text }];
      }
      default:
        if (!TURNED_AWAY.has(code)) return [{ do: "notice", code, text }];
        this.#changeSession("refused"); // W20
        return [{ do: "refused", code, text }];
    }
  }

  // Joining.

  /** The latest epoch of bytes in the models. The worker joins no publisher of an older epoch. */
  get appliedEpoch(): number {
    return Math.max(0, ...[...this.followers.values()].map((follower) => follower.epoch));
  }

  /** Return a `hello`, at most once every `timing.helloRetry` milliseconds. */
  hello(now: number): Effect[] {
    if (now - this.#helloAt < this.timing.helloRetry) return [];
    this.#helloAt = now; // W1
    this.keyring?.noteHelloSent();
    this.#unansweredSince ??= now;
    const models = new Map<string, Running | null>();
    for (const [model, follower] of this.followers) models.set(model, follower.running);
    const epoch = this.appliedEpoch;
    const age = this.#ages.ageOf(epoch, now);
    return [reports.hello(this.identity, models, epoch, age, this.patches)];
  }

  #welcome(welcome: Welcome, now: number): Effect[] {
    if (welcome.epoch < this.appliedEpoch) {
      const text = // W2
        `the publisher is of epoch ${welcome.epoch}, but this worker runs weights of the later ` +
        `epoch ${this.appliedEpoch}: connect it to the newer publisher`;
      return [{ do: "refused", code: "stale-epoch", text }];
    }
    this.#ages.record(welcome.epoch, welcome.age_ms, this.appliedEpoch, now);
    this.#heardAt = now;
    const ticket = ticketOf(welcome);
    if (this.inSession && welcome.epoch === this.#epoch) {
      this.keyring?.add(welcome.keys, now + this.timing.lostAfter); // W29: a second hello
      return [...this.#dial(welcome, ticket), ...this.#noteLatest(welcome.models, now)];
    }
    this.#changeSession("welcomed"); // W28
    this.#epoch = welcome.epoch;
    this.keyring?.begin(welcome.keys, now + this.timing.lostAfter);
    this.#redialAt = Number.POSITIVE_INFINITY;
    this.#unheardSince = now;
    this.#subscribed = false;
    this.#pingEvery = Math.min(this.timing.ping, welcome.ping_ms);
    const effects: Effect[] = [{ do: "joined", epoch: welcome.epoch }];
    effects.push(...this.#dial(welcome, ticket));
    for (const follower of this.followers.values())
      effects.push(...this.#enter(follower, welcome, now));
    return effects;
  }

  /** Connect to the data endpoint of a welcome if it has changed, or if the welcome has a ticket. */
  #dial({ data }: Welcome, ticket: string): Effect[] {
    if (ticket === "" && data === this.#data) return []; // K7
    this.#data = data;
    return [{ do: "connect", endpoint: data, ticket }];
  }

  #enter(follower: Follower, welcome: Welcome, now: number): Effect[] {
    const { model } = follower;
    const expected = follower.expect(this.models.get(model)?.nbytes ?? 0);
    const version = welcome.models.get(model) ?? 0;
    return [
      { do: "subscribe", topic: controlTopic(model), on: true },
      follower.subscription,
      ...follower.reconnected({ epoch: welcome.epoch, version }, now),
      ...expected,
    ];
  }

  /**
   * Whether the publisher has not answered for too long, or the control connection is presumed
   * dead.
   *
   * TCP detects a dead connection late. Besides, ZeroMQ stops reconnecting once it has received
   * anything that is not ZMTP. While ZeroMQ is trying to connect, it emits events continuously
   * (`changed`); so a long time without events means that it has stopped. A name lookup emits no
   * events either, but must not be interrupted.
   */
  #isSilent(now: number): boolean {
    const { lostAfter, deafAfter } = this.timing;
    const since = this.#unansweredSince;
    if (since !== null && now - since >= lostAfter) return true;
    // After a frame with a damaged length, further messages are taken for a part of that frame.
    const deaf = now - this.#answeredAt >= deafAfter; // W19
    return this.#session !== "outside" && (deaf || now - this.#heardAt >= lostAfter);
  }

  /** Return, once per session, the notice to the user that no published messages arrive. */
  #unheard(now: number): Effect[] {
    if (this.#unheardSince === null || now - this.#unheardSince < this.timing.lostAfter) return [];
    this.#unheardSince = null; // W33
    return [reports.unheard(printable(this.#data))];
  }

  /** End the session, if there is one, and reconnect. */
  #reconnect(): Effect[] {
    const lost: Effect[] = this.#changeSession("silent") ? [{ do: "lost" }] : []; // W19
    this.#unansweredSince = null;
    this.#redialAt = Number.POSITIVE_INFINITY;
    return [...lost, { do: "redial" }];
  }

  /** Handle a handshake that failed because of keys. ZeroMQ may give up: redial after `ping` ms. */
  shutOut(why: string, now: number): Effect[] {
    if (this.#redialAt < Number.POSITIVE_INFINITY) return []; // K5
    this.#redialAt = now + this.timing.ping;
    this.#changeSession("refused");
    return [{ do: "refused", code: "keys", text: why }];
  }

  /** Handle the loss of a data connection that needed a ticket: `hello` requests a new ticket. */
  withoutTicket(now: number): Effect[] {
    return this.inSession ? this.hello(now) : []; // K7
  }

  /** Handle a change of the control address: end the session, and forget its connections' state. */
  moved(): void {
    this.#changeSession("silent");
    this.#helloAt = Number.NEGATIVE_INFINITY;
    this.#unansweredSince = null;
    this.#redialAt = Number.POSITIVE_INFINITY;
    this.#data = "";
  }

  /** Record that the control connection has opened or broken, or an attempt has started or failed. */
  changed(now: number): void {
    this.#unansweredSince = now;
  }

  /**
   * Return `hello` if there is no session.
   *
   * The loop calls this method when the control channel connects, and then at each tick until a
   * session begins.
   */
  helloIfOutside(now: number): Effect[] {
    return this.#session === "outside" ? this.hello(now) : [];
  }

  /** Return `bye`, also without a session, since the publisher may have received a hello. */
  close(): Effect[] {
    return [send({ type: "bye" })]; // W22
  }

  // Calls on behalf of the user.

  /** Return the version that a model runs; null before the first version. */
  running(model: string): Running | null {
    return this.followers.get(model)?.running ?? null;
  }

  /** Return the metadata of the version that a model runs; empty before the first version. */
  metadata(model: string): ReadonlyMap<string, string> {
    return this.followers.get(model)?.metadata ?? new Map();
  }

  /** Whether an apply of a model failed half-way, so that the model holds no version. */
  torn(model: string): boolean {
    return this.followers.get(model)?.torn ?? false;
  }

  /** Start to apply the ready version of a model and return it; null if there is none. */
  takeReady(model: string): StagedVersion | null {
    return this.followers.get(model)?.takeReady() ?? null;
  }

  /**
   * Handle the success of an apply: the version is the running version from now on. `kept` is true
   * if the user keeps the version's memory. `note` is a text for the publisher on values that became
   * infinite.
   */
  applied(model: string, now: number, kept = false, note = ""): Effect[] {
    return this.#completed(this.followers.get(model)?.applied(now, kept, note), now);
  }

  /**
   * Handle the failure of an apply. `intact` is true if the previous version still runs; otherwise no
   * version runs. `kept` is true if the user keeps the version's memory.
   */
  failed(model: string, text: string, now: number, intact = true, kept = false): Effect[] {
    return this.#completed(this.followers.get(model)?.failed(text, now, intact, kept), now);
  }

  /**
   * Handle a version that was not applied because a companion failed. `again` is true if the version
   * is to be received again, together with the companion. The user gets no report.
   */
  failedBeside(
    model: string,
    text: string,
    now: number,
    intact: boolean,
    again: boolean,
    kept: boolean,
  ): Effect[] {
    const follower = this.followers.get(model);
    return this.#completed(follower?.failedBeside(text, now, intact, again, kept), now);
  }

  /**
   * Handle the result of decoding a patch. `fault` is the reason that the patch is unusable; empty
   * if it is usable. `took` is the duration of the decoding in milliseconds.
   */
  decoded(job: Patching, fault: string, took: number, now: number): Effect[] {
    return this.#completed(this.followers.get(job.model)?.decoded(job, fault, took, now), now);
  }

  // Time.

  /** Return the effects that are due: retries, pings, repeated reports. */
  tick(now: number): Effect[] {
    const lacksKey = this.keyring?.lacks(now) ?? false; // keys expire outside a session, too
    if (this.#isSilent(now) || now >= this.#redialAt) return this.#reconnect();
    if (!this.inSession) return [];
    const followers = [...this.followers.values()];
    const due = followers.flatMap((follower) => follower.tick(now));
    const effects = [...this.#completed(due, now), ...this.#unheard(now)];
    const outdated = this.appliedEpoch > this.#epoch; // W3: an apply of a later epoch has ended
    if (lacksKey || outdated) effects.push(...this.hello(now)); // E6: welcome has the key
    if (now - this.#pingedAt < this.#pingEvery) return effects;
    this.#pingedAt = now; // W17, W18
    effects.push(reports.ping(now, this.#subscribed));
    return [...effects, ...followers.flatMap((follower) => follower.repeat())];
  }
}

type OfModel = Exclude<
  PublisherMessage,
  { type: "ping" | "pong" | "welcome" | "refuse" | "rekey" | "sealed_message" }
>;

function isChunk(message?: PublisherMessage | null): message is Chunk | SealedChunk {
  return message?.type === "chunk" || message?.type === "sealed_chunk";
}

/** Pass a message to the follower of its model. */
function dispatch(
  follower: Follower,
  { message: decoded, payloads }: Decoded,
  now: number,
  pushed: boolean,
): Effect[] {
  const message = decoded as OfModel;
  switch (message.type) {
    case "announce":
      return message.whole === null
        ? follower.announced(message, payloads[0], now, pushed)
        : dispatchWhole(follower, message, payloads[0] ?? NO_BYTES, now);
    case "chunk":
    case "sealed_chunk":
      return follower.chunk(message, payloads[0] ?? NO_BYTES, now, pushed);
    case "end":
      return follower.end(message, now);
    case "commit":
      return follower.committed(message, now);
    case "abort":
      return follower.aborted(message, now);
    case "rename":
      return follower.renamed(message, now);
    case "beacon":
      return follower.planner.noteLatest(message, now);
    case "piece":
    case "checksums":
      return []; // only workers with the feature `parts` need these
  }
}

/**
 * Process an announcement that contains the whole version as if three messages had arrived: a
 * pushed announcement, one chunk, and `end`.
 */
function dispatchWhole(
  follower: Follower,
  announce: Announce,
  payload: Uint8Array,
  now: number,
): Effect[] {
  const { model, epoch, version, whole } = announce;
  if (whole === null) return [];
  const { crc, digest } = whole;
  const of = { model, epoch, version, patch: null };
  return [
    ...follower.announced({ ...announce, patches: [] }, undefined, now, true), // no patch is needed
    ...follower.chunk({ type: "chunk", ...of, index: 0, crc }, payload, now, true),
    ...follower.end({ type: "end", ...of, digest }, now),
  ];
}
