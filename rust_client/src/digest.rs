//! SHA-256 digests: of a layout, and of a whole version.

use crate::checksum::crc32c;
use sha2::{Digest, Sha256};
use std::fmt::Write;

/// Returns the id of a layout: the SHA-256 of its bytes, as 64 hexadecimal digits.
pub fn layout_id(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Returns the digest of a version: the SHA-256 of its layout's id, its chunk size, and the
/// checksums of its chunks. Since the checksums are known, the data need not be read again.
pub fn digest(layout_id: &str, chunk_bytes: u64, crcs: &[u32]) -> String {
    digest_by(layout_id, chunk_bytes, crcs.iter().copied())
}

/// Returns the digest of a data section.
pub fn digest_of(layout_id: &str, chunk_bytes: u64, data: &[u8]) -> String {
    digest_while(layout_id, chunk_bytes, data, &|| true)
}

/// Does what `digest_of` does, but stops early, with a wrong digest, once `wanted` returns false.
pub fn digest_while(layout_id: &str, chunk_bytes: u64, data: &[u8], wanted: &dyn Fn() -> bool) -> String {
    let chunks = data.chunks(chunk_bytes as usize).take_while(|_| wanted());
    digest_by(layout_id, chunk_bytes, chunks.map(crc32c))
}

fn digest_by(layout_id: &str, chunk_bytes: u64, crcs: impl Iterator<Item = u32>) -> String {
    let mut hash = Sha256::new();
    hash.update(bytes_of_hex(layout_id));
    hash.update(chunk_bytes.to_le_bytes());
    for crc in crcs {
        hash.update(crc.to_le_bytes());
    }
    hex(&hash.finalize())
}

/// Returns bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{:02x}", byte); // never fails
        text
    })
}

/// Returns the bytes of hexadecimal digits; other characters are skipped.
pub fn bytes_of_hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|d| d as u8).collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}
