//! Computes CRC-32C with the processor's own instructions.
//!
//! The instruction adds 8 bytes to a CRC. Its result is available after three cycles, but the next
//! instruction can start after one cycle. So three CRCs are computed at once, each over a third of
//! a block. To combine them, each but the last is multiplied by a power of x modulo the polynomial,
//! which appends zeros for the later thirds (`tests` show the origin of the constants).
//!
//! The functions take and return the state of a CRC, without the inversions at the beginning and
//! the end.

/// Returns the state of a CRC after some more bytes; `None` if this processor lacks the
/// instructions.
#[inline]
pub fn update(state: u32, bytes: &[u8]) -> Option<u32> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sse4.2") && is_x86_feature_detected!("pclmulqdq") {
        // SAFETY: both instruction sets were just detected.
        return Some(unsafe { x86_64::update(state, bytes) });
    }
    #[cfg(target_arch = "aarch64")]
    if std::arch::is_aarch64_feature_detected!("crc") {
        // SAFETY: the instructions were just detected.
        return Some(unsafe { aarch64::update(state, bytes) });
    }
    let _ = (state, bytes);
    None
}

/// Copies bytes past the caches, for data that is larger than the caches and not read soon. Each
/// byte is read once. Returns the state of the CRC after the bytes. Returns `None`, and copies
/// nothing, if there are too few bytes or this processor lacks the instructions.
///
/// # Panics
///
/// If `from` and `to` differ in length.
#[inline]
pub fn stream(state: u32, from: &[u8], to: &mut [u8]) -> Option<u32> {
    assert_eq!(from.len(), to.len(), "source and destination differ in length");
    #[cfg(target_arch = "x86_64")]
    if from.len() >= folding::LEAST
        && is_x86_feature_detected!("sse4.2")
        && is_x86_feature_detected!("pclmulqdq")
    {
        // SAFETY: both instruction sets were just detected, and there are enough bytes.
        return Some(unsafe { folding::stream(state, from, to) });
    }
    let _ = (state, to);
    None
}

/// Defines `update` for a processor that has the functions `word` (8 bytes), `byte` and `carry`.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! three_streams {
    ($feature:literal, $block:expr) => {
        #[target_feature(enable = $feature)]
        pub unsafe fn update(mut state: u32, bytes: &[u8]) -> u32 {
            let blocks = bytes.chunks_exact(3 * $block);
            let rest = blocks.remainder();
            for block in blocks {
                let (mut a, mut b, mut c) = (state, 0, 0);
                let (first, others) = block.split_at($block);
                let (second, third) = others.split_at($block);
                let words = first.chunks_exact(8).zip(second.chunks_exact(8));
                for ((x, y), z) in words.zip(third.chunks_exact(8)) {
                    a = word(a, x);
                    b = word(b, y);
                    c = word(c, z);
                }
                state = carry(a, OVER_TWO) ^ carry(b, OVER_ONE) ^ c;
            }
            let words = rest.chunks_exact(8);
            let last = words.remainder();
            for x in words {
                state = word(state, x);
            }
            for &x in last {
                state = byte(state, x);
            }
            state
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::x86_64::*;
    use std::convert::TryInto;

    pub const BLOCK: usize = 1024;
    pub const OVER_ONE: u32 = 0x1700_76fa; // x^(8 * BLOCK - 33)
    pub const OVER_TWO: u32 = 0xa51b_6135; // x^(16 * BLOCK - 33)

    three_streams!("sse4.2,pclmulqdq", BLOCK);

    #[inline]
    #[target_feature(enable = "sse4.2")]
    unsafe fn word(state: u32, bytes: &[u8]) -> u32 {
        let bytes: [u8; 8] = bytes.try_into().unwrap_or_default();
        _mm_crc32_u64(u64::from(state), u64::from_le_bytes(bytes)) as u32
    }

    #[inline]
    #[target_feature(enable = "sse4.2")]
    unsafe fn byte(state: u32, byte: u8) -> u32 {
        _mm_crc32_u8(state, byte)
    }

    /// Multiplies a state by a power of x. The product has 63 bits and is shifted by one bit, and
    /// the instruction appends 32 bits before it reduces the product modulo the polynomial. Hence
    /// the 33 in the constants.
    #[inline]
    #[target_feature(enable = "sse4.2,pclmulqdq")]
    unsafe fn carry(state: u32, power: u32) -> u32 {
        let one = _mm_cvtsi32_si128(state as i32);
        let other = _mm_cvtsi32_si128(power as i32);
        let product = _mm_cvtsi128_si64(_mm_clmulepi64_si128::<0>(one, other));
        _mm_crc32_u64(0, product as u64) as u32
    }
}

/// Copies bytes and computes their CRC in one pass. The CRC stays the same if some bytes are
/// replaced by zeros, and their product with x^1024 modulo the polynomial is added to the bytes 128
/// further on. A carry-less multiplication makes this product for 64 bits. So eight sums of 16
/// bytes are kept, and each is folded onto the bytes 128 further on. (V. Gopal et al., "Fast CRC
/// Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009.)
#[cfg(target_arch = "x86_64")]
mod folding {
    use super::x86_64::update;
    use std::arch::x86_64::*;

    const SUMS: usize = 8;
    const WIDTH: usize = 16 * SUMS;
    pub const LEAST: usize = 2 * WIDTH + 16;
    pub const LOW: u32 = 0x6992_cea2; // x^(8 * WIDTH + 31)
    pub const HIGH: u32 = 0x0d3b_6092; // x^(8 * WIDTH - 33)

    /// # Safety
    ///
    /// `from` must have at least `LEAST` bytes, and `to` must have as many.
    #[target_feature(enable = "sse4.2,pclmulqdq")]
    pub unsafe fn stream(state: u32, from: &[u8], to: &mut [u8]) -> u32 {
        let mut at = to.as_ptr().align_offset(16).min(15); // the stores need alignment
        to[..at].copy_from_slice(&from[..at]);
        let state = update(state, &to[..at]);
        let by = _mm_set_epi64x(i64::from(HIGH), i64::from(LOW));
        let (begin, out) = (from.as_ptr(), to.as_mut_ptr());
        // SAFETY: both sides have `SUMS` times 16 bytes from `at` on.
        let put = |at: usize| unsafe {
            let bytes = _mm_loadu_si128(begin.add(at).cast());
            _mm_stream_si128(out.add(at).cast(), bytes);
            bytes
        };
        let mut sums = [_mm_cvtsi32_si128(state as i32); SUMS];
        for (sum, n) in sums.iter_mut().zip(0..) {
            let bytes = put(at + 16 * n);
            *sum = if n == 0 { _mm_xor_si128(*sum, bytes) } else { bytes };
        }
        at += WIDTH;
        while from.len() - at >= WIDTH {
            for (sum, n) in sums.iter_mut().zip(0..) {
                let (low, high) =
                    (_mm_clmulepi64_si128::<0x00>(*sum, by), _mm_clmulepi64_si128::<0x11>(*sum, by));
                *sum = _mm_xor_si128(put(at + 16 * n), _mm_xor_si128(low, high));
            }
            at += WIDTH;
        }
        _mm_sfence(); // later stores must not become visible before these
        let mut folded = [0; WIDTH];
        for (sum, bytes) in sums.iter().zip(folded.chunks_exact_mut(16)) {
            _mm_storeu_si128(bytes.as_mut_ptr().cast(), *sum);
        }
        to[at..].copy_from_slice(&from[at..]);
        update(update(0, &folded), &to[at..])
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use std::arch::asm;
    use std::convert::TryInto;

    pub const BLOCK: usize = 8192;
    pub const OVER_ONE: u32 = 0x54a8_6326; // x^(8 * BLOCK - 33)
    pub const OVER_TWO: u32 = 0x1dc4_03cc; // x^(16 * BLOCK - 33)

    three_streams!("crc", BLOCK);

    // The intrinsics are newer than the oldest compiler that this crate supports.
    #[inline]
    #[target_feature(enable = "crc")]
    unsafe fn word(mut state: u32, bytes: &[u8]) -> u32 {
        let bytes: [u8; 8] = bytes.try_into().unwrap_or_default();
        asm!("crc32cx {0:w}, {0:w}, {1:x}", inout(reg) state, in(reg) u64::from_le_bytes(bytes),
             options(pure, nomem, nostack, preserves_flags));
        state
    }

    #[inline]
    #[target_feature(enable = "crc")]
    unsafe fn byte(mut state: u32, byte: u8) -> u32 {
        asm!("crc32cb {0:w}, {0:w}, {1:w}", inout(reg) state, in(reg) u32::from(byte),
             options(pure, nomem, nostack, preserves_flags));
        state
    }

    /// Multiplies by a power of x, as on x86_64, but bit by bit: blocks are large here.
    #[inline]
    #[target_feature(enable = "crc")]
    unsafe fn carry(state: u32, power: u32) -> u32 {
        let mut product = 0u64;
        for bit in 0..32 {
            product ^= (u64::from(state) << bit) & 0u64.wrapping_sub(u64::from(power >> bit & 1));
        }
        word(0, &product.to_le_bytes())
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[cfg(test)]
mod tests {
    #[cfg(target_arch = "aarch64")]
    use super::aarch64::{BLOCK, OVER_ONE, OVER_TWO};
    #[cfg(target_arch = "x86_64")]
    use super::folding::{HIGH, LOW};
    #[cfg(target_arch = "x86_64")]
    use super::x86_64::{BLOCK, OVER_ONE, OVER_TWO};

    /// Returns x to this power, modulo the polynomial. The highest bit stands for 1.
    fn power_of_x(exponent: usize) -> u32 {
        (0..exponent).fold(1 << 31, |value: u32, _| (value >> 1) ^ (0x82f6_3b78 * (value & 1)))
    }

    #[test]
    fn the_constants_are_what_they_are_said_to_be() {
        assert_eq!(OVER_ONE, power_of_x(8 * BLOCK - 33));
        assert_eq!(OVER_TWO, power_of_x(16 * BLOCK - 33));
        #[cfg(target_arch = "x86_64")]
        assert_eq!([LOW, HIGH], [power_of_x(1024 + 31), power_of_x(1024 - 33)]);
    }
}
