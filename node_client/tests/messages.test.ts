/** Headers: what the tables allow, and that nothing else can come of any bytes. */

import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { ProtocolError } from "../src/errors.js";
import { asText, checkName, decode, encode } from "../src/headers.js";
import { header, welcome } from "./published.js";

function read(text: string | Uint8Array, ...payloads: Uint8Array[]) {
  return decode([typeof text === "string" ? Buffer.from(text) : text, ...payloads]).message;
}

test("any JSON is a message, or a ProtocolError", () => {
  const value = fc.oneof(
    fc.jsonValue(),
    fc.constantFrom("ping", "chunk", "announce", 1, 2, 2 ** 53),
  );
  const fields = fc.dictionary(fc.constantFrom("wbp", "type", "model", "epoch", "models"), value);
  fc.assert(
    fc.property(fields, fc.nat(3), (object, payloads) => {
      const frames = Array.from({ length: payloads }, () => new Uint8Array(1));
      try {
        decode([Buffer.from(JSON.stringify(object)), ...frames]);
      } catch (error) {
        assert.ok(error instanceof ProtocolError, String(error));
      }
    }),
  );
});

test("models may have names that objects have of their own", () => {
  const text = '"__proto__":4,"constructor":5';
  const frames = [
    Buffer.from(
      Buffer.from(welcome(7)[0] ?? "")
        .toString()
        .replace('"models":{}', `"models":{${text}}`),
    ),
  ];
  const { message } = decode(frames);
  assert.equal(message.type, "welcome");
  assert.deepEqual("models" in message && [...message.models], [
    ["__proto__", 4],
    ["constructor", 5],
  ]);
  assert.equal(
    encode({
      type: "hello",
      name: "w",
      instance: "a".repeat(32),
      models: new Map([["__proto__", null]]),
    }),
    `{"wbp":1,"type":"hello","name":"w","instance":"${"a".repeat(32)}","models":{"__proto__":null}}`,
  );
});

test("fields that objects have of their own are missing all the same", () => {
  assert.throws(() => read('{"wbp":1,"type":"toString"}'), ProtocolError);
  assert.throws(() => read('{"type":"ping","__proto__":{"wbp":1}}'), { code: "protocol-version" });
});

test("characters are code points", () => {
  const refuse = (text: string) => read(header("refuse", { code: "x", text }));
  assert.equal(refuse("\u{1f69a}".repeat(4096)).type, "refuse");
  assert.throws(() => refuse(`${"\u{1f69a}".repeat(4096)}a`), ProtocolError);
});

test("the number of the protocol is judged first", () => {
  assert.throws(() => read('{"wbp":3,"type":"sing"}'), { code: "protocol-version" });
  assert.throws(() => read('{"wbp":1e300,"type":"sing"}'), { code: "protocol-version" });
  assert.throws(() => read('{"wbp":1.5,"type":"sing"}'), { code: "malformed" });
  assert.throws(() => read('{"wbp":1,"type":"sing"}'), { code: "malformed" });
});

test("depth costs nothing", () => {
  for (const deep of [`${"[".repeat(30_000)}${"]".repeat(30_000)}`, '{"a":'.repeat(13_000)]) {
    try {
      read(`{"wbp":1,"type":"ping","x":${deep}}`);
    } catch (error) {
      assert.ok(error instanceof ProtocolError, String(error));
    }
  }
});

test("minus zero is never kept", () => {
  const message = read('{"wbp":1,"type":"ping","token":-0}');
  assert.ok("token" in message && Object.is(message.token, 0));
});

test("a text is cut to what a field holds, and is always UTF-8", () => {
  fc.assert(
    fc.property(fc.array(fc.nat(0xffff), { maxLength: 20 }), fc.nat(20), (units, most) => {
      const cut = asText(String.fromCharCode(...units), most);
      assert.ok(cut.isWellFormed() && [...cut].length <= most);
    }),
  );
});

test("names are checked with words that help", () => {
  assert.equal(checkName("rollout-3", "worker"), "rollout-3");
  for (const name of ["", "a/b", "a\n", "x".repeat(129)]) {
    assert.throws(() => checkName(name, "worker"), /worker .*1 to 128/s);
  }
});
