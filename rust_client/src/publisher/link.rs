//! Estimates the rate of a link to a worker, and the time the worker takes to decode patches.

use crate::transfer::Time;

// After this many more bytes, an older measurement of a link has half its weight.
const LINK_BYTES: f64 = (1 << 26) as f64;
// The rate of a link is at most this multiple of the rate at which versions were applied.
const AT_MOST: f64 = 3.0;

/// Estimates, from reports, of the rate of a link and of the decoding at its worker. Later reports
/// have more weight.
///
/// A report is weighted by the time since the previous one. In a plain mean, reports that follow
/// each other at once would have too much weight.
#[derive(Default)]
pub struct Link {
    carried: f64, // bytes
    waited: f64,  // seconds
    least: f64,   // bytes per second at which versions arrived and were applied
    decode: [Option<f64>; 2],
    warm: bool, // the worker has decoded a patch before, and has memory for that
}

impl Link {
    /// Returns the rate of the link in bytes per second; infinite if unknown.
    ///
    /// A rate is measured between two progress reports of one version. A small version arrives
    /// before its second report. Without a measured rate, the estimate is a multiple of the rate at
    /// which versions were applied: the link may be faster than that rate, since a worker may spend
    /// most of the time from publish to `applied` on other work.
    pub fn rate(&self) -> f64 {
        if self.waited > 0.0 {
            self.carried / self.waited
        } else if self.least > 0.0 {
            AT_MOST * self.least
        } else {
            f64::INFINITY
        }
    }

    /// Returns the seconds to decode a patch without classes and with classes, per byte of an
    /// unchanged version. `None` if the worker has reported no such time.
    pub fn decode(&self) -> [Option<f64>; 2] {
        self.decode
    }

    /// Records that the link carried `nbytes` bytes in the time `took`.
    pub fn learn(&mut self, nbytes: u64, took: Time) {
        let nbytes = nbytes as f64;
        let kept = 0.5f64.powf(nbytes / LINK_BYTES);
        self.carried = kept * self.carried + nbytes;
        self.waited = kept * self.waited + took.as_secs_f64();
    }

    /// Records that a version of `nbytes` bytes was applied the time `took` after its publish. A
    /// busy worker reports late, so one slow version at most halves the estimate.
    pub fn observe_rate(&mut self, nbytes: u64, took: Time) {
        if !took.is_zero() {
            self.least = (nbytes as f64 / took.as_secs_f64()).max(self.least / 2.0);
        }
    }

    /// Records that decoding a patch of cost `work` took `micros` microseconds (0: unknown) (D11).
    /// The first patch is ignored: it takes far longer, because its memory is new.
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
        link.observe_rate(1000, Duration::from_secs(1));
        link.observe_rate(10, Duration::from_secs(1)); // a busy worker
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
        link.decoded(0, 1e6, true); // not reported
        link.decoded(1_000_000, 1e6, true);
        link.decoded(3_000_000, 1e6, true);
        assert_eq!(link.decode(), [None, Some(2e-6)]);
    }
}
