//! Reads the codes of a patch from a bit stream. In each byte, the lowest bit comes first.

use super::Fault;
use std::convert::TryInto;

const PEEKED: u32 = 57; // 64, less the bits before the next one in its byte
const GOLOMB_BITS_MAX: u32 = 16; // larger sizes do not fit a step
const EARLY: Fault = "it ends early";

/// Returns the value of a little-endian number.
pub fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// Reads bits from first to last.
pub struct Reader<'a> {
    data: &'a [u8],
    at: usize, // number of bits read
}

impl<'a> Reader<'a> {
    pub fn new(data: &'a [u8]) -> Reader<'a> {
        Reader { data, at: 0 }
    }

    /// Returns the number of unread bits; 0 if a code extended beyond the end.
    pub fn remaining(&self) -> usize {
        (8 * self.data.len()).saturating_sub(self.at)
    }

    /// Returns at least the next `PEEKED` bits; those beyond the end are zeros.
    #[inline]
    fn peek(&self) -> u64 {
        let byte = self.at / 8;
        let word = match self.data.get(byte..byte + 8).and_then(|bytes| bytes.try_into().ok()) {
            Some(bytes) => u64::from_le_bytes(bytes),
            None => number(self.data.get(byte..).unwrap_or_default()),
        };
        word >> (self.at % 8)
    }

    /// Reads `width` bits, at most 32. The caller has checked that so many remain.
    #[inline]
    fn take(&mut self, width: u32) -> u32 {
        let value = self.peek() & ((1 << width) - 1);
        self.at += width as usize;
        value as u32
    }

    fn require(&self, bits: usize) -> Result<(), Fault> {
        if bits <= self.remaining() {
            Ok(())
        } else {
            Err(EARLY)
        }
    }

    /// Returns the next number of a fixed width, at most 32 bits.
    pub fn number(&mut self, width: u32) -> Result<u32, Fault> {
        self.require(width as usize)?;
        Ok(self.take(width))
    }

    /// Reads a unary code: the number of clear bits before the next set bit. Fails if above `most`.
    #[inline]
    fn unary(&mut self, most: u32) -> Result<u32, Fault> {
        let mut value = 0;
        loop {
            let zeros = (self.peek() | 1 << PEEKED).trailing_zeros();
            value += zeros;
            if value > most {
                return Err("a code stands for a number above its limit");
            }
            if zeros < PEEKED {
                self.at += zeros as usize + 1; // not beyond the end, where all bits are zeros
                return Ok(value);
            }
            self.at += zeros as usize;
            self.require(1).map_err(|_| "a unary code has no end")?;
        }
    }

    /// Reads `count` positions and appends them to `out`. The gaps between positions have Rice
    /// codes with the parameter `k`. Every position must be below `most`.
    pub fn positions(&mut self, count: usize, k: u32, most: usize, out: &mut Vec<u32>) -> Result<(), Fault> {
        let begin = out.len();
        for _ in 0..count {
            out.push(self.unary((most >> k) as u32)? << k);
        }
        self.require(count * k as usize)?;
        let mut next = 0;
        for position in &mut out[begin..] {
            *position += next + self.take(k);
            next = *position + 1; // at most 2^20, since the previous position was below `most`
            if next as usize > most {
                return Err("a gap leads past the end");
            }
        }
        Ok(())
    }

    /// Reads signs: appends 1 for each clear bit, and -1 for each set bit.
    pub fn signs(&mut self, count: usize, out: &mut Vec<i32>) -> Result<(), Fault> {
        self.require(count)?;
        out.extend((self.at..self.at + count).map(|at| 1 - 2 * i32::from(self.data[at / 8] >> (at % 8) & 1)));
        self.at += count;
        Ok(())
    }

    /// Replaces the content of `out` with the next `count` numbers, in Exp-Golomb codes.
    pub fn golomb(&mut self, count: usize, k: u32, out: &mut Vec<u32>) -> Result<(), Fault> {
        out.clear();
        let mut bits = 0;
        for _ in 0..count {
            let width = k + self.unary(GOLOMB_BITS_MAX - k)?;
            bits += width as usize;
            out.push(width);
        }
        self.require(bits)?;
        for value in out {
            let width = *value;
            *value = self.take(width) + (1 << width) - (1 << k);
        }
        Ok(())
    }

    /// Checks that the unread bits of the last byte are zero. Returns the number of bytes read,
    /// including that byte.
    pub fn check_padding(&self) -> Result<usize, Fault> {
        let padding = self.at.wrapping_neg() % 8;
        if self.peek() & ((1 << padding) - 1) == 0 {
            Ok((self.at + padding) / 8)
        } else {
            Err("the bits after its codes are not zero")
        }
    }

    /// Checks that no bytes follow the last code.
    pub fn check_end(&self) -> Result<(), Fault> {
        if self.check_padding()? == self.data.len() {
            Ok(())
        } else {
            Err("there are bytes after its codes")
        }
    }
}
