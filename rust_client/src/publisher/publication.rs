//! One call of publish: its target workers, what each has done, and when the call is over.
//!
//! Each target has one outcome, which only changes by the transitions in `phases.rs`. A target is a
//! worker that the version is published to. The call waits for a lost target to return, during a
//! grace period. A target that left with a `bye` no longer counts. If a number of workers is
//! expected, workers that join become targets until that number is reached.

use super::phases::{At, Decision, DecisionEvent, Outcome, TargetEvent, DECISIONS, TARGETS};
use super::receipt::{Receipt, WorkerReceipt};
use crate::messages::{AnnounceCommit, Metadata};
use crate::transfer::{Key, Time};
use std::collections::BTreeMap;
use std::time::Duration;

/// How many workers must reach the state in `Wait`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Require {
    /// All targets.
    All,
    /// At least this many targets; with 0, no target is required.
    AtLeast(usize),
}

/// The state that a worker must reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The worker runs the version.
    Applied,
    /// The worker has received and verified the version, and applies it when its user calls for
    /// that.
    Staged,
    /// The publish waits for no worker.
    Nobody,
}

/// The checked options of one publish.
#[derive(Clone, Debug)]
pub struct PublishTerms {
    /// The names of the workers; `None`: all workers that subscribe to the model.
    pub workers: Option<Vec<String>>,
    pub require: Require,
    pub wait: Wait,
    pub commit: AnnounceCommit,
    pub timeout: Duration,
    /// How long to wait for a worker that becomes lost.
    pub grace: Duration,
    /// How long to wait for a lost worker whose connection is closed, and that has opened no other.
    pub grace_of_gone: Duration,
    /// The least number of workers for `Require::All`.
    pub expect: usize,
}

impl Default for PublishTerms {
    fn default() -> PublishTerms {
        PublishTerms {
            workers: None,
            require: Require::All,
            wait: Wait::Applied,
            commit: AnnounceCommit::Auto,
            timeout: Duration::from_secs(60),
            grace: Duration::from_secs(5),
            grace_of_gone: Duration::ZERO,
            expect: 0,
        }
    }
}

/// A target, with what it has done; `at` is the time of its outcome.
struct Recipient {
    outcome: At<Outcome, TargetEvent>,
    at: Option<Time>,
    detail: String,
    away_until: Option<Time>, // end of the grace period of a lost worker
    encoding: &'static str,   // how the version arrived
    nbytes: u64,
    through: Vec<String>, // the relays before the worker
}

impl Recipient {
    fn new() -> Recipient {
        let (outcome, detail) = (At::first(TARGETS), String::new());
        let through = Vec::new();
        Recipient { outcome, at: None, detail, away_until: None, encoding: "", nbytes: 0, through }
    }
}

/// An open call.
pub(crate) struct Publication {
    pub id: u64,
    pub model: String,
    pub key: Key,
    pub terms: PublishTerms,
    pub decision: At<Decision, DecisionEvent>,
    pub resolved: bool,
    /// Why the call was ended early; empty if it was not.
    pub ended: String,
    nbytes: u64,
    digest: String,
    metadata: Metadata,
    pub started: Time,
    deadline: Time,
    targets: BTreeMap<String, Recipient>,
    counts: [usize; 7], // number of targets by outcome, since every report reads them
}

impl Publication {
    pub fn new(
        id: u64,
        model: &str,
        key: Key,
        (nbytes, digest, metadata): (u64, &str, &Metadata),
        terms: PublishTerms,
        started: Time,
    ) -> Publication {
        Publication {
            id,
            model: model.to_owned(),
            key,
            decision: At::first(DECISIONS),
            resolved: false,
            ended: String::new(),
            nbytes,
            digest: digest.to_owned(),
            metadata: metadata.clone(),
            started,
            deadline: started.saturating_add(terms.timeout),
            terms,
            targets: BTreeMap::new(),
            counts: [0; 7],
        }
    }

    /// Marks the `publish` call as ended early; `why` is the reason.
    pub fn end(&mut self, why: &str) {
        self.ended = why.to_owned();
    }

    /// Records that the call's result is known.
    pub fn resolve(&mut self) {
        self.resolved = true;
    }

    pub fn together(&self) -> bool {
        self.terms.commit == AnnounceCommit::Together
    }

    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.targets.keys()
    }

    pub fn outcome(&self, name: &str) -> Option<Outcome> {
        self.targets.get(name).map(|target| target.outcome.now())
    }

    /// Adds a worker to the targets.
    pub fn aim(&mut self, name: &str) {
        if !self.targets.contains_key(name) {
            self.targets.insert(name.to_owned(), Recipient::new());
            self.counts[Outcome::Behind as usize] += 1;
        }
    }

    /// Makes a worker that joined a target, if there are fewer targets than expected workers.
    pub fn welcome(&mut self, name: &str) {
        if self.missing() > 0 {
            self.aim(name);
        }
    }

    /// Moves the version to a later epoch. Targets that are neither lost nor left are behind again,
    /// because none has the version under that epoch.
    pub fn renew(&mut self, epoch: u64) {
        self.key.0 = epoch;
        for target in self.targets.values_mut() {
            let outcome = target.outcome.now();
            if !matches!(outcome, Outcome::Lost | Outcome::Left) {
                self.counts[outcome as usize] -= 1;
                self.counts[Outcome::Behind as usize] += 1;
                *target = Recipient::new();
            }
        }
    }

    /// Applies an event to the target `name`. Returns true if the table has this transition; false
    /// also for a worker that is not a target.
    pub fn take(&mut self, name: &str, event: TargetEvent, now: Time, detail: &str) -> bool {
        let target = match self.targets.get_mut(name) {
            Some(target) => target,
            None => return false,
        };
        let before = target.outcome.now();
        if !target.outcome.take(event) {
            return false;
        }
        self.counts[before as usize] -= 1;
        self.counts[target.outcome.now() as usize] += 1;
        target.at = Some(now).filter(|_| !target.outcome.is(Outcome::Behind));
        (target.detail, target.away_until) = (detail.to_owned(), None);
        true
    }

    /// Marks a target as lost, and begins its grace period. `gone` is true if the target has no
    /// connection.
    pub fn lose(&mut self, name: &str, now: Time, why: &str, gone: bool) {
        let grace = if gone { self.terms.grace_of_gone } else { self.terms.grace };
        let lost = self.take(name, TargetEvent::Lost, now, why);
        if let Some(target) = self.targets.get_mut(name).filter(|_| lost) {
            target.away_until = Some(now.saturating_add(grace));
        }
    }

    /// Records how the version arrived at a worker: its encoding, and the number of bytes.
    pub fn record_transport(&mut self, name: &str, encoding: &'static str, nbytes: u64) {
        if let Some(target) = self.targets.get_mut(name) {
            (target.encoding, target.nbytes) = (encoding, nbytes);
        }
    }

    /// Sets the detail of each target that has not reached `wait` to the text that `doing` returns
    /// for the worker's name.
    pub fn explain(&mut self, doing: impl Fn(&str) -> Option<String>) {
        let done_outcomes = self.done_outcomes();
        for (name, target) in &mut self.targets {
            if target.detail.is_empty() && !done_outcomes.contains(&target.outcome.now()) {
                target.detail = doing(name).unwrap_or_default();
            }
        }
    }

    /// Sets the relays before each target to those that `through` returns for the worker's name;
    /// `None`: unchanged.
    pub fn set_relays(&mut self, through: impl Fn(&str) -> Option<Vec<String>>) {
        for (name, target) in &mut self.targets {
            if let Some(through) = through(name) {
                target.through = through;
            }
        }
    }

    fn done_outcomes(&self) -> &'static [Outcome] {
        match self.terms.wait {
            Wait::Staged => &[Outcome::Applied, Outcome::Skipped, Outcome::Staged],
            _ => &[Outcome::Applied, Outcome::Skipped],
        }
    }

    fn count(&self, outcomes: &[Outcome]) -> usize {
        outcomes.iter().map(|&outcome| self.counts[outcome as usize]).sum()
    }

    fn left(&self) -> usize {
        self.count(&[Outcome::Left])
    }

    /// Returns the number of expected workers that are not targets yet.
    pub fn missing(&self) -> usize {
        match self.terms.require {
            Require::All => (self.terms.expect + self.left()).saturating_sub(self.targets.len()),
            Require::AtLeast(_) => 0,
        }
    }

    /// True if the call requires all workers, and there are none.
    pub fn has_no_recipient(&self) -> bool {
        self.terms.require == Require::All && self.targets.len() == self.left()
    }

    fn needed(&self) -> usize {
        match self.terms.require {
            Require::All => self.targets.len() - self.left() + self.missing(),
            Require::AtLeast(count) => count,
        }
    }

    /// Returns the number of absent workers that the call waits for: missing expected workers, and
    /// lost targets in their grace period.
    fn possible_returns(&self, now: Time) -> usize {
        let waited = |target: &&Recipient| target.away_until.map_or(false, |until| until > now);
        let lost = self.counts[Outcome::Lost as usize] > 0;
        self.missing() + if lost { self.targets.values().filter(waited).count() } else { 0 }
    }

    /// Commits or aborts a version that workers apply together, if the decision is due. Returns true
    /// only from the call that makes the decision (P10).
    pub fn decide(&mut self, now: Time) -> bool {
        if !self.together() {
            return false;
        }
        let staged = self.count(&[Outcome::Applied, Outcome::Skipped, Outcome::Staged]);
        let possible = staged + self.count(&[Outcome::Behind]) + self.possible_returns(now);
        if staged >= self.needed() {
            self.decision.take(DecisionEvent::Enough)
        } else if !self.ended.is_empty() || possible < self.needed() || now >= self.deadline {
            self.decision.take(DecisionEvent::TooFew)
        } else {
            false
        }
    }

    /// Returns true if the publish achieved what it required, false if it failed, `None` while that
    /// is open.
    pub fn verdict(&self, now: Time) -> Option<bool> {
        if self.together() && self.decision.is(Decision::Abort) {
            return Some(false);
        }
        if self.terms.wait == Wait::Nobody {
            return Some(true);
        }
        let done_outcomes = self.done_outcomes();
        let done = self.count(done_outcomes);
        let staged =
            if done_outcomes.contains(&Outcome::Staged) { 0 } else { self.count(&[Outcome::Staged]) };
        let open = self.count(&[Outcome::Behind]) + staged + self.possible_returns(now);
        let over = open == 0 || now >= self.deadline || !self.ended.is_empty();
        match self.terms.require {
            // When one worker has failed, still wait for the others.
            Require::All if done == self.needed() => Some(true),
            Require::All => Some(false).filter(|_| over),
            Require::AtLeast(0) => Some(true).filter(|_| over),
            Require::AtLeast(count) if done >= count => Some(true),
            Require::AtLeast(count) => Some(false).filter(|_| over || done + open < count),
        }
    }

    /// Moves the deadline to `now`.
    pub fn end_at(&mut self, now: Time) {
        self.deadline = now;
    }

    /// Returns the receipt, with the outcomes so far.
    pub fn receipt(&self, now: Time) -> Receipt {
        let of = |target: &Recipient| WorkerReceipt {
            outcome: target.outcome.now(),
            after: target.at.map(|at| at.saturating_sub(self.started)),
            detail: target.detail.clone(),
            encoding: target.encoding,
            nbytes: target.nbytes,
            through: target.through.clone(),
        };
        Receipt {
            model: self.model.clone(),
            epoch: self.key.0,
            version: self.key.1,
            nbytes: self.nbytes,
            digest: self.digest.clone(),
            metadata: self.metadata.clone(),
            took: now.saturating_sub(self.started),
            workers: self.targets.iter().map(|(name, target)| (name.clone(), of(target))).collect(),
        }
    }
}
