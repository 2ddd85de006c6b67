/**
 * A generation worker: writes answers with the newest weights of a tiny language model, a JSON line for each batch.
 *
 *     generation_worker tcp://localhost:5555 --name w2 --seed 3    (or several addresses, separated by commas)
 *
 * It is a worker of `weightbus demo --model llm` and does what `examples/demo/llm/worker.py` does. Numbers here are
 * of double precision, so its greedy answers are those of the Python workers with the same version: what they compute
 * differs in the sixteenth digit, the two best letters in the sixth.
 */

import { setTimeout as pause } from "node:timers/promises";
import { parseArgs } from "node:util";
import { type Tensor, tensor, Worker } from "weightbus";

const TOKENS = "abcdefgh>";
const LETTERS = 8; // of the tokens; the last one is the mark between question and answer
const [LENGTH, WIDTH, HEADS, LAYERS, HIDDEN] = [6, 32, 2, 2, 64];
const EPSILON = 1e-5;
const ASKED = ["abcdef", "hgfedc", "bbbagh", "cafeda"];
const BATCH = 32;
const LETTER_MS = 4; // what a letter takes beside the few microseconds of this model

type Numbers = Float64Array;
type Pick = (logits: Numbers) => number;
const weights: Record<string, Tensor> = {};
const add = (name: string, ...shape: number[]) => {
  const size = shape.reduce((product, n) => product * n, 1);
  weights[`${name}.weight`] = tensor(new Float32Array(size), shape);
};
add("embedding", TOKENS.length, WIDTH);
add("positions", 2 * LENGTH, WIDTH);
for (let n = 0; n < LAYERS; n++) {
  add(`blocks.${n}.attention_norm`, WIDTH);
  add(`blocks.${n}.qkv`, 3 * WIDTH, WIDTH);
  add(`blocks.${n}.projection`, WIDTH, WIDTH);
  add(`blocks.${n}.mlp_norm`, WIDTH);
  add(`blocks.${n}.up`, HIDDEN, WIDTH);
  add(`blocks.${n}.down`, WIDTH, HIDDEN);
}
add("norm", WIDTH);
add("head", TOKENS.length, WIDTH);

function values(name: string): Float32Array {
  const found = weights[`${name}.weight`]?.data;
  if (!(found instanceof Float32Array)) throw new RangeError(`no weights ${name}`);
  return found;
}

function times(name: string, x: Numbers): Numbers {
  const matrix = values(name);
  return Float64Array.from({ length: matrix.length / x.length }, (_, row) =>
    x.reduce((sum, value, i) => sum + value * (matrix[row * x.length + i] ?? 0), 0),
  );
}

function norm(name: string, x: Numbers): Numbers {
  const scale = Math.sqrt(x.reduce((sum, value) => sum + value * value, 0) / x.length + EPSILON);
  return x.map((value, i) => (value / scale) * (values(name)[i] ?? 0));
}

const sum = (x: Numbers, y: Numbers) => x.map((value, i) => value + (y[i] ?? 0));
const dot = (x: Numbers, y: Numbers) =>
  x.reduce((total, value, i) => total + value * (y[i] ?? 0), 0);

/** A text that is read letter by letter; what was computed of earlier letters is kept. */
class Text {
  #length = 0;
  readonly #keys: Numbers[][] = Array.from({ length: LAYERS * HEADS }, () => []);
  readonly #values: Numbers[][] = Array.from({ length: LAYERS * HEADS }, () => []);

  /** Read a token; return what the model expects after it. */
  read(token: number): Numbers {
    const row = (name: string, at: number) =>
      Float64Array.from(values(name).subarray(at * WIDTH, (at + 1) * WIDTH));
    let x = sum(row("embedding", token), row("positions", this.#length));
    this.#length += 1;
    for (let n = 0; n < LAYERS; n++) {
      const mixed = times(`blocks.${n}.qkv`, norm(`blocks.${n}.attention_norm`, x));
      x = sum(x, times(`blocks.${n}.projection`, this.#attend(n, mixed)));
      const hidden = times(`blocks.${n}.up`, norm(`blocks.${n}.mlp_norm`, x));
      x = sum(
        x,
        times(
          `blocks.${n}.down`,
          hidden.map((value) => Math.max(value, 0)),
        ),
      );
    }
    return times("head", norm("norm", x));
  }

  /** Return what all heads of a layer see, side by side. */
  #attend(layer: number, mixed: Numbers): Numbers {
    const size = WIDTH / HEADS;
    const seen = new Float64Array(WIDTH);
    for (let head = 0; head < HEADS; head++) {
      const [query, key, value] = [0, 1, 2].map((part) =>
        mixed.subarray(part * WIDTH + head * size, part * WIDTH + (head + 1) * size),
      ) as [Numbers, Numbers, Numbers];
      const [keys, past] = [this.#keys[layer * HEADS + head], this.#values[layer * HEADS + head]];
      keys?.push(key);
      past?.push(value);
      const shares = softmax(Float64Array.from(keys ?? [], (k) => dot(query, k) / Math.sqrt(size)));
      past?.forEach((v, at) => {
        for (let i = 0; i < size; i++) {
          seen[head * size + i] = (seen[head * size + i] ?? 0) + (shares[at] ?? 0) * (v[i] ?? 0);
        }
      });
    }
    return seen;
  }
}

function softmax(scores: Numbers): Numbers {
  const highest = Math.max(...scores);
  const powers = scores.map((score) => Math.exp(score - highest));
  const total = powers.reduce((all, power) => all + power, 0);
  return powers.map((power) => power / total);
}

const greedy: Pick = (logits) => logits.indexOf(Math.max(...logits));
/** By probability: the highest after noise of Gumbel's. */
const sampled: Pick = (logits) =>
  greedy(logits.map((logit) => logit - Math.log(-Math.log(luck()))));

function answer(question: string, pick: Pick): string {
  const text = new Text();
  for (const letter of question) text.read(TOKENS.indexOf(letter));
  let next = TOKENS.length - 1;
  let written = "";
  for (let n = 0; n < LENGTH; n++) {
    next = pick(text.read(next));
    written += TOKENS[next];
  }
  return written;
}

const { positionals, values: given } = parseArgs({
  allowPositionals: true,
  options: { name: { type: "string" }, seed: { type: "string", default: "0" } },
});
const [address] = positionals;
if (address === undefined) {
  console.error("usage: generation_worker ADDRESS [--name N] [--seed N]");
  process.exit(2);
}

/** Numbers between 0 and 1, without either, from a seed (mulberry32). */
let state = Number(given.seed);
function luck(): number {
  state = (state + 0x6d2b79f5) | 0;
  let mixed = Math.imul(state ^ (state >>> 15), state | 1);
  mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
  return (((mixed ^ (mixed >>> 14)) >>> 0) + 0.5) / 2 ** 32;
}

function question(): string {
  return Array.from({ length: LENGTH }, () => TOKENS[Math.floor(luck() * LETTERS)]).join("");
}

// It ends when its trainer does, who holds the other end of its stdin, and reads its stdout.
const stopped = new AbortController();
const stop = () => stopped.abort();
process.stdin.on("end", stop).on("error", stop).resume();
process.stdout.on("error", stop);
process.on("SIGINT", () => {}); // Ctrl-C is for the trainer, which then ends this

const worker = new Worker(address, { models: { policy: weights }, name: given.name });
let told = 0;
try {
  while (!stopped.signal.aborted) {
    const timeout = worker.running("policy") === null ? 100 : 0;
    await worker.receive({ timeout, signal: stopped.signal }); // no weights change after this
    const version = worker.running("policy")?.version;
    if (version === undefined) continue;
    const questions = Array.from({ length: BATCH }, question);
    const answers = questions.map((asked) => answer(asked, sampled));
    const fixed = version === told ? [] : ASKED.map((asked) => answer(asked, greedy));
    told = version;
    const batch = { worker: worker.name, version, questions, answers, greedy: fixed };
    process.stdout.write(`${JSON.stringify(batch)}\n`);
    await pause(LENGTH * LETTER_MS, undefined, { signal: stopped.signal });
  }
} catch (error) {
  if (!stopped.signal.aborted) throw error;
} finally {
  await worker.close();
}
process.exit(0); // stdin may still be open
