//! Estimates the rate of the link to a worker, and the time that the worker needs to decode patches.

use crate::transfer::Time;

// Each measurement has half its weight after the link has carried this many more bytes.
const LINK_BYTES: f64 = (1 << 26) as f64;
// The rate of a link is assumed to be this multiple of the rate at which versions are applied.
const RATE_FACTOR: f64 = 3.0;

/// Estimates, from a worker's reports, the rate of its link and the speed of its decoding.
///
/// The rate is a quotient of sums of bytes and of seconds, in which newer reports have more weight. In a
/// mean of the rates of single reports, reports that follow each other at once would count too much.
#[derive(Default)]
pub struct Link {
    bytes: f64,        // carried, weighted
    seconds: f64,      // in which these bytes were carried, weighted
    applied_rate: f64, // bytes per second at which versions arrived and were applied
    decode: [Option<f64>; 2],
    decoded_before: bool, // and so the worker has memory for decoding
}

impl Link {
    /// Returns the rate of the link in bytes per second; infinite if unknown.
    ///
    /// The rate is measured between two progress reports of one version. A small version arrives before
    /// its second report. Without a measurement, the estimate is `RATE_FACTOR` times the rate at which
    /// versions were applied: a worker may spend most of the time from publish to `applied` on other
    /// work, so the link may be faster.
    pub fn rate(&self) -> f64 {
        if self.seconds > 0.0 {
            self.bytes / self.seconds
        } else if self.applied_rate > 0.0 {
            RATE_FACTOR * self.applied_rate
        } else {
            f64::INFINITY
        }
    }

    /// Returns the seconds per byte of a patch's cost to decode patches without classes, and patches with
    /// classes. `None` if the worker has reported no such time.
    pub fn decode(&self) -> [Option<f64>; 2] {
        self.decode
    }

    /// Records that the link carried `nbytes` bytes in the time `took`.
    pub fn record_transfer(&mut self, nbytes: u64, took: Time) {
        let nbytes = nbytes as f64;
        let kept = 0.5f64.powf(nbytes / LINK_BYTES);
        self.bytes = kept * self.bytes + nbytes;
        self.seconds = kept * self.seconds + took.as_secs_f64();
    }

    /// Records that a version of `nbytes` bytes was applied, and that this `took` so long from the
    /// publish on. One slow version at most halves the estimate, because a busy worker reports late.
    pub fn observe_rate(&mut self, nbytes: u64, took: Time) {
        if !took.is_zero() {
            self.applied_rate = (nbytes as f64 / took.as_secs_f64()).max(self.applied_rate / 2.0);
        }
    }

    /// Records that a patch of cost `work` was decoded in `micros` microseconds; 0 if unknown (D11).
    /// Ignores the first patch, which takes far longer, because the worker allocates memory for it.
    pub fn record_decode(&mut self, micros: u64, work: f64, classes: bool) {
        let decoded_before = std::mem::replace(&mut self.decoded_before, true);
        if decoded_before && micros > 0 && work > 0.0 {
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
        assert_eq!(link.rate(), RATE_FACTOR * 500.0);
        link.record_transfer(1 << 20, Duration::from_secs(1));
        assert_eq!(link.rate(), (1 << 20) as f64);
        link.record_transfer(1 << 30, Duration::from_millis(1));
        assert!(link.rate() > 1e9, "what it carried last counts most");
    }

    #[test]
    fn the_first_patch_teaches_nothing_of_decoding() {
        let mut link = Link::default();
        link.record_decode(9_000_000, 1e6, true);
        assert_eq!(link.decode(), [None, None]);
        link.record_decode(0, 1e6, true); // not reported
        link.record_decode(1_000_000, 1e6, true);
        link.record_decode(3_000_000, 1e6, true);
        assert_eq!(link.decode(), [None, Some(2e-6)]);
    }
}
