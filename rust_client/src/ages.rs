//! Ages of the publishers whose weights run at a worker, or may yet be applied there.
//!
//! A publisher sends its age, and a worker reports the current age to other publishers. The younger
//! of two publishers has started later, whatever their clocks are set to.

use std::collections::BTreeMap;

use crate::limits::{EPOCHS_KEPT, INTEGER_MAX};
use crate::transfer::Time;

/// For each epoch: the publisher's age in milliseconds, and when that age was received.
#[derive(Default)]
pub struct Ages(BTreeMap<u64, (u64, Time)>);

impl Ages {
    /// Notes the age that the publisher of an epoch sent. Forgets the epochs before `applied`.
    pub fn heard(&mut self, epoch: u64, age_ms: u64, applied: u64, now: Time) {
        let age_ms = age_ms.max(self.of(epoch, now));
        self.0.retain(|&known, _| known >= applied && known != epoch);
        if self.0.len() >= EPOCHS_KEPT {
            let last = *self.0.keys().next_back().unwrap_or(&epoch);
            self.0.remove(&last);
        }
        self.0.insert(epoch, (age_ms, now));
    }

    /// Returns the milliseconds for which the publisher of an epoch has run at least; 0 if unknown.
    pub fn of(&self, epoch: u64, now: Time) -> u64 {
        let (age_ms, at) = match self.0.get(&epoch) {
            Some(&known) => known,
            None => return 0,
        };
        let since = now.saturating_sub(at).as_millis().min(u128::from(INTEGER_MAX)) as u64;
        age_ms.saturating_add(since).min(INTEGER_MAX)
    }
}
