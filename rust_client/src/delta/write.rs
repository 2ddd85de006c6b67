//! Writes the codes of a patch into a bit stream. In each byte, the lowest bit comes first.

/// The bits written so far.
#[derive(Default)]
pub struct Writer {
    out: Vec<u8>,
    bits: u64,
    count: u32, // number of `bits` that are not in `out` yet, below 32
}

impl Writer {
    /// Writes a number of a fixed width, at most 32 bits.
    #[inline]
    pub fn number(&mut self, value: u32, width: u32) {
        self.bits |= u64::from(value) << self.count;
        self.count += width;
        if self.count >= 32 {
            self.out.extend_from_slice(&(self.bits as u32).to_le_bytes());
            self.bits >>= 32;
            self.count -= 32;
        }
    }

    #[inline]
    fn unary(&mut self, mut value: u32) {
        while value > 31 {
            self.number(0, 31);
            value -= 31;
        }
        self.number(1 << value, value + 1);
    }

    /// Writes values in Rice codes of parameter `k`.
    pub fn rice(&mut self, values: &[u32], k: u32) {
        values.iter().for_each(|value| self.unary(value >> k));
        if k > 0 {
            values.iter().for_each(|value| self.number(value & ((1 << k) - 1), k));
        }
    }

    /// Writes numbers below 2^16 in Exp-Golomb codes of parameter `k`.
    pub fn golomb(&mut self, values: &[u32], k: u32) {
        values.iter().for_each(|value| self.unary(bit_length(value + (1 << k)) - 1 - k));
        for value in values {
            let shifted = value + (1 << k);
            let width = bit_length(shifted) - 1;
            self.number(shifted - (1 << width), width);
        }
    }

    /// Writes a bit for each step: 1 if the step is negative.
    pub fn signs(&mut self, steps: &[i32]) {
        for some in steps.chunks(32) {
            let bits = some.iter().rev().fold(0, |bits, &step| bits << 1 | u32::from(step < 0));
            self.number(bits, some.len() as u32);
        }
    }

    /// Returns the bytes. Zeros fill the last byte.
    pub fn end(mut self) -> Vec<u8> {
        let nbytes = (self.count as usize + 7) / 8;
        self.out.extend_from_slice(&self.bits.to_le_bytes()[..nbytes]);
        self.out
    }
}

/// Returns the number of bits of a number without leading zeros; 0 for 0.
#[inline]
pub fn bit_length(value: u32) -> u32 {
    32 - value.leading_zeros()
}
