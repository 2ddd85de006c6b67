//! Makes text from other hosts safe to print.

/// Returns a text from another host on one line, without control characters and invisible
/// characters, cut off after `chars_max` characters.
pub fn printable(text: &str, chars_max: usize) -> String {
    let clean: String = text.chars().map(|c| if is_printable(c) { c } else { ' ' }).collect();
    let words: Vec<&str> = clean.split_whitespace().collect();
    words.join(" ").chars().take(chars_max).collect()
}

/// True if a character is visible: then the standard library does not escape it. A letter is put
/// before the character, since the library escapes a combining character at the beginning of a
/// text.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return c == ' ' || c.is_ascii_graphic();
    }
    !format!("a{}", c).escape_debug().any(|escaped| escaped == '\\')
}

/// Returns a text from another host on one line. Control characters, and characters that hide or
/// reorder text, are escaped as in a Rust string.
pub fn escaped(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if is_printable(c) {
            shown.push(c);
        } else {
            shown.extend(c.escape_default());
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_of_somebody_elses_is_on_one_line_and_does_nothing() {
        assert_eq!(printable(" x\u{1b}[2J\n\u{202e}y\t\u{a0}z\u{200b}", 99), "x [2J y z");
        assert_eq!(printable("é e\u{301} 🚚 \\ \" ' 中", 99), "é e\u{301} 🚚 \\ \" ' 中");
        assert_eq!(printable("🚚🚚🚚", 2), "🚚🚚");
    }

    #[test]
    fn what_moves_a_cursor_or_turns_letters_is_escaped() {
        assert_eq!(escaped("a\r\n\u{1b}[2J\u{202e}b\u{200b}c"), "a\\r\\n\\u{1b}[2J\\u{202e}b\\u{200b}c");
        assert_eq!(escaped("größer: \"x\" 重み \\n"), "größer: \"x\" 重み \\n");
    }
}
