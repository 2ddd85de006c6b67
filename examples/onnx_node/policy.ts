/**
 * Runs a policy in ONNX Runtime with the newest weights of its trainer.
 *
 *     node policy.ts tcp://localhost:5555    (or several addresses, separated by commas)
 *
 * The weights are inputs of policy.onnx. The worker copies versions into the same arrays that the runtime reads.
 */

import { InferenceSession, Tensor } from "onnxruntime-node";
import { tensor, Worker } from "weightbus";

const [, , address = "tcp://127.0.0.1:5555"] = process.argv;
const shapes = { "0.weight": [8, 4], "0.bias": [8], "2.weight": [2, 8], "2.bias": [2] };
const policy: Record<string, ReturnType<typeof tensor>> = {};
const weights: Record<string, Tensor> = {};
for (const [name, shape] of Object.entries(shapes)) {
  const array = new Float32Array(shape.reduce((size, length) => size * length));
  policy[name] = tensor(array, shape);
  weights[name] = new Tensor("float32", array, shape);
}

const session = await InferenceSession.create(new URL("policy.onnx", import.meta.url).pathname);
const worker = await Worker.connect(address, { models: { policy } });
const state = new Tensor("float32", Float32Array.of(0.1, 0, -0.2, 0), [1, 4]);
for await (const { version } of worker) {
  const { scores } = await session.run({ state, ...weights }); // the weights do not change until the next turn of the loop
  const [left, right] = scores?.data as Float32Array;
  console.log(`version ${version}: ${left?.toFixed(4)} ${right?.toFixed(4)}`);
}
