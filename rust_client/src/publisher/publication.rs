//! One call of publish: its recipients, what each has done, and whether the call is over.
//!
//! A recipient is a worker that the version is published to. Its outcome changes only by the transitions
//! in `phases.rs`. The call waits during a grace period for a lost recipient to return. A recipient that
//! left with a `bye` no longer counts. If a number of workers is expected, workers that join become
//! recipients until that number is reached.

use super::phases::{Decision, DecisionEvent, Outcome, StateMachine, TargetEvent, DECISIONS, TARGETS};
use super::receipt::{Receipt, WorkerReceipt};
use crate::messages::{AnnounceCommit, Metadata};
use crate::transfer::{Key, Time};
use std::collections::BTreeMap;
use std::time::Duration;

/// How many workers must reach the state in `Wait`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Require {
    /// All recipients.
    All,
    /// At least this many recipients. With 0, none is required.
    AtLeast(usize),
}

/// The state that a worker must reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The worker runs the version.
    Applied,
    /// The worker has received and verified the version.
    Staged,
    /// The publish waits for no worker.
    Nobody,
}

/// The checked options of one publish.
#[derive(Clone, Debug)]
pub struct PublishTerms {
    /// The names of the workers; `None` for all workers that subscribe to the model.
    pub workers: Option<Vec<String>>,
    pub require: Require,
    pub wait: Wait,
    pub commit: AnnounceCommit,
    pub timeout: Duration,
    /// How long to wait for a worker that becomes lost.
    pub grace: Duration,
    /// How long to wait for a lost worker whose connection is closed.
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

/// A recipient, and what it has done.
struct Recipient {
    outcome: StateMachine<Outcome, TargetEvent>,
    decided_at: Option<Time>, // time of the outcome; `None` while the recipient is behind
    detail: String,
    away_until: Option<Time>, // end of the grace period of a lost worker
    encoding: &'static str,   // how the version arrived; empty if unknown
    nbytes: u64,
    through: Vec<String>, // the relays before the worker
}

impl Recipient {
    fn new() -> Recipient {
        let (outcome, detail) = (StateMachine::new(TARGETS), String::new());
        let through = Vec::new();
        Recipient { outcome, decided_at: None, detail, away_until: None, encoding: "", nbytes: 0, through }
    }
}

/// An open call.
pub(crate) struct Publication {
    pub id: u64,
    pub model: String,
    pub key: Key,
    pub terms: PublishTerms,
    pub decision: StateMachine<Decision, DecisionEvent>,
    pub resolved: bool,
    /// Why the call was ended early; empty if it was not.
    pub end_reason: String,
    nbytes: u64,
    digest: String,
    metadata: Metadata,
    pub started: Time,
    deadline: Time,
    recipients: BTreeMap<String, Recipient>,
    announced: BTreeMap<String, Time>, // when the version was announced to a worker again
    outcome_counts: [usize; 7], // number of recipients by outcome: counting them at each report is slow
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
            decision: StateMachine::new(DECISIONS),
            resolved: false,
            end_reason: String::new(),
            nbytes,
            digest: digest.to_owned(),
            metadata: metadata.clone(),
            started,
            deadline: started.saturating_add(terms.timeout),
            terms,
            recipients: BTreeMap::new(),
            announced: BTreeMap::new(),
            outcome_counts: [0; 7],
        }
    }

    /// Ends the call early, with the reason `why`.
    pub fn end(&mut self, why: &str) {
        self.end_reason = why.to_owned();
    }

    /// Records that the call's result is known.
    pub fn resolve(&mut self) {
        self.resolved = true;
    }

    /// True if workers apply the version only after enough of them have staged it.
    pub fn commits_together(&self) -> bool {
        self.terms.commit == AnnounceCommit::Together
    }

    /// True if workers stage the version, and the call has not decided yet.
    pub fn is_undecided(&self) -> bool {
        self.commits_together() && self.decision.is(Decision::Open)
    }

    /// Records that the version is announced to one worker again.
    pub fn note_announced(&mut self, name: &str, now: Time) {
        self.announced.insert(name.to_owned(), now);
    }

    /// Returns when the version was last announced to a worker.
    pub fn announced_at(&self, name: &str) -> Time {
        self.announced.get(name).copied().unwrap_or(self.started)
    }

    pub fn recipient_names(&self) -> impl Iterator<Item = &String> {
        self.recipients.keys()
    }

    /// Returns the outcome of a worker; `None` if the worker is not a recipient.
    pub fn outcome(&self, name: &str) -> Option<Outcome> {
        self.recipients.get(name).map(|recipient| recipient.outcome.state())
    }

    /// Adds a worker to the recipients.
    pub fn add_recipient(&mut self, name: &str) {
        if !self.recipients.contains_key(name) {
            self.recipients.insert(name.to_owned(), Recipient::new());
            self.outcome_counts[Outcome::Behind as usize] += 1;
        }
    }

    /// Adds a worker that has joined to the recipients, if expected workers are still missing.
    pub fn add_joined(&mut self, name: &str) {
        if self.missing_count() > 0 {
            self.add_recipient(name);
        }
    }

    /// Moves the version to a later epoch. The outcome of recipients that are neither lost nor left is
    /// `Behind` again, because no worker has the version under that epoch.
    pub fn renew(&mut self, epoch: u64) {
        self.key.0 = epoch;
        for recipient in self.recipients.values_mut() {
            let outcome = recipient.outcome.state();
            if !matches!(outcome, Outcome::Lost | Outcome::Left) {
                self.outcome_counts[outcome as usize] -= 1;
                self.outcome_counts[Outcome::Behind as usize] += 1;
                *recipient = Recipient::new();
            }
        }
    }

    /// Applies an event to the recipient `name`. Returns false if the table has no such transition, or the
    /// worker is not a recipient.
    pub fn apply_event(&mut self, name: &str, event: TargetEvent, now: Time, detail: &str) -> bool {
        let recipient = match self.recipients.get_mut(name) {
            Some(recipient) => recipient,
            None => return false,
        };
        let before = recipient.outcome.state();
        if !recipient.outcome.apply_event(event) {
            return false;
        }
        self.outcome_counts[before as usize] -= 1;
        self.outcome_counts[recipient.outcome.state() as usize] += 1;
        recipient.decided_at = Some(now).filter(|_| !recipient.outcome.is(Outcome::Behind));
        (recipient.detail, recipient.away_until) = (detail.to_owned(), None);
        true
    }

    /// Marks a recipient as lost, and begins its grace period. `gone` is true if its connection is closed.
    pub fn lose(&mut self, name: &str, now: Time, why: &str, gone: bool) {
        let grace = if gone { self.terms.grace_of_gone } else { self.terms.grace };
        let lost = self.apply_event(name, TargetEvent::Lost, now, why);
        if let Some(recipient) = self.recipients.get_mut(name).filter(|_| lost) {
            recipient.away_until = Some(now.saturating_add(grace));
        }
    }

    /// Records how the version arrived at a worker: its encoding, and the number of bytes.
    pub fn record_transport(&mut self, name: &str, encoding: &'static str, nbytes: u64) {
        if let Some(recipient) = self.recipients.get_mut(name) {
            (recipient.encoding, recipient.nbytes) = (encoding, nbytes);
        }
    }

    /// Calls `doing` with the name of each recipient that has not reached `wait` and has no detail yet. The
    /// returned text becomes the detail.
    pub fn explain(&mut self, doing: impl Fn(&str) -> Option<String>) {
        let done_outcomes = self.done_outcomes();
        for (name, recipient) in &mut self.recipients {
            if recipient.detail.is_empty() && !done_outcomes.contains(&recipient.outcome.state()) {
                recipient.detail = doing(name).unwrap_or_default();
            }
        }
    }

    /// Calls `through` with the name of each recipient. The returned names become the relays before that
    /// worker; `None` changes nothing.
    pub fn set_relays(&mut self, through: impl Fn(&str) -> Option<Vec<String>>) {
        for (name, recipient) in &mut self.recipients {
            if let Some(through) = through(name) {
                recipient.through = through;
            }
        }
    }

    /// Returns the outcomes of a recipient that has reached `wait`.
    fn done_outcomes(&self) -> &'static [Outcome] {
        match self.terms.wait {
            Wait::Staged => &[Outcome::Applied, Outcome::Skipped, Outcome::Staged],
            _ => &[Outcome::Applied, Outcome::Skipped],
        }
    }

    fn count(&self, outcomes: &[Outcome]) -> usize {
        outcomes.iter().map(|&outcome| self.outcome_counts[outcome as usize]).sum()
    }

    fn left_count(&self) -> usize {
        self.count(&[Outcome::Left])
    }

    /// Returns the number of expected workers that have not joined.
    pub fn missing_count(&self) -> usize {
        match self.terms.require {
            Require::All => (self.terms.expect + self.left_count()).saturating_sub(self.recipients.len()),
            Require::AtLeast(_) => 0,
        }
    }

    /// True if the call requires all recipients, and none is left.
    pub fn has_no_recipient(&self) -> bool {
        self.terms.require == Require::All && self.recipients.len() == self.left_count()
    }

    /// Returns how many recipients must reach `wait`.
    fn needed_count(&self) -> usize {
        match self.terms.require {
            Require::All => self.recipients.len() - self.left_count() + self.missing_count(),
            Require::AtLeast(count) => count,
        }
    }

    /// Returns the number of absent workers that the call waits for: missing expected workers, and
    /// lost recipients in their grace period.
    fn possible_returns(&self, now: Time) -> usize {
        let may_return = |recipient: &&Recipient| recipient.away_until.map_or(false, |until| until > now);
        let lost = self.outcome_counts[Outcome::Lost as usize] > 0;
        self.missing_count() + if lost { self.recipients.values().filter(may_return).count() } else { 0 }
    }

    /// Decides on the commit of a version that workers apply together, if the decision is due. Returns true
    /// if this call of `decide` has made the decision (P10).
    pub fn decide(&mut self, now: Time) -> bool {
        if !self.commits_together() {
            return false;
        }
        let staged = self.count(&[Outcome::Applied, Outcome::Skipped, Outcome::Staged]);
        let possible = staged + self.count(&[Outcome::Behind]) + self.possible_returns(now);
        if staged >= self.needed_count() {
            self.decision.apply_event(DecisionEvent::Enough)
        } else if !self.end_reason.is_empty() || possible < self.needed_count() || now >= self.deadline {
            self.decision.apply_event(DecisionEvent::TooFew)
        } else {
            false
        }
    }

    /// Returns true if the publish achieved what it required, false if it failed, and `None` if the result
    /// is still open.
    pub fn verdict(&self, now: Time) -> Option<bool> {
        if self.commits_together() && self.decision.is(Decision::Abort) {
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
        let over = open == 0 || now >= self.deadline || !self.end_reason.is_empty();
        match self.terms.require {
            // The result is known once a worker has failed, but the receipt must have the outcome of all.
            Require::All if done == self.needed_count() => Some(true),
            Require::All => Some(false).filter(|_| over),
            Require::AtLeast(0) => Some(true).filter(|_| over),
            Require::AtLeast(count) if done >= count => Some(true),
            Require::AtLeast(count) => Some(false).filter(|_| over || done + open < count),
        }
    }

    /// Moves the deadline to `now`.
    pub fn expire(&mut self, now: Time) {
        self.deadline = now;
    }

    /// Returns the receipt, with the outcomes so far.
    pub fn receipt(&self, now: Time) -> Receipt {
        let of = |recipient: &Recipient| WorkerReceipt {
            outcome: recipient.outcome.state(),
            after: recipient.decided_at.map(|at| at.saturating_sub(self.started)),
            detail: recipient.detail.clone(),
            encoding: recipient.encoding,
            nbytes: recipient.nbytes,
            through: recipient.through.clone(),
        };
        Receipt {
            model: self.model.clone(),
            epoch: self.key.0,
            version: self.key.1,
            nbytes: self.nbytes,
            digest: self.digest.clone(),
            metadata: self.metadata.clone(),
            took: now.saturating_sub(self.started),
            workers: self.recipients.iter().map(|(name, recipient)| (name.clone(), of(recipient))).collect(),
        }
    }
}
