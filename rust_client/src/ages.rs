//! Ages of the publishers whose weights run at a worker, or may yet be applied there.
//!
//! A publisher sends its age, and a worker reports the current age to other publishers: the younger
//! of two publishers started later, whatever their clocks are set to.

use std::collections::BTreeMap;

use crate::limits::{EPOCHS_KEPT, INTEGER_MAX};
use crate::transfer::Time;

/// By epoch: an age in milliseconds, and when it was received.
#[derive(Default)]
pub struct Ages(BTreeMap<u64, (u64, Time)>);

impl Ages {
    /// Notes the age that the publisher of an epoch sent; weights of the epoch `applied` run here.
    pub fn heard(&mut self, epoch: u64, age_ms: u64, applied: u64, now: Time) {
        let age_ms = age_ms.max(self.of(epoch, now));
        self.0.retain(|&known, _| known >= applied && known != epoch);
        if self.0.len() >= EPOCHS_KEPT {
            let last = *self.0.keys().next_back().unwrap_or(&epoch);
            self.0.remove(&last);
        }
        self.0.insert(epoch, (age_ms, now));
    }

    /// Returns for how many milliseconds, at least, the publisher of an epoch has run.
    pub fn of(&self, epoch: u64, now: Time) -> u64 {
        let (age_ms, at) = match self.0.get(&epoch) {
            Some(&known) => known,
            None => return 0,
        };
        let since = now.saturating_sub(at).as_millis().min(u128::from(INTEGER_MAX)) as u64;
        age_ms.saturating_add(since).min(INTEGER_MAX)
    }
}
