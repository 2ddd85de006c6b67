//! CRC-32C (Castagnoli), the checksum of every chunk.

use crate::raw::crc;

/// Returns the CRC-32C of some bytes.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc32c_append(0, bytes)
}

/// Returns the CRC-32C of earlier bytes, given as `crc`, and of these bytes after them.
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    !crc::update(!crc, bytes).unwrap_or_else(|| by_tables(!crc, bytes))
}

/// Copies bytes, and continues the CRC-32C `crc` of earlier bytes over them. The CRC is that of the
/// copied bytes, even if the source is overwritten meanwhile. With `past_caches`, the copy bypasses
/// the CPU caches, for data that is larger than the caches and not read soon.
///
/// # Panics
///
/// If `from` and `to` differ in length.
pub fn copy_crc32c(crc: u32, from: &[u8], to: &mut [u8], past_caches: bool) -> u32 {
    assert_eq!(from.len(), to.len(), "source and destination differ in length");
    if let Some(state) = past_caches.then(|| crc::stream(!crc, from, to)).flatten() {
        return !state;
    }
    let parts = from.chunks(BLOCK).zip(to.chunks_mut(BLOCK));
    parts.fold(crc, |crc, (from, to)| {
        to.copy_from_slice(from);
        crc32c_append(crc, to)
    })
}

const BLOCK: usize = 16384; // checksummed while it is in the cache

const POLYNOMIAL: u32 = 0x82f6_3b78; // 0x1edc6f41, reflected

/// `TABLES[n][b]` is the state after the byte b and n zero bytes.
static TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut state = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            state = (state >> 1) ^ (POLYNOMIAL * (state & 1));
            bit += 1;
        }
        tables[0][byte] = state;
        byte += 1;
    }
    let mut n = 1;
    while n < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[n - 1][byte];
            tables[n][byte] = (before >> 8) ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        n += 1;
    }
    tables
}

/// Computes the CRC eight bytes at a time, for processors without a CRC instruction.
fn by_tables(mut state: u32, bytes: &[u8]) -> u32 {
    let mut words = bytes.chunks_exact(8);
    for word in &mut words {
        let mut next = 0;
        for (n, &byte) in word.iter().enumerate() {
            let mixed = if n < 4 { byte ^ (state >> (8 * n)) as u8 } else { byte };
            next ^= TABLES[7 - n][usize::from(mixed)];
        }
        state = next;
    }
    for &byte in words.remainder() {
        state = (state >> 8) ^ TABLES[0][usize::from(byte ^ state as u8)];
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, bit by bit.
    fn by_definition(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0, |state, &byte| {
            (0..8).fold(state ^ u32::from(byte), |s, _| (s >> 1) ^ (POLYNOMIAL * (s & 1)))
        })
    }

    proptest! {
        #[test]
        fn all_ways_agree(bytes in prop::collection::vec(any::<u8>(), 0..10_000), cut: prop::sample::Index) {
            let expected = by_definition(&bytes);
            prop_assert_eq!(crc32c(&bytes), expected);
            prop_assert_eq!(!by_tables(!0, &bytes), expected);
            let (first, rest) = bytes.split_at(cut.index(bytes.len() + 1));
            prop_assert_eq!(crc32c_append(crc32c(first), rest), expected);
            for past_caches in [false, true] {
                let mut copy = vec![0; bytes.len()];
                let (to_first, to_rest) = copy.split_at_mut(first.len());
                let crc = copy_crc32c(0, first, to_first, past_caches);
                prop_assert_eq!(copy_crc32c(crc, rest, to_rest, past_caches), expected);
                prop_assert_eq!(&copy, &bytes);
            }
        }
    }

    #[test]
    fn many_blocks_agree() {
        let bytes: Vec<u8> = (0..200_001u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        assert_eq!(crc32c(&bytes), by_definition(&bytes));
        for past_caches in [false, true] {
            let mut copy = vec![0; bytes.len()];
            assert_eq!(copy_crc32c(0, &bytes, &mut copy, past_caches), by_definition(&bytes));
            assert_eq!(copy, bytes);
        }
    }
}
