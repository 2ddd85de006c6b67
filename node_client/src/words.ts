/** Words of others, as a person, a terminal or a log may be shown them. */

const CUT = "…";
// As in Python: letters, marks, numbers, punctuation, symbols, and the one blank.
const UNPRINTABLE = /[^\p{L}\p{M}\p{N}\p{P}\p{S} ]/gu;

/**
 * Return a text on one line: what moves a cursor, hides letters or turns them is escaped.
 *
 * A new line is shown as \n, an escape as \x1b, a right-to-left mark as \u202e. What can be seen
 * stays as it is, so that a text that is printable is not changed.
 *
 * @param most - characters after which it is cut off.
 */
export function printable(text: string, most = Number.POSITIVE_INFINITY): string {
  const some = text.slice(0, most + 1); // no character gets shorter by what follows
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
