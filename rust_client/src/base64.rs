//! Base64 (RFC 4648) with padding, for encrypted bytes in a header.

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Encodes bytes.
pub fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity((bytes.len() + 2) / 3 * 4);
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0, |bits, &byte| bits << 8 | u32::from(byte)) << (24 - 8 * group.len());
        for at in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * at) & 63) as usize];
            text.push(if at <= group.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

/// Decodes a text; `None` if it is not base64.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let padding = text.bytes().rev().take_while(|&c| c == b'=').count();
    if text.len() % 4 != 0 || padding > 2 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let mut bits = 0u32; // the lowest 6, 4, 2 or 0 are not written yet
    for (at, digit) in text.bytes().take(text.len() - padding).enumerate() {
        bits = bits << 6 | value(digit)?;
        if at % 4 != 0 {
            bytes.push((bits >> (6 - 2 * (at % 4))) as u8);
        }
    }
    Some(bytes)
}

fn value(digit: u8) -> Option<u32> {
    let value = match digit {
        b'A'..=b'Z' => digit - b'A',
        b'a'..=b'z' => digit - b'a' + 26,
        b'0'..=b'9' => digit - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    };
    Some(u32::from(value))
}

#[cfg(test)]
mod tests {
    use super::{decode, encode};

    #[test]
    fn texts_of_the_rfc_and_others_that_are_none() {
        for (text, bytes) in [("", ""), ("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9vYmE=", "fooba")]
        {
            assert_eq!(decode(text).as_deref(), Some(bytes.as_bytes()), "{}", text);
            assert_eq!(encode(bytes.as_bytes()), text);
        }
        assert_eq!(decode("+/+/"), Some(vec![0xfb, 0xff, 0xbf]));
        assert_eq!(encode(&[0xfb, 0xff, 0xbf]), "+/+/");
        for text in ["Z", "Zg", "Zg=", "Zg===", "====", "Zm9v=", "Z=g=", "Zm-_", "Zm 9", "Zm9\n"] {
            assert_eq!(decode(text), None, "{:?}", text);
        }
    }
}
