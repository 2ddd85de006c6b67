/** Makes texts of peers safe to show in a terminal or a log. */

const CUT = "…";
// As in Python, printable are letters, marks, numbers, punctuation, symbols, and the space.
const UNPRINTABLE = /[^\p{L}\p{M}\p{N}\p{P}\p{S} ]/gu;

/**
 * Return a text as one line, with control, formatting and other invisible characters escaped.
 *
 * A newline becomes \n, an escape \x1b, a right-to-left override \u202e. Printable text stays.
 *
 * @param most - the length to which the result is truncated.
 */
export function printable(text: string, most = Number.POSITIVE_INFINITY): string {
  const some = text.slice(0, most + 1); // escaping never shortens a text
  const shown = some.replace(UNPRINTABLE, escaped);
  return shown.length <= most ? shown : shown.slice(0, most - CUT.length).toWellFormed() + CUT;
}

const NAMED: Readonly<Record<string, string>> = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

function escaped(character: string): string {
  const point = character.codePointAt(0) ?? 0;
  const [mark, digits] = point < 0x100 ? ["x", 2] : point < 0x10000 ? ["u", 4] : ["U", 8];
  const hex = point.toString(16).padStart(digits as number, "0");
  return NAMED[character] ?? `\\${mark}${hex}`;
}
