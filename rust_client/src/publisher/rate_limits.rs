//! Limits how many messages peers may send to a publisher, and how many events they may cause.
//!
//! Reports and fetches of a worker advance a version, so they are free. Any other message takes units from
//! the token bucket of its control connection. If the bucket has too few units, the connection is closed. All
//! connections without a known worker share another bucket, which limits the messages that are parsed.

use super::effects::Identity;
use crate::messages::{FromWorker, ToPublisher};
use crate::transfer::Time;
use std::collections::HashMap;
use std::time::Duration;

/// The size of a bucket, and the units that flow into it each second.
#[derive(Clone, Copy)]
pub struct Rate(pub f64, pub f64);

const CONTROL_RATE: Rate = Rate(64.0, 32.0); // units of one connection, if pings are a second apart
const UNKNOWN_PEER_RATE: Rate = Rate(1024.0, 256.0); // messages of connections that have not joined
const NOTICES: Rate = Rate(16.0, 0.2); // events that one source, a worker or a key, can cause
const SOURCES_MAX: usize = 1024; // sources that have their own bucket; all others share one
const COST_LOW: f64 = 1.0; // a message with at most one answer
const COST_HIGH: f64 = 4.0; // a message that causes more work
const BYTES_PER_COST: usize = 1 << 14; // each further part of a message of this size costs the same again
const QUIET: Duration = Duration::from_secs(3); // without refused messages: the flood is over

/// A token bucket. A new bucket is full.
pub struct TokenBucket {
    updated_at: Time,
    spent: f64, // units that are missing from a full bucket
}

impl TokenBucket {
    pub fn new(now: Time) -> TokenBucket {
        TokenBucket { updated_at: now, spent: 0.0 }
    }

    /// Takes `count` units. If the bucket has fewer, takes none and returns false.
    pub fn take(&mut self, count: f64, Rate(burst, per_second): Rate, now: Time) -> bool {
        let refilled = now.saturating_sub(self.updated_at).as_secs_f64() * per_second;
        self.spent = (self.spent - refilled).max(0.0);
        self.updated_at = now;
        let enough = self.spent + count <= burst;
        self.spent += if enough { count } else { 0.0 };
        enough
    }

    /// True if the bucket is full: it then equals a new bucket, and need not be kept.
    pub fn is_full(&self, Rate(_, per_second): Rate, now: Time) -> bool {
        now.saturating_sub(self.updated_at).as_secs_f64() * per_second >= self.spent
    }
}

/// The token buckets of all control connections of one publisher.
pub struct RateLimits {
    control: Rate,
    unknown: TokenBucket,
    buckets: HashMap<Identity, TokenBucket>,
    refused_at: Option<Time>, // when a message was last refused, until `recovered`
}

impl RateLimits {
    pub fn new(ping: Duration) -> RateLimits {
        // Workers ping at the interval `ping`, which the welcome names.
        let faster = (1.0 / ping.as_secs_f64().max(0.001)).max(1.0);
        let control = Rate(CONTROL_RATE.0, CONTROL_RATE.1 * faster);
        RateLimits {
            control,
            unknown: TokenBucket::new(Time::ZERO),
            buckets: HashMap::new(),
            refused_at: None,
        }
    }

    /// True if one more message of a connection without a known worker may be parsed.
    pub fn allow_unknown(&mut self, now: Time) -> bool {
        let allowed = self.unknown.take(1.0, UNKNOWN_PEER_RATE, now);
        self.note_result(allowed, now)
    }

    /// Charges a connection for a message of this cost and of `nbytes` bytes. Returns false if the
    /// connection must be closed.
    pub fn allow(&mut self, from: &[u8], cost: f64, nbytes: usize, now: Time) -> bool {
        if cost == 0.0 {
            return true;
        }
        let cost = cost * (1 + nbytes / BYTES_PER_COST) as f64;
        let new_bucket = || TokenBucket::new(now);
        let allowed =
            self.buckets.entry(from.to_vec()).or_insert_with(new_bucket).take(cost, self.control, now);
        self.note_result(allowed, now)
    }

    fn note_result(&mut self, allowed: bool, now: Time) -> bool {
        self.refused_at = if allowed { self.refused_at } else { Some(now) };
        allowed
    }

    /// Returns true once after each flood: when no message has been refused for `QUIET`.
    pub fn recovered(&mut self, now: Time) -> bool {
        let over = self.refused_at.map_or(false, |at| now.saturating_sub(at) >= QUIET);
        self.refused_at = self.refused_at.filter(|_| !over);
        over
    }

    /// Drops the buckets that are full again.
    pub fn tick(&mut self, now: Time) {
        let control = self.control;
        self.buckets.retain(|_, bucket| !bucket.is_full(control, now));
    }
}

/// The token buckets of the sources of events.
#[derive(Default)]
pub struct Notices {
    buckets: HashMap<String, (TokenBucket, u64)>, // with the number of suppressed events
}

impl Notices {
    /// Takes a unit for an event of a source. Returns `None` if this event must be suppressed. Otherwise
    /// returns the number of events of the source that were suppressed since its last reported event.
    pub fn take(&mut self, source: &str, now: Time) -> Option<u64> {
        let known = self.buckets.contains_key(source) || self.buckets.len() < SOURCES_MAX;
        let source = if known { source } else { "" };
        let (bucket, suppressed) =
            self.buckets.entry(source.to_owned()).or_insert_with(|| (TokenBucket::new(now), 0));
        if bucket.take(1.0, NOTICES, now) {
            return Some(std::mem::take(suppressed));
        }
        *suppressed += 1;
        None
    }

    /// Drops the buckets that are full again.
    pub fn tick(&mut self, now: Time) {
        self.buckets.retain(|_, (bucket, _)| !bucket.is_full(NOTICES, now));
    }
}

/// Returns the units that a message costs; 0 if the message advances a version. `message` is `None` if it
/// was not parsed, or is malformed. `known` is true if a known worker owns the connection.
pub fn cost_of(message: Option<&ToPublisher>, known: bool) -> f64 {
    match message {
        None | Some(ToPublisher::Observer(_) | ToPublisher::Worker(FromWorker::Hello(_))) => COST_HIGH,
        // After a restart of the publisher, a worker may send many reports before it gets the first
        // refusal, so that reports of unknown workers are cheap.
        Some(_) if !known => COST_LOW,
        Some(ToPublisher::Worker(FromWorker::Ping(_) | FromWorker::Pong(_))) => COST_LOW,
        Some(ToPublisher::Worker(FromWorker::Bye(_) | FromWorker::Checked(_))) => COST_LOW,
        Some(_) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_of_many_events_hides_no_others() {
        let (mut notices, now) = (Notices::default(), Duration::from_secs(1));
        let told = (0..1000).filter(|_| notices.take("noisy", now).is_some()).count();
        assert_eq!((told, notices.take("other", now)), (16, Some(0)));
        assert_eq!(notices.take("noisy", now + Duration::from_secs(5)), Some(984), "and how many there were");
        assert_eq!(notices.take("noisy", now + Duration::from_secs(10)), Some(0), "once");
        for number in 0..2 * SOURCES_MAX {
            notices.take(&number.to_string(), now);
        }
        assert!(notices.buckets.len() <= SOURCES_MAX + 1);
        notices.tick(now + Duration::from_secs(100));
        assert!(notices.buckets.is_empty());
    }

    #[test]
    fn the_end_of_a_flood_is_reported_once() {
        let mut limits = RateLimits::new(Duration::from_secs(1));
        let floods = |limits: &mut RateLimits, now| while limits.allow(b"peer", COST_HIGH, 0, now) {};
        let at = Duration::from_secs;
        assert!(!limits.recovered(at(9)), "there was none");
        floods(&mut limits, at(10));
        assert!(!limits.recovered(at(12)));
        floods(&mut limits, at(12));
        assert!(!limits.recovered(at(14)), "it went on");
        assert!(limits.recovered(at(15)) && !limits.recovered(at(16)));
        while limits.allow_unknown(at(20)) {}
        assert!(limits.recovered(at(30)), "a flood of unknown peers is one, too");
    }
}
