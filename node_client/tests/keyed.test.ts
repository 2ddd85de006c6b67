/** Workers with keys, of a real publisher with keys. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { mkdtempSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { curveKeyPair } from "zeromq";
import { RefusedError, readWorkerKeys, tensor, Worker, type WorkerOptions } from "../src/index.js";
import { NO_PUBLISHER, type Options, Publisher } from "./publisher.js";

const live = { skip: NO_PUBLISHER, timeout: 120_000 };
const SOON = () => ({ signal: AbortSignal.timeout(60_000) });

/** A folder of keys, which a publisher makes. */
class Keys implements Disposable {
  readonly home = mkdtempSync(join(tmpdir(), "keyed-"));
  readonly folder = join(this.home, "keys");

  start(address?: string, options: Options = {}): Promise<Publisher> {
    return Publisher.start(address, { keys: this.folder, names: ["w", "gpu-*"], ...options });
  }

  of(name: string): string {
    return join(this.folder, "workers", `${name}.json`);
  }

  /** Have a key allowed, or no longer. */
  allow(name: string, on: boolean): void {
    const allowed = join(this.folder, "allowed", `${name}.json`);
    const kept = join(this.home, `${name}.json`);
    renameSync(on ? kept : allowed, on ? allowed : kept);
  }

  /** Draw a key that is not allowed yet. */
  draw(name: string) {
    const { publicKey, secretKey } = curveKeyPair();
    writeFileSync(join(this.home, `${name}.json`), JSON.stringify({ name, public: publicKey }));
    const { publisher } = readWorkerKeys(this.of("w"));
    return { name, public: publicKey, secret: secretKey, publisher };
  }

  [Symbol.dispose](): void {
    rmSync(this.home, { recursive: true });
  }
}

function options(more: Partial<WorkerOptions>): WorkerOptions {
  return { models: ["m"], ping: 200, lostAfter: 1000, ...more };
}

async function keepApplying(worker: Worker): Promise<void> {
  for await (const _ of worker);
}

for (const transport of ["tcp", "ipc"]) {
  test(
    `versions come sealed, whatever the group key is by then, over ${transport}`,
    live,
    async () => {
      using keys = new Keys();
      const bound = transport === "tcp" ? undefined : `ipc://${keys.home}/s`;
      await using publisher = await keys.start(bound, { rekey: 0.25 });
      const { address } = publisher;
      const w = new Float32Array(2 ** 19); // in two chunks
      const mine = options({ models: { m: { w } }, keys: keys.of("w") });
      await using one = await Worker.connect(address, mine);
      const others = options({ name: "gpu-7", keys: join(keys.folder) });
      await using two = await Worker.connect(address, others);
      assert.equal(one.name, "w", "as its key is called");
      const loops = [keepApplying(one), keepApplying(two)];
      const until = performance.now() + 1500; // in which the group key changes some times
      for (let value = 1; value < 6 || performance.now() < until; value++) {
        const { workers } = await publisher.publish(value, {}, { w: [w.length] });
        assert.deepEqual(workers, { w: "applied", "gpu-7": "applied" });
        assert.ok(w.every((each) => each === value));
      }
      assert.equal(one.running("m")?.digest, two.running("m")?.digest);
      await Promise.all([one.close(), two.close()]);
      await Promise.all(loops);
    },
  );
}

test("whose key is not allowed is told so, and let in once it is", live, async () => {
  using keys = new Keys();
  await using publisher = await keys.start();
  await using worker = new Worker(publisher.address, options({ keys: keys.draw("late") }));
  const [error] = await once(worker, "refused", SOON());
  assert.ok(error instanceof RefusedError && error.code === "keys");
  assert.match(error.message, /does not allow this worker's key/);
  const joined = once(worker, "joined", SOON());
  keys.allow("late", true);
  await joined;
  const published = publisher.publish(1);
  assert.equal((await worker.receive(SOON()))?.version, 1);
  assert.deepEqual((await published).workers, { late: "applied" });
});

test(
  "a key that is revoked gets nothing more, what runs stays, it may come back",
  live,
  async () => {
    using keys = new Keys();
    await using publisher = await keys.start();
    const m = { w: tensor(new Float32Array(6), [2, 3]), b: tensor(new Float32Array(1), []) };
    const mine = options({ models: { m }, keys: keys.of("w") });
    await using worker = await Worker.connect(publisher.address, mine);
    const refused = once(worker, "refused", SOON());
    const loop = keepApplying(worker);
    await publisher.publish(1);
    keys.allow("w", false);
    assert.equal((await refused)[0].code, "revoked");
    await publisher.publish(2, { require: 0, wait: "none" });
    assert.deepEqual([worker.running("m")?.version, worker.state], [1, "refused"]);
    const joined = once(worker, "joined", SOON());
    keys.allow("w", true);
    await joined;
    assert.deepEqual((await publisher.publish(3)).workers, { w: "applied" });
    assert.deepEqual([...m.w.data], Array(6).fill(3));
    await worker.close();
    await loop;
  },
);

test(
  "a name must fit the key, and who has keys speaks to their publisher alone",
  live,
  async () => {
    using keys = new Keys();
    await using publisher = await keys.start();
    await using plain = await Publisher.start();
    const w = readWorkerKeys(keys.of("w"));
    const pinned = { ...w, publisher: curveKeyPair().publicKey };
    const refusals: [string, Partial<WorkerOptions>, string, RegExp][] = [
      [publisher.address, { keys: w, name: "x" }, "wrong-name", /./],
      [publisher.address, { keys: pinned }, "keys", /has another key than/],
      [publisher.address, { keys: "" }, "keys", /this worker has none/],
      [plain.address, { keys: w }, "keys", /speaks without keys/],
    ];
    const tries = refusals.map(([address, more, code, words]) =>
      assert.rejects(Worker.connect(address, options(more)), (error) => {
        assert.ok(error instanceof RefusedError && error.code === code, String(error));
        return words.test(error.reason);
      }),
    );
    await Promise.all(tries);
  },
);
