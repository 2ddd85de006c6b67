//! How much the link to a worker carries, and how long the worker takes to decode patches.

use crate::transfer::Time;

const LINK_BYTES: f64 = (1 << 26) as f64; // half of what is believed of a link is of the last so many that it carried
const AT_MOST: f64 = 3.0; // times as fast as versions were there is what a link is taken for

/// What words of what has arrived say: the later ones weigh more.
///
/// Each word stands for as long as it was waited for. The mean of their rates would be ruled by words that come in
/// pairs, as an interval's and an answer do: the second is a moment later.
#[derive(Default)]
pub struct Link {
    carried: f64, // bytes
    waited: f64,  // seconds
    least: f64,   // bytes a second, at which some version was there and applied
    decode: [Option<f64>; 2],
    warm: bool, // it has decoded a patch, and has the memory for that
}

impl Link {
    /// Bytes a second; infinite if that is not known.
    ///
    /// Versions may be too small for two words on their way. Then it is some times that at which they were there: most
    /// of the time may have been taken by anything else.
    pub fn rate(&self) -> f64 {
        if self.waited > 0.0 {
            self.carried / self.waited
        } else if self.least > 0.0 {
            AT_MOST * self.least
        } else {
            f64::INFINITY
        }
    }

    /// Seconds that decoding takes, for each byte of a version of which nothing changes: without classes and with them,
    /// as far as the worker has said.
    pub fn decode(&self) -> [Option<f64>; 2] {
        self.decode
    }

    /// It took so long to carry so much.
    pub fn learn(&mut self, nbytes: u64, took: Time) {
        let nbytes = nbytes as f64;
        let kept = 0.5f64.powf(nbytes / LINK_BYTES);
        self.carried = kept * self.carried + nbytes;
        self.waited = kept * self.waited + took.as_secs_f64();
    }

    /// A version was there that long after it was published, and applied. Who was busy says so late: one slow version in
    /// between says nothing.
    pub fn brought(&mut self, nbytes: u64, took: Time) {
        if !took.is_zero() {
            self.least = (nbytes as f64 / took.as_secs_f64()).max(self.least / 2.0);
        }
    }

    /// So long it took to decode a patch of so much work, if it says that (D11). The first one takes longer by far, as
    /// its memory is new: nothing is learned from that.
    pub fn decoded(&mut self, micros: u64, work: f64, classes: bool) {
        let warm = std::mem::replace(&mut self.warm, true);
        if warm && micros > 0 && work > 0.0 {
            let pace = micros as f64 / 1e6 / work;
            let known = &mut self.decode[usize::from(classes)];
            *known = Some((known.unwrap_or(pace) + pace) / 2.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_rate_is_what_words_of_arrivals_say_and_else_some_times_what_versions_took() {
        let mut link = Link::default();
        assert!(link.rate().is_infinite());
        link.brought(1000, Duration::from_secs(1));
        link.brought(10, Duration::from_secs(1)); // it was busy
        assert_eq!(link.rate(), AT_MOST * 500.0);
        link.learn(1 << 20, Duration::from_secs(1));
        assert_eq!(link.rate(), (1 << 20) as f64);
        link.learn(1 << 30, Duration::from_millis(1));
        assert!(link.rate() > 1e9, "what it carried last counts most");
    }

    #[test]
    fn the_first_patch_teaches_nothing_of_decoding() {
        let mut link = Link::default();
        link.decoded(9_000_000, 1e6, true);
        assert_eq!(link.decode(), [None, None]);
        link.decoded(0, 1e6, true); // it does not say
        link.decoded(1_000_000, 1e6, true);
        link.decoded(3_000_000, 1e6, true);
        assert_eq!(link.decode(), [None, Some(2e-6)]);
    }
}
