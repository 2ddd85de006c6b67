//! Answers observers' requests for the changes since a revision (P23).
//!
//! Every change has a revision number, and a request names the last revision that the observer has. So
//! the publisher need not record what an observer has, and sends nothing without a request. An answer
//! consists of pages with the changes since that revision, oldest first. They are found in three ways:
//!
//! ```text
//! a model's latest version        compared when a request arrives
//! a worker's state                recorded on the roster at each report and event of the worker
//! an event                        recorded when it happens; only the newest events are kept
//! ```

use super::effects::{Effect, Identity, WorkerEvent};
use super::machine::PublisherMachine;
use super::pages::{Changed, Page};
use super::rate_limits::{Rate, TokenBucket};
use super::roster::{Peer, Roster};
use crate::limits::{ERROR_MAX, EVENTS_LISTED, OBSERVERS_MAX, PAGE_ROWS_MAX};
use crate::messages::{FromWorker, Metadata, Observe, ProgressPhase};
use crate::transfer::{Key, Time};
use crate::words::printable;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

const OBSERVER_SILENCE_MAX: Duration = Duration::from_secs(3); // longest time between two requests of an observer
const PAGES_MAX: u64 = 2; // pages of an answer: at most some ten milliseconds of work
const ROW_RATE: Rate = Rate(16_384.0, 4096.0); // rows for all observers together
const EVENTS_OF_WORKER: usize = 16; // with more, a new event displaces the same worker's oldest event
const VERSIONS_TIMED: usize = 4096; // versions of a model whose publish times are kept
pub const NO_OBSERVER: &str =
    "only an observer's key may watch here: `weightbus keygen DIR --observer NAME` makes one";

/// Returns the milliseconds since 1970.
pub type Clock = Box<dyn Fn() -> u64 + Send>;

/// The last recorded state of a model at a worker: the running version, the arriving version with its
/// phase and chunks, and the failed version with the error.
type ReportedState = (Key, Option<(u64, ProgressPhase, u64)>, Option<(u64, String)>);

/// Data about a worker that only observers get, by model.
#[derive(Default)]
pub struct ObserverRecord {
    /// The last applied version, and the microseconds from its publish to the worker's report.
    pub took: BTreeMap<String, (u64, u64)>,
    /// The version that the worker failed to apply, and the error text.
    pub failed: BTreeMap<String, (u64, String)>,
    subscribed: Option<bool>,
    reported: BTreeMap<String, ReportedState>,
}

/// What observers get about a model.
#[derive(Default)]
pub struct ObservedModel {
    pub latest: Key,
    pub nbytes: u64,
    pub metadata: Metadata,
    /// The time at which each version was published, by its number.
    pub times: BTreeMap<u64, Time>,
    revision: u64,                   // of the last change of the latest version
    targeted: BTreeMap<String, u64>, // as in `Versions`, at the last request
}

/// The observers of a publisher, and the data that only observers get.
pub struct Observers {
    clock: Option<Clock>,                   // without a clock, the `time_ms` of answers is 0
    last_requests: HashMap<Identity, Time>, // when each observer last sent a request
    rows: TokenBucket,
    models: BTreeMap<String, ObservedModel>,
    events: VecDeque<(u64, Time, WorkerEvent)>,
}

impl Default for Observers {
    fn default() -> Observers {
        Observers {
            clock: None,
            last_requests: HashMap::new(),
            rows: TokenBucket::new(Time::ZERO),
            models: BTreeMap::new(),
            events: VecDeque::new(),
        }
    }
}

impl Observers {
    /// Records when a version was published.
    pub fn published(&mut self, model: &str, number: u64, now: Time) {
        let times = &mut self.models.entry(model.to_owned()).or_default().times;
        times.insert(number, now);
        if times.len() > VERSIONS_TIMED {
            let oldest = times.keys().next().copied();
            oldest.map(|oldest| times.remove(&oldest));
        }
    }

    /// Drops the oldest event of `worker` if the worker has more than `EVENTS_OF_WORKER`, so that its
    /// events do not displace those of other workers. Otherwise drops the oldest event of all.
    fn drop_event(&mut self, worker: &str) {
        let is_of_worker = |(_, _, event): &&(u64, Time, WorkerEvent)| event.worker == worker;
        let many = self.events.iter().filter(is_of_worker).count() > EVENTS_OF_WORKER;
        let oldest = self.events.iter().position(|event| is_of_worker(&event));
        self.events.remove(oldest.filter(|_| many).unwrap_or(0));
    }

    /// Records an observer's request. Returns false if there are too many observers.
    fn admit(&mut self, from: &[u8], now: Time) -> bool {
        self.last_requests.retain(|_, at| now.saturating_sub(*at) < OBSERVER_SILENCE_MAX);
        let room = self.last_requests.len() < OBSERVERS_MAX || self.last_requests.contains_key(from);
        if room {
            self.last_requests.insert(from.to_vec(), now);
        }
        room
    }
}

/// What a worker's message may change in the answers to observers.
pub(super) enum PossibleChange {
    None,
    Transport,
    Model(String),
    Failed { model: String, version: u64, error: String },
}

impl PossibleChange {
    pub fn of(message: &FromWorker) -> PossibleChange {
        match message {
            FromWorker::Ping(_) => PossibleChange::Transport,
            FromWorker::Progress(report) => PossibleChange::Model(report.model.clone()),
            FromWorker::Staged(report) => PossibleChange::Model(report.model.clone()),
            FromWorker::Applied(report) => PossibleChange::Model(report.model.clone()),
            FromWorker::Failed(report) => {
                let text = printable(&report.text, ERROR_MAX - report.code.len() - 2);
                let error = format!("{}: {}", report.code, text);
                PossibleChange::Failed { model: report.model.clone(), version: report.version, error }
            }
            _ => PossibleChange::None,
        }
    }
}

impl ObserverRecord {
    /// Records the version that a worker failed to apply, and the error. Returns false if both are
    /// already recorded.
    pub fn note_failure(&mut self, model: &str, version: u64, error: &str) -> bool {
        let failure = (version, error.to_owned());
        self.failed.insert(model.to_owned(), failure.clone()) != Some(failure)
    }

    /// Drops the failures of all models.
    pub fn forget_failures(&mut self) {
        self.failed.clear();
    }
}

impl PublisherMachine {
    /// Sets the clock whose time is sent to observers.
    pub fn clock(mut self, clock: Clock) -> PublisherMachine {
        self.observers.clock = Some(clock);
        self
    }

    /// Returns the milliseconds since 1970; `None` without a clock.
    pub(super) fn time_ms(&self) -> Option<u64> {
        self.observers.clock.as_ref().map(|clock| clock())
    }

    // Events.

    /// Records a new revision of a worker if its message has changed what observers get. Must be called
    /// after the message was handled.
    pub(super) fn note_for_observers(&mut self, name: &str, change: PossibleChange, now: Time) {
        let epoch = self.epoch();
        let peer = match self.roster.get_mut(name) {
            Some(peer) => peer,
            None => return,
        };
        let changed = match change {
            PossibleChange::None => false,
            PossibleChange::Transport => {
                peer.observed.subscribed.replace(peer.subscribed) != Some(peer.subscribed)
            }
            PossibleChange::Model(model) if peer.subscribes_to(&model) => {
                record_outcome(peer, &model, epoch, self.observers.models.get(&model), now);
                record_if_changed(peer, &model)
            }
            PossibleChange::Failed { model, version, error } if peer.subscribes_to(&model) => {
                peer.observed.note_failure(&model, version, &error);
                record_if_changed(peer, &model)
            }
            PossibleChange::Model(_) | PossibleChange::Failed { .. } => false,
        };
        if changed {
            self.roster.touch(name);
        }
    }

    /// Records a new revision of a worker behind a relay, whose row has named these models.
    pub(super) fn note_rows_for_observers<'a>(
        &mut self,
        name: &str,
        models: impl Iterator<Item = &'a String>,
        now: Time,
    ) {
        let epoch = self.epoch();
        if let Some(peer) = self.roster.get_mut(name) {
            for model in models {
                record_outcome(peer, model, epoch, self.observers.models.get(model), now);
            }
        }
        self.roster.touch(name);
    }

    /// Records an event of a worker for observers. The caller notifies the user of the same event.
    pub fn record_event(&mut self, event: &WorkerEvent, now: Time) {
        if event.worker.is_empty() {
            return;
        }
        let revision = self.roster.next_revision();
        self.observers.events.push_back((revision, now, event.clone()));
        if self.observers.events.len() > EVENTS_LISTED {
            self.observers.drop_event(&event.worker);
        }
        self.roster.touch(&event.worker);
    }

    // Answers.

    /// Answers a request of an observer. Refuses the request if the peer's key is not an observer's (K4),
    /// or there are too many observers.
    pub(super) fn answer_observer(&mut self, from: &[u8], key: &str, asked: &Observe, now: Time) {
        if !self.may_observe(key) {
            return self.refuse(from, "not-allowed", NO_OBSERVER, None);
        }
        if !self.observers.admit(from, now) {
            let text =
                format!("{} observers are here already: end one of them, or wait a moment", OBSERVERS_MAX);
            return self.refuse(from, "limit", &text, None);
        }
        for header in self.pages(asked, now) {
            self.perform(Effect::Answer { to: from.to_vec(), header });
        }
    }

    /// Returns the pages that answer a request, as headers: as many changes since the requested revision
    /// as fit.
    fn pages(&mut self, asked: &Observe, now: Time) -> Vec<Vec<u8>> {
        self.update_models();
        let (epoch, latest) = (self.epoch(), self.roster.revision());
        let since = if asked.epoch == epoch && asked.since <= latest { asked.since } else { 0 };
        let Observers { rows, models, events, .. } = &mut self.observers;
        let (mut pages, mut page, mut more) = (Vec::new(), Page::new(since), false);
        for (at, what) in changes_since(models, events, &self.roster, since) {
            more = !rows.take(1.0, ROW_RATE, now);
            if !more && !page.try_add(at, &what, &self.store, &self.timing, now) {
                more = pages.len() + 1 >= asked.pages.min(PAGES_MAX) as usize;
                if !more {
                    let next = Page::new(page.revision);
                    pages.push(std::mem::replace(&mut page, next));
                    page.try_add(at, &what, &self.store, &self.timing, now);
                }
            }
            if more {
                break;
            }
        }
        page.revision = if more { page.revision } else { latest };
        let time_ms = self.time_ms().unwrap_or(0);
        let about = (epoch, latest, self.roster.len(), time_ms);
        let mut headers: Vec<_> = pages.into_iter().map(|page| page.header(about, true, true)).collect();
        headers.push(page.header(about, false, more));
        headers
    }

    /// Records new revisions: of models whose latest version has changed, and of workers to which a newer
    /// version was published by name.
    fn update_models(&mut self) {
        for (name, versions) in &self.store.models {
            let model = self.observers.models.entry(name.clone()).or_default();
            let latest = versions.latest().and_then(|number| versions.get(number));
            if let Some(latest) = latest.filter(|latest| self.store.key(latest.number) != model.latest) {
                model.latest = self.store.key(latest.number);
                (model.revision, model.nbytes) = (self.roster.next_revision(), latest.content.plan.nbytes);
                model.metadata = latest.content.metadata.clone();
            }
            let (before, targeted) = (&model.targeted, versions.targeted());
            if before != targeted {
                let removed = before.iter().filter(|(name, number)| targeted.get(*name) != Some(number));
                let added = targeted.iter().filter(|(name, number)| before.get(*name) != Some(number));
                let names: BTreeSet<&String> = removed.chain(added).map(|(name, _)| name).collect();
                names.into_iter().for_each(|name| self.roster.touch(name));
                model.targeted = targeted.clone();
            }
        }
    }
}

/// Returns the changes after the revision `since`, each with its own revision, oldest first. Leaves out
/// workers that cannot fit into an answer.
fn changes_since<'a>(
    models: &'a BTreeMap<String, ObservedModel>,
    events: &'a VecDeque<(u64, Time, WorkerEvent)>,
    roster: &'a Roster,
    since: u64,
) -> Vec<(u64, Changed<'a>)> {
    let models = models.iter().filter(|(_, model)| model.revision > since);
    let mut found: Vec<_> =
        models.map(|(name, model)| (model.revision, Changed::Model(name, model))).collect();
    let workers = roster.changed(since).map(|(at, peer)| (at, Changed::Worker(peer)));
    found.extend(workers.take(PAGES_MAX as usize * PAGE_ROWS_MAX + 1)); // more cannot fit
    let events = events.iter().filter(|(at, ..)| *at > since);
    found.extend(events.map(|(at, time, event)| (*at, Changed::Event(*time, event))));
    found.sort_by_key(|(at, _)| *at);
    found
}

/// Records how long the running version of a worker took from its publish on. Removes the failure of
/// this version or an older one.
fn record_outcome(peer: &mut Peer, model: &str, epoch: u64, seen: Option<&ObservedModel>, now: Time) {
    let (running_epoch, version) = peer.running_key(model);
    let new =
        running_epoch == epoch && peer.observed.took.get(model).map(|(number, _)| *number) != Some(version);
    if let Some(published) = seen.and_then(|seen| seen.times.get(&version)).filter(|_| new) {
        let took = (now.saturating_sub(*published).as_micros() as u64).max(1);
        peer.observed.took.insert(model.to_owned(), (version, took));
    }
    if peer.observed.failed.get(model).map_or(false, |(failed, _)| *failed <= version) {
        peer.observed.failed.remove(model);
    }
}

/// Records the state of a model at a worker. Returns true if the state has changed.
fn record_if_changed(peer: &mut Peer, model: &str) -> bool {
    let arriving = peer.incoming.get(model).map(|its| (its.version, its.phase, its.chunks));
    let state = (peer.running_key(model), arriving, peer.observed.failed.get(model).cloned());
    let changed = peer.observed.reported.get(model) != Some(&state);
    if changed {
        peer.observed.reported.insert(model.to_owned(), state);
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_comes_and_goes_hides_nothing_of_the_others() {
        let mut machine = PublisherMachine::new(7, "tcp://*:1", Default::default(), None, None);
        let mut happens = |worker: &str| {
            let kind = crate::publisher::effects::WorkerEventKind::Joined;
            let event = WorkerEvent { kind, worker: worker.to_owned(), text: String::new() };
            machine.record_event(&event, Time::ZERO);
        };
        happens("good");
        (0..1000).for_each(|_| happens("noisy"));
        let of =
            |name: &str| machine.observers.events.iter().filter(|(_, _, its)| its.worker == name).count();
        assert_eq!((of("good"), of("noisy")), (1, EVENTS_LISTED - 1));
    }
}
