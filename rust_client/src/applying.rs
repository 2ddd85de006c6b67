//! What became of the versions of one model that were applied here, or could not be (W15, W24).

use crate::asking::Asking;
use crate::effects::Effect;
use crate::holdings::Holdings;
use crate::layouts::Fault;
use crate::limits::{APPLIES_MAX, TEXT_MAX};
use crate::messages::{Failed, Rename};
use crate::patching::Base;
use crate::phases::{Event, Phase};
use crate::reports;
use crate::transfer::{Key, Time};

/// What may be otherwise next time, since bytes were damaged or memory was short: it is tried again,
/// after a while.
pub const TRANSIENT: [&str; 4] = ["digest-mismatch", "layout-invalid", "no-memory", "unsupported"];

/// What runs, and what did not.
pub struct Applying {
    model: String,
    epoch: u64,             // the greatest of which bytes were written into the model
    torn: u32,              // applies in a row that failed half-way: while there is one, nothing runs
    stale: Key,             // was not to be had from shared memory: fetch it, if it is offered
    failed: Option<Failed>, // the last one, until another version is begun
}

impl Applying {
    pub fn new(model: &str) -> Applying {
        Applying { model: model.to_owned(), epoch: 0, torn: 0, stale: (0, 0), failed: None }
    }

    /// The greatest of which bytes were written into the model.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether an apply failed half-way: the model holds no version.
    pub fn torn(&self) -> bool {
        self.torn > 0
    }

    /// Which version was not to be had from shared memory.
    pub fn stale(&self) -> Key {
        self.stale
    }

    /// A version was applied: it runs here. Nothing, if it was not begun.
    pub fn applied(
        &mut self,
        holds: &mut Holdings,
        key: Key,
        digest: &str,
        base: Option<Base>,
    ) -> Vec<Effect> {
        if !holds.tell_those(Event::Applied, |held| held.key() == key) {
            return Vec::new();
        }
        holds.tell_those(Event::Newer, |held| held.phase() == Phase::Running && held.key() != key);
        holds.rebase(digest, base); // D3
        self.runs(holds, key).into_iter().collect()
    }

    /// A version could not be applied. If the model is `intact`, what ran before still runs.
    pub fn failed(&mut self, holds: &mut Holdings, key: Key, text: &str, intact: bool) -> Vec<Effect> {
        let again = !intact && self.torn + 1 < APPLIES_MAX;
        let event = if again { Event::Torn } else { Event::Declined };
        if !holds.tell_those(event, |held| held.key() == key && held.phase() == Phase::Applying) {
            return Vec::new();
        }
        if !intact {
            holds.tell(Phase::Running, Event::Torn); // W24
            self.stale = key; // what is tried next comes verified
            self.torn += 1;
            self.epoch = self.epoch.max(key.0);
        }
        self.note(key, "apply", text);
        self.failure().into_iter().collect()
    }

    /// A version was gone from shared memory before it could be copied, if it was begun.
    pub fn gone_stale(&mut self, holds: &mut Holdings, key: Key) -> bool {
        let begun = holds.tell_those(Event::Stale, |held| held.key() == key);
        self.stale = if begun { key } else { self.stale }; // S5
        begun
    }

    /// A version runs by this name; says so.
    fn runs(&mut self, holds: &Holdings, key: Key) -> Option<Effect> {
        self.torn = 0;
        self.epoch = self.epoch.max(key.0);
        self.failed = self.failed.take().filter(|failed| (failed.epoch, failed.version) > key);
        reports::applied(holds)
    }

    /// What runs here is a newer version, byte for byte; nothing if that has no effect.
    ///
    /// It has none if another version is at the user's, who may be writing it into the model.
    pub fn renamed(&mut self, holds: &mut Holdings, rename: Rename) -> Vec<Effect> {
        let key = (rename.epoch, rename.version); // W25
        let busy = holds.all(&[Phase::Ready, Phase::Applying]).next().is_some();
        let begun = holds.at(Phase::Arriving).map_or((0, 0), |held| held.key());
        let same = holds.running().as_ref() == Some(&rename.was);
        if !same || busy || key <= holds.newest() || key < begun {
            return Vec::new();
        }
        holds.tell_those(Event::Newer, |held| held.phase() != Phase::Running);
        let was = (rename.was.epoch, rename.was.version);
        holds.rename(key, rename.metadata.clone());
        let mut said =
            vec![Effect::Renamed { model: self.model.clone(), was, key, metadata: rename.metadata }];
        said.extend(self.runs(holds, key));
        self.begun();
        said
    }

    /// A session begins: what was torn may be tried as often as at first.
    pub fn reconnected(&mut self) {
        self.torn = self.torn.min(1);
    }

    /// A version is on its way: forget why another was not. (That nothing runs is said on.)
    pub fn begun(&mut self) {
        if !self.torn() {
            self.failed = None;
        }
    }

    /// Tells the publisher and the user that a version is not taken; not now, or not ever.
    pub fn fail(&mut self, asking: &mut Asking, key: Key, (code, text): Fault, now: Time) -> Vec<Effect> {
        if TRANSIENT.contains(&code) {
            asking.put_off(key, now);
        }
        self.note(key, code, &text);
        let rejected = Effect::Rejected { model: self.model.clone(), key, code, text };
        self.failure().into_iter().chain([rejected]).collect()
    }

    fn note(&mut self, (epoch, version): Key, code: &str, text: &str) {
        let text = text.chars().take(TEXT_MAX).collect();
        let (model, code, intact) = (self.model.clone(), code.to_owned(), true);
        self.failed = Some(Failed { model, epoch, version, code, text, intact });
    }

    /// Says what was not taken last, if it still counts.
    pub fn failure(&self) -> Option<Effect> {
        self.failed.as_ref().map(|failed| reports::failed(failed, self.torn()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::FromWorker;

    #[test]
    fn nothing_runs_is_said_of_a_failure_only_as_long_as_that_is_so() {
        let mut applying = Applying::new("m");
        let intact = |applying: &Applying| match applying.failure() {
            Some(Effect::Send(FromWorker::Failed(failed))) => failed.intact,
            other => panic!("{:?}", other),
        };
        applying.torn = 1;
        applying.note((7, 5), "apply", "it failed half-way");
        assert!(!intact(&applying));
        applying.runs(&Holdings::default(), (7, 4)); // an older one, which was meant for all
        assert!(intact(&applying));
    }
}
