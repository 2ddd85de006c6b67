/** The machine of a worker with keys: it runs what was sealed, byte for byte, whoever says what. */

import assert from "node:assert/strict";
import fc from "fast-check";
import { Keyring } from "../src/keyring.js";
import { Bench } from "../tests/bench.js";
import { bytesOf, type Frames, header, type Published } from "../tests/published.js";
import { Sealer } from "../tests/sealed.js";
import { Stage, versions } from "./machine.js";

const KINDS = ["announce", "chunk", "chunk", "end", "beacon", "whole", "rekey", "wait", "apply"];
const FATES = ["sound", "sound", "sound", "flipped", "stranger", "clear", "twice"];

const act = fc.record({
  kind: fc.constantFrom(...KINDS),
  fate: fc.constantFrom(...FATES),
  pushed: fc.boolean(),
  version: versions,
  index: fc.nat(99),
});
type Act = typeof act extends fc.Arbitrary<infer T> ? T : never;

/** All of a version, in order, with accidents; then what was asked for, and it may be applied. */
const push = fc
  .tuple(versions, fc.boolean(), fc.array(fc.constantFrom(...FATES), { maxLength: 20 }))
  .map(([version, pushed, fates]) => {
    const chunks = version.crcs.map((_, index) => ({ kind: "chunk", index }));
    const all = [{ kind: "announce", index: 99 }, ...chunks, { kind: "end", index: 0 }];
    const once = all.map((said, at) => ({ ...said, pushed, fate: fates[at] ?? "sound" }));
    const again = [...all, { kind: "apply", index: 0 }].map((said) => ({
      ...said,
      pushed: false,
      fate: "sound",
    }));
    return [...once, ...again].map((said): Act => ({ ...said, version }));
  });

/** A publisher that seals, and others who would like to be it. */
class Play extends Stage {
  #sealer = new Sealer();
  #keys = 1;

  constructor() {
    super(new Bench({ bytesMax: 10_000, inside: false, keyring: new Keyring() }));
    this.machine.helloIfOutside(this.bench.now);
    this.bench.control(this.#sealer.welcome(7));
  }

  act({ kind, fate, pushed, version, index }: Act, piece: number): void {
    if (kind === "wait") this.check(this.bench.wait(300));
    else if (kind === "apply") this.#apply();
    else if (kind === "rekey") this.#rekey();
    else {
      const sealer = fate === "stranger" ? new Sealer("ee".repeat(32)) : this.#sealer;
      const frames = damaged(said(sealer, kind, version, index, pushed, fate), fate, index);
      for (let left = fate === "twice" ? 2 : 1; left > 0; left--) this.#say(frames, pushed, piece);
    }
  }

  #say(frames: Frames, pushed: boolean, piece: number): void {
    const copies = frames.map((frame) => Uint8Array.from(frame)); // they are opened in their place
    if (pushed) this.publish(copies, piece);
    else this.check(this.bench.control(copies));
  }

  #rekey(): void {
    this.#sealer = new Sealer(String(++this.#keys % 10).repeat(64));
    this.check(this.bench.control([header("rekey", { epoch: 7, keys: [this.#sealer.hex] })]));
  }

  #apply(): void {
    const { ready } = this.bench;
    if (ready === null) return;
    assert.deepEqual(ready.data, bytesOf(ready.data.length, ready.version));
    this.check(this.bench.apply());
  }
}

function said(
  sealer: Sealer,
  kind: string,
  version: Published,
  index: number,
  pushed: boolean,
  fate: string,
): Frames {
  const chunk = index % Math.max(1, version.plan.count);
  if (kind === "chunk")
    return fate === "clear" ? version.chunk(chunk) : sealer.chunk(version, chunk);
  if (kind === "whole" && pushed) return sealer.whole(version);
  const plain =
    kind === "end" || kind === "beacon" ? version.say(kind) : sealer.announce(version, index > 9); // with its layout
  return pushed && fate !== "clear" ? sealer.message(plain) : plain;
}

/** Flip a bit of the last frame, of what is sealed if there is something. */
function damaged(frames: Frames, fate: string, index: number): Frames {
  const last = frames.at(-1);
  if (fate !== "flipped" || frames.length < 2 || !last?.length) return frames;
  const bytes = Uint8Array.from(last);
  bytes[index % bytes.length] = (bytes[index % bytes.length] ?? 0) ^ 1;
  return [...frames.slice(0, -1), bytes];
}

export const keyed = fc.property(
  fc.array(fc.oneof(push, fc.tuple(act)), { maxLength: 25 }),
  fc.integer({ min: 1, max: 6 }),
  (acts, piece) => {
    const play = new Play();
    for (const each of acts.flat()) play.act(each, piece);
  },
);
