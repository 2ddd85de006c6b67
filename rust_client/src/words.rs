//! Words of others, as a person, a terminal or a log may be shown them.

/// Returns a text of somebody else's on one line, without what moves a cursor or hides letters, cut off after so many
/// characters.
pub fn printable(text: &str, most: usize) -> String {
    let clean: String = text.chars().map(|c| if is_printable(c) { c } else { ' ' }).collect();
    let words: Vec<&str> = clean.split_whitespace().collect();
    words.join(" ").chars().take(most).collect()
}

/// Whether a character is one to be seen: the standard library knows, and escapes those that are not. It is asked of a
/// character that follows another, since of those that are written onto the one before it escapes the first alone.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return c == ' ' || c.is_ascii_graphic();
    }
    !format!("a{}", c).escape_debug().any(|escaped| escaped == '\\')
}

/// Returns a text of somebody else's on one line: what moves a cursor, hides letters or turns them is escaped, as in a
/// string of Rust's. What can be seen stays as it is.
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
