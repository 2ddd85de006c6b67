/** Words of others: whatever they are, one line that shows all of them. */

import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { printable } from "../src/words.js";

const SHOWN: [text: string, shown: string][] = [
  ["as it is: äöü 中文 🙂 \\ \"'", "as it is: äöü 中文 🙂 \\ \"'"],
  ["\x1b[2J\x07\x7f\x9b", "\\x1b[2J\\x07\\x7f\\x9b"],
  ["a\r\nb\tc", "a\\r\\nb\\tc"],
  ["\u202e\u200b\u2028\ufeff\u00a0", "\\u202e\\u200b\\u2028\\ufeff\\xa0"],
  ["\u{e0001}\ud800", "\\U000e0001\\ud800"],
];
for (const [text, shown] of SHOWN) {
  test(`shown as ${shown}`, () => assert.equal(printable(text), shown));
}

test("a text is cut off where there is no room for more", () => {
  assert.equal(printable("a".repeat(10), 10), "a".repeat(10));
  assert.equal(printable("a".repeat(11), 10), `${"a".repeat(9)}…`);
  assert.equal(printable("\n".repeat(6), 10), "\\n\\n\\n\\n\\…");
});

test("any text is printable then, and stays so", () => {
  fc.assert(
    fc.property(fc.string({ unit: "binary" }), fc.integer({ min: 1, max: 50 }), (text, most) => {
      const shown = printable(text, most);
      assert.ok(shown.length <= most && shown.isWellFormed());
      assert.equal(printable(shown, most), shown);
      assert.doesNotMatch(shown, /[\p{C}\p{Zl}\p{Zp}]/u);
    }),
  );
});
