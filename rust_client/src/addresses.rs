//! Chooses the control address that a worker uses. The addresses are in order of preference. (W37)
//!
//! A worker changes over to the next address when the present one fails, and returns to the first
//! one when a probe shows that a publisher answers there again.

use crate::limits::Timing;
use crate::transfer::Time;
use std::time::Duration;

const RETURN_MIN: Duration = Duration::from_secs(1); // least pause before a probe of the first address
const RETURN_MAX: Duration = Duration::from_secs(60); // greatest pause, if sessions there end soon

/// The choice among a worker's addresses.
pub struct Addresses {
    count: usize,
    present: usize,
    hello_retry: Duration,
    return_after: Duration,
    failed: usize,          // tries in a row without a session of `hello_retry` or longer
    since: Option<Time>,    // begin of the session at the present address
    returned: Option<Time>, // when the worker returned to the first address, until it leaves again
    pause: Duration,        // before the next probe
    probe_at: Option<Time>, // None: no probe is due later, or one is in flight
}

impl Addresses {
    /// Creates the choice among `count` addresses. The first one is the present address.
    pub fn new(count: usize, timing: &Timing) -> Addresses {
        let return_after = timing.lost_after.max(RETURN_MIN);
        Addresses {
            count,
            present: 0,
            hello_retry: timing.hello_retry,
            return_after,
            failed: 0,
            since: None,
            returned: None,
            pause: return_after,
            probe_at: None,
        }
    }

    /// True if there is an address to change over to.
    pub fn are_several(&self) -> bool {
        self.count > 1
    }

    /// True if the present address is the first one.
    pub fn is_first(&self) -> bool {
        self.present == 0
    }

    /// Notes that a session begins at the present address.
    pub fn joined(&mut self, now: Time) {
        self.since = Some(now);
        self.set_probe(now);
    }

    fn set_probe(&mut self, now: Time) {
        self.probe_at = if self.present > 0 { now.checked_add(self.pause) } else { None };
    }

    /// Changes over to the next address. Returns its index, and the pause before it is dialled.
    pub fn advance(&mut self, now: Time) -> (usize, Duration) {
        let lasted = self.since.map_or(Duration::ZERO, |since| now.saturating_sub(since));
        if self.present == 0 {
            let returned = self.returned.take();
            let soon = |at| self.since.is_none() || now.saturating_sub(at) < self.return_after;
            if returned.map_or(false, soon) {
                self.pause = self.pause.saturating_mul(2).min(RETURN_MAX.max(self.return_after));
            } else if lasted >= self.return_after {
                self.pause = self.return_after;
            }
        }
        self.failed = if lasted < self.hello_retry { self.failed + 1 } else { 0 };
        self.go_to((self.present + 1) % self.count);
        if self.failed < self.count {
            return (self.present, Duration::ZERO);
        }
        self.failed = 0; // a round is over
        (self.present, self.hello_retry)
    }

    /// Makes the first address the present one. Returns its index, 0.
    pub fn go_back(&mut self, now: Time) -> usize {
        self.failed = 0;
        self.go_to(0);
        self.returned = Some(now);
        0
    }

    fn go_to(&mut self, address: usize) {
        self.present = address;
        (self.since, self.probe_at) = (None, None);
    }

    /// True if the first address must be probed now; after the probe, call `probed`.
    pub fn take_probe(&mut self, now: Time) -> bool {
        let due = self.probe_at.map_or(false, |at| now >= at);
        if due {
            self.probe_at = None;
        }
        due
    }

    /// Notes that a probe has ended. If the worker has a session at another address than the first,
    /// schedules the next probe.
    pub fn probed(&mut self, now: Time) {
        if self.since.is_some() {
            self.set_probe(now);
        }
    }
}
