//! Decides when a worker requests a model's latest version, once a message names that version (W4).
//!
//! After a failure that may not recur, the worker waits before the next try. Each pause is doubled.

use crate::effects::Effect;
use crate::limits::Timing;
use crate::messages::{Fetch, FromWorker};
use crate::phases::{Lack, Mode, Phase};
use crate::transfer::{Key, Time};
use crate::version_store::VersionStore;
use std::time::Duration;

/// Plans the requests for announcements of one model.
pub struct FetchPlanner {
    model: String,
    timing: Timing,
    latest_at: Option<Time>, // when the latest announcement was requested
    answered: Option<Time>,  // send time of the last ping that was answered
    backoff_key: Key,        // version that failed, and may be tried again after a pause
    backoff_until: Time,     // when that version may be tried again
    backoff_pause: Duration, // the last pause of that version
}

impl FetchPlanner {
    pub fn new(model: &str, timing: Timing) -> FetchPlanner {
        FetchPlanner {
            model: model.to_owned(),
            timing,
            latest_at: None,
            answered: None,
            backoff_key: (0, 0),
            backoff_until: Time::ZERO,
            backoff_pause: Duration::ZERO,
        }
    }

    /// Begins a session: the next request need not wait.
    pub fn reconnected(&mut self) {
        self.latest_at = None;
    }

    /// Requests the latest version if a beacon, a welcome or a stray chunk names a new one.
    pub fn hear_of(&mut self, versions: &VersionStore, epoch: u64, version: u64, now: Time) -> Vec<Effect> {
        let key = (epoch, version); // W4
        if version == 0 || key <= versions.newest() || versions.is_rejected(key) {
            return Vec::new();
        }
        match versions.in_phase(Phase::Arriving) {
            Some(entry) if key <= entry.key() || versions.mode() == Mode::CatchingUp => Vec::new(), // W26
            _ if awaited_layout(versions).map_or(false, |awaited| key <= awaited) => Vec::new(),    // W7
            _ if key <= self.backoff_key && now < self.backoff_until => Vec::new(),                 // W36
            _ => self.request_latest(versions, epoch, now, false),
        }
    }

    /// Requests the latest version, unless it was requested within the last `timing.quiet`; with
    /// `at_once`, always.
    pub fn request_latest(
        &mut self,
        store: &VersionStore,
        epoch: u64,
        now: Time,
        at_once: bool,
    ) -> Vec<Effect> {
        let recent = self.latest_at.map_or(false, |at| now.saturating_sub(at) < self.timing.quiet);
        if recent && !at_once {
            return Vec::new();
        }
        self.latest_at = Some(now);
        vec![self.fetch((epoch, 0), awaited_layout(store).is_some())] // W7
    }

    /// Requests the layout of an announced version (W7).
    pub fn layout(&mut self, key: Key, now: Time) -> Vec<Effect> {
        self.latest_at = Some(now);
        vec![self.fetch(key, true)]
    }

    fn fetch(&self, (epoch, version): Key, layout: bool) -> Effect {
        let (model, patch, unpatched) = (self.model.clone(), None, String::new());
        let fetch = Fetch { model, epoch, version, layout, patch, unpatched, ..Default::default() };
        Effect::Send(FromWorker::Fetch(fetch))
    }

    /// Records that a ping was answered: no answer to a request before `sent_at` is on its way (W12).
    pub fn answered(&mut self, versions: &mut VersionStore, sent_at: Time) {
        self.answered = Some(sent_at);
        if let Some(transfer) = versions.transfer() {
            transfer.answered(sent_at);
        }
    }

    /// True if the layout must be requested again, because the answer is presumed lost (W7).
    pub fn due(&self, now: Time) -> bool {
        let lost = self.answered > self.latest_at; // a later ping was answered
        let patience = if lost { self.timing.patience } else { self.timing.patience_max };
        self.latest_at.map_or(true, |at| now.saturating_sub(at) >= patience)
    }

    /// Begins a pause before the next try of a version, twice as long as the last pause (W36).
    pub fn back_off(&mut self, key: Key, now: Time) {
        let longer = self.backoff_pause.saturating_mul(2).min(self.timing.patience_max);
        self.backoff_pause = if key == self.backoff_key { longer } else { self.timing.patience };
        self.backoff_until = now.saturating_add(self.backoff_pause);
        self.backoff_key = key;
    }

    /// Ends the pause of a version that is no longer available, since it delays older versions, too.
    pub fn end_backoff(&mut self, key: Key) {
        if key == self.backoff_key {
            self.backoff_until = Time::ZERO;
        }
    }
}

/// Returns the version that waits for its requested layout.
fn awaited_layout(versions: &VersionStore) -> Option<Key> {
    let waiting = versions.in_phase(Phase::Announced)?;
    Some(waiting.key()).filter(|_| waiting.lacks() == Lack::Layout)
}
