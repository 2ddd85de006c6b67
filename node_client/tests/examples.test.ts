/** What the README shows compiles and runs, and so does the example. */

import assert from "node:assert/strict";
import { type ChildProcess, execFileSync, spawn } from "node:child_process";
import { once } from "node:events";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { test } from "node:test";
import { NO_PUBLISHER, Publisher } from "./publisher.js";

const HOME = new URL("../../", import.meta.url).pathname;
const live = { skip: NO_PUBLISHER, timeout: 120_000 };

function linesOf(child: ChildProcess): AsyncIterator<string> {
  assert.ok(child.stdout);
  return createInterface({ input: child.stdout })[Symbol.asyncIterator]();
}

/** Compile the README's program as a user would; return the path of what came out. */
function compiled(address: string): string {
  const [, program = ""] = /```ts\n(.*?)```/s.exec(readFileSync(`${HOME}README.md`, "utf8")) ?? [];
  const folder = `${HOME}build/readme`;
  mkdirSync(folder, { recursive: true });
  writeFileSync(`${folder}/example.ts`, program.replace("tcp://127.0.0.1:5555", address));
  const options = {
    extends: "../../tsconfig.json",
    compilerOptions: { rootDir: ".", outDir: "out" },
    include: ["example.ts"],
  };
  writeFileSync(`${folder}/tsconfig.json`, JSON.stringify(options));
  execFileSync(`${HOME}node_modules/.bin/tsc`, ["-p", folder], { stdio: "inherit" });
  return `${folder}/out/example.js`;
}

test("the README's example compiles, runs, and ends", live, async () => {
  await using publisher = await Publisher.start();
  const child = spawn(process.execPath, [compiled(publisher.address)], {
    stdio: ["ignore", "pipe", "inherit"],
  });
  const ended = once(child, "exit");
  const lines = linesOf(child);
  await publisher.workers(1);
  for (let version = 1; version <= 3; version++) {
    const shapes = { slope: [3], offset: [] };
    await publisher.ask({ do: "publish", model: "line", shapes, value: version / 2, how: {} });
    assert.match(
      (await lines.next()).value,
      new RegExp(`^line ${version} [0-9a-f]{64} ${version / 2}$`),
    );
  }
  assert.deepEqual(await ended, [0, null]);
});

test("the example worker predicts, and says goodbye when it is told to end", live, async () => {
  await using publisher = await Publisher.start();
  const child = spawn(`${HOME}build/worker`, [publisher.address, "--name", "n"], {
    stdio: ["ignore", "pipe", "inherit"],
  });
  const ended = once(child, "exit");
  const lines = linesOf(child);
  await publisher.workers(1);
  const shapes = { slope: [3], offset: [] };
  await publisher.ask({ do: "publish", model: "line", shapes, value: 0.5, how: {} });
  const { digest, ...row } = JSON.parse((await lines.next()).value);
  assert.deepEqual(row, { worker: "n", version: 1, prediction: 3.5 });
  assert.equal(digest.length, 64);
  child.kill("SIGTERM");
  assert.deepEqual(await ended, [0, null]);
  while ("n" in (await publisher.ask({ do: "workers" })));
});

test("the example worker ends where no version comes", async () => {
  const nobody = "ipc:///nobody/is-here";
  const child = spawn(`${HOME}build/worker`, [nobody, "--patience", "0.2"], { stdio: "inherit" });
  assert.deepEqual(await once(child, "exit"), [0, null]);
});
