//! One call of publish: which workers it is for, what each has done, and when the call is over.
//!
//! Every target is in one state, and only moves along an arrow (`phases.rs`). Who becomes lost may return, and is waited
//! for a while. Who leaves in order will not, and is no longer one of all. Where a number of workers is expected, those
//! that join become targets until so many are there.

use super::phases::{At, Decision, DecisionEvent, TargetEvent, DECISIONS, TARGETS};
use super::receipt::{Outcome, Receipt, WorkerReceipt};
use crate::messages::{CommitMode, Metadata};
use crate::transfer::{Key, Time};
use std::collections::BTreeMap;
use std::time::Duration;

/// How many workers must get there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Require {
    /// All that it is for.
    All,
    /// So many; 0: no matter.
    AtLeast(usize),
}

/// What "there" is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It runs the version.
    Applied,
    /// It holds it, whole and verified, to be applied at its next safe point.
    Staged,
    /// Nobody is waited for.
    Nobody,
}

/// What a caller asks of a publish.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Nothing: all that want the model.
    pub workers: Option<Vec<String>>,
    pub require: Require,
    pub wait: Wait,
    pub commit: CommitMode,
    pub timeout: Duration,
    /// For how long a worker that becomes lost meanwhile is waited for.
    pub grace: Duration,
    /// The same, where it is known to be gone: its connection is closed, and it made no other.
    pub grace_of_gone: Duration,
    /// How many "all" are at least.
    pub expect: usize,
}

impl Default for Terms {
    fn default() -> Terms {
        Terms {
            workers: None,
            require: Require::All,
            wait: Wait::Applied,
            commit: CommitMode::Auto,
            timeout: Duration::from_secs(60),
            grace: Duration::from_secs(5),
            grace_of_gone: Duration::ZERO,
            expect: 0,
        }
    }
}

struct Recipient {
    outcome: At<Outcome, TargetEvent>,
    at: Option<Time>,
    detail: String,
    away_until: Option<Time>, // lost, and waited for
    encoding: &'static str,   // how it came
    nbytes: u64,
}

impl Recipient {
    fn new() -> Recipient {
        let (outcome, detail) = (At::first(TARGETS), String::new());
        Recipient { outcome, at: None, detail, away_until: None, encoding: "", nbytes: 0 }
    }
}

/// A call that is open.
pub(crate) struct Publication {
    pub id: u64,
    pub model: String,
    pub key: Key,
    pub terms: Terms,
    pub decision: At<Decision, DecisionEvent>,
    pub resolved: bool,
    /// Why it is given up before its time; empty: it is not.
    pub ended: String,
    nbytes: u64,
    digest: String,
    metadata: Metadata,
    pub started: Time,
    deadline: Time,
    targets: BTreeMap<String, Recipient>,
    counts: [usize; 7], // targets by outcome, kept up to date: it is asked after every report
}

impl Publication {
    pub fn new(
        id: u64,
        model: &str,
        key: Key,
        (nbytes, digest, metadata): (u64, &str, &Metadata),
        terms: Terms,
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

    /// It is given up before its time.
    pub fn end(&mut self, why: &str) {
        self.ended = why.to_owned();
    }

    /// Its answer is known.
    pub fn resolve(&mut self) {
        self.resolved = true;
    }

    pub fn together(&self) -> bool {
        self.terms.commit == CommitMode::Together
    }

    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.targets.keys()
    }

    pub fn outcome(&self, name: &str) -> Option<Outcome> {
        self.targets.get(name).map(|target| target.outcome.now())
    }

    /// One more worker that it is for.
    pub fn aim(&mut self, name: &str) {
        if !self.targets.contains_key(name) {
            self.targets.insert(name.to_owned(), Recipient::new());
            self.counts[Outcome::Behind as usize] += 1;
        }
    }

    /// A worker has joined: it is one of all that are expected, if too few are there.
    pub fn welcome(&mut self, name: &str) {
        if self.missing() > 0 {
            self.aim(name);
        }
    }

    /// The version has another epoch: nobody who is there has it by that yet.
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

    /// Notes what became of a worker; tells whether that moved it. One that is no target changes nothing.
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

    /// A worker is lost, and may return; `gone`: it is known that it is not there.
    pub fn lose(&mut self, name: &str, now: Time, why: &str, gone: bool) {
        let grace = if gone { self.terms.grace_of_gone } else { self.terms.grace };
        let lost = self.take(name, TargetEvent::Lost, now, why);
        if let Some(target) = self.targets.get_mut(name).filter(|_| lost) {
            target.away_until = Some(now.saturating_add(grace));
        }
    }

    /// The version came to a worker in this way.
    pub fn carried(&mut self, name: &str, encoding: &'static str, nbytes: u64) {
        if let Some(target) = self.targets.get_mut(name) {
            (target.encoding, target.nbytes) = (encoding, nbytes);
        }
    }

    /// Says of every target that is not there yet what it is doing.
    pub fn explain(&mut self, doing: impl Fn(&str) -> Option<String>) {
        let there = self.there();
        for (name, target) in &mut self.targets {
            if target.detail.is_empty() && !there.contains(&target.outcome.now()) {
                target.detail = doing(name).unwrap_or_default();
            }
        }
    }

    fn there(&self) -> &'static [Outcome] {
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

    /// How many workers are expected besides those that are there.
    pub fn missing(&self) -> usize {
        match self.terms.require {
            Require::All => (self.terms.expect + self.left()).saturating_sub(self.targets.len()),
            Require::AtLeast(_) => 0,
        }
    }

    /// Whether it is for all, and all are none.
    pub fn nobody(&self) -> bool {
        self.terms.require == Require::All && self.targets.len() == self.left()
    }

    fn needed(&self) -> usize {
        match self.terms.require {
            Require::All => self.targets.len() - self.left() + self.missing(),
            Require::AtLeast(count) => count,
        }
    }

    /// Those that are not there and are waited for.
    fn may_come(&self, now: Time) -> usize {
        let waited = |target: &&Recipient| target.away_until.map_or(false, |until| until > now);
        let lost = self.counts[Outcome::Lost as usize] > 0;
        self.missing() + if lost { self.targets.values().filter(waited).count() } else { 0 }
    }

    /// Decides a version that is applied together, once and for good; tells whether it just has (P10).
    pub fn decide(&mut self, now: Time) -> bool {
        if !self.together() {
            return false;
        }
        let staged = self.count(&[Outcome::Applied, Outcome::Skipped, Outcome::Staged]);
        let possible = staged + self.count(&[Outcome::Behind]) + self.may_come(now);
        if staged >= self.needed() {
            self.decision.take(DecisionEvent::Enough)
        } else if !self.ended.is_empty() || possible < self.needed() || now >= self.deadline {
            self.decision.take(DecisionEvent::TooFew)
        } else {
            false
        }
    }

    /// Whether the publish achieved what it required; nothing while that is open.
    pub fn verdict(&self, now: Time) -> Option<bool> {
        if self.together() && self.decision.is(Decision::Abort) {
            return Some(false);
        }
        if self.terms.wait == Wait::Nobody {
            return Some(true);
        }
        let there = self.there();
        let done = self.count(there);
        let staged = if there.contains(&Outcome::Staged) { 0 } else { self.count(&[Outcome::Staged]) };
        let open = self.count(&[Outcome::Behind]) + staged + self.may_come(now);
        let over = open == 0 || now >= self.deadline || !self.ended.is_empty();
        match self.terms.require {
            // Do not give up on the others when one has failed.
            Require::All if done == self.needed() => Some(true),
            Require::All => Some(false).filter(|_| over),
            Require::AtLeast(0) => Some(true).filter(|_| over),
            Require::AtLeast(count) if done >= count => Some(true),
            Require::AtLeast(count) => Some(false).filter(|_| over || done + open < count),
        }
    }

    /// Its time is over.
    pub fn end_at(&mut self, now: Time) {
        self.deadline = now;
    }

    /// What has become of it so far.
    pub fn receipt(&self, now: Time) -> Receipt {
        let of = |target: &Recipient| WorkerReceipt {
            outcome: target.outcome.now(),
            after: target.at.map(|at| at.saturating_sub(self.started)),
            detail: target.detail.clone(),
            encoding: target.encoding,
            nbytes: target.nbytes,
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
