//! Random numbers from a seed, and random changes of bytes.

/// SplitMix64.
pub struct Dice(u64);

/// What JSON, and this protocol, may trip over.
const WORDS: [&[u8]; 24] = [
    b"null",
    b"true",
    b"-0",
    b"-1",
    b"1.0",
    b"1e3",
    b"9007199254740991",
    b"9007199254740992",
    b"18446744073709551616",
    b"4294967295",
    b"67108864",
    b"1048576",
    b"{}",
    b"[]",
    b"\"\"",
    b"\"together\"",
    b"\"staged\"",
    b"\"m\"",
    b"\\ud800",
    b"\\u0000",
    b"\xff",
    b"{\"a\":",
    b",",
    b"\"",
];

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.roll() % bound.max(1) as u64) as usize
    }

    pub fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    /// Changes some bytes, now and then many.
    pub fn change(&mut self, bytes: &mut Vec<u8>, others: &[Vec<u8>]) {
        let times = if self.one_in(8) { 1 + self.below(30) } else { 1 + self.below(3) };
        for _ in 0..times {
            self.change_once(bytes, others);
        }
    }

    fn change_once(&mut self, bytes: &mut Vec<u8>, others: &[Vec<u8>]) {
        let at = self.below(bytes.len() + 1);
        let end = (at + 1 + self.below(8)).min(bytes.len());
        match self.below(7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
            1 if at < bytes.len() => bytes[at] = self.roll() as u8,
            2 if at < end => drop(bytes.drain(at..end)),
            3 => drop(bytes.splice(at..at, self.pick(&WORDS).iter().copied())),
            4 if at < end => drop(bytes.splice(at..end, self.pick(&WORDS).iter().copied())),
            5 => self.change_number(bytes),
            6 if !others.is_empty() => {
                let other = self.pick(others);
                let from = self.below(other.len() + 1);
                let to = (from + self.below(40)).min(other.len());
                drop(bytes.splice(at..at, other[from..to].iter().copied()));
            }
            _ => bytes.truncate(at),
        }
    }

    /// Replaces a number of a JSON text by another.
    fn change_number(&mut self, bytes: &mut Vec<u8>) {
        let starts: Vec<usize> = (1..bytes.len())
            .filter(|&at| bytes[at].is_ascii_digit() && matches!(bytes[at - 1], b':' | b',' | b'['))
            .collect();
        if starts.is_empty() {
            return;
        }
        let at = *self.pick(&starts);
        let end = bytes[at..].iter().position(|c| !c.is_ascii_digit()).map_or(bytes.len(), |n| at + n);
        let bits = self.below(64);
        let number = (self.roll() >> bits).to_string();
        drop(bytes.splice(at..end, number.into_bytes()));
    }
}
