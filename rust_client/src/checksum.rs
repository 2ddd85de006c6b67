//! CRC-32C (Castagnoli), the checksum of every chunk.

use crate::raw::crc;

/// Returns the CRC-32C of some bytes.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc32c_append(0, bytes)
}

/// Returns the CRC-32C of bytes of which the first part has this one, and this is the rest.
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    !crc::update(!crc, bytes).unwrap_or_else(|| by_tables(!crc, bytes))
}

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

/// Eight bytes at a time, for processors without an instruction for it.
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
        }
    }

    #[test]
    fn many_blocks_agree() {
        let bytes: Vec<u8> = (0..200_001u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        assert_eq!(crc32c(&bytes), by_definition(&bytes));
    }
}
