//! Keeps the ages of the publishers whose versions run, or may still be applied, at this worker.
//!
//! A publisher sends its age, and a worker reports this publisher's current age to later
//! publishers. So publishers can be ordered by their starts, even if their hosts' clocks differ.

use std::collections::BTreeMap;

use crate::limits::{EPOCHS_KEPT, INTEGER_MAX};
use crate::transfer::Time;

/// For each epoch: the publisher's age in milliseconds, and when that age was received.
#[derive(Default)]
pub struct Ages(BTreeMap<u64, (u64, Time)>);

impl Ages {
    /// Records the age that the publisher of an epoch sent. Forgets the epochs before `applied`,
    /// which is the greatest epoch of applied versions.
    pub fn heard(&mut self, epoch: u64, age_ms: u64, applied: u64, now: Time) {
        let age_ms = age_ms.max(self.of(epoch, now));
        self.0.retain(|&known, _| known >= applied && known != epoch);
        if self.0.len() >= EPOCHS_KEPT {
            let last = *self.0.keys().next_back().unwrap_or(&epoch);
            self.0.remove(&last);
        }
        self.0.insert(epoch, (age_ms, now));
    }

    /// Returns the least possible age of the publisher of an epoch, in milliseconds; 0 if unknown.
    pub fn of(&self, epoch: u64, now: Time) -> u64 {
        let (age_ms, at) = match self.0.get(&epoch) {
            Some(&known) => known,
            None => return 0,
        };
        let since = now.saturating_sub(at).as_millis().min(u128::from(INTEGER_MAX)) as u64;
        age_ms.saturating_add(since).min(INTEGER_MAX)
    }
}
