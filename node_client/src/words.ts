/** Makes texts that peers sent safe to show in a terminal or a log. */

const ELLIPSIS = "…";
// As in Python: everything except letters, marks, numbers, punctuation, symbols, and the space.
const UNPRINTABLE = /[^\p{L}\p{M}\p{N}\p{P}\p{S} ]/gu;

/**
 * Return a text as one line, with control, formatting and other invisible characters escaped: a
 * newline becomes \n, an escape character \x1b, a right-to-left override \u202e.
 *
 * @param most - the length to which the result is truncated.
 */
export function printable(text: string, most = Number.POSITIVE_INFINITY): string {
  const start = text.slice(0, most + 1); // more is never shown, since escaping shortens no text
  const shown = start.replace(UNPRINTABLE, escaped);
  if (shown.length <= most) return shown;
  return shown.slice(0, most - ELLIPSIS.length).toWellFormed() + ELLIPSIS;
}

const SHORT: Readonly<Record<string, string>> = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

function escaped(character: string): string {
  const point = character.codePointAt(0) ?? 0;
  const [mark, digits] = point < 0x100 ? ["x", 2] : point < 0x10000 ? ["u", 4] : ["U", 8];
  const hex = point.toString(16).padStart(digits as number, "0");
  return SHORT[character] ?? `\\${mark}${hex}`;
}
