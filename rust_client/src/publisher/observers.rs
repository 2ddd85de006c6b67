//! Those who look on: what each of them is told, when it asks (P23).
//!
//! Every change has the number of a revision, and an observer says which one it is at. So nothing is kept for any of
//! them, and nothing is said to one that does not ask. A page has what has changed since, the longest ago first:
//!
//! ```text
//! a model's latest version        looked up when somebody asks
//! a worker: joined, told news     touched on the roster by what it says, and by what becomes of it
//! an event                        the last few
//! ```

use super::effects::{Effect, Identity, WorkerEvent};
use super::machine::PublisherMachine;
use super::pages::{Changed, Page};
use super::rate_limits::{Rate, TokenBucket};
use super::roster::{Peer, Roster};
use crate::messages::{Doing, FromWorker, Metadata};
use crate::observed::Observe;
use crate::transfer::{Key, Time};
use crate::words::printable;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

pub const OBSERVERS_MAX: usize = 16; // at once: each question is a search of the roster
const OBSERVER_LIFE: Duration = Duration::from_secs(10); // without a question after which one is one no more
const PAGES_MAX: u64 = 2; // in answer to one question: some ten milliseconds at most
const ROWS: Rate = Rate(16_384.0, 4096.0); // told to all observers together: all workers at once, and then a part
const EVENTS_OF_WORKER: usize = 16; // of those, in the place of which no others go
const EVENTS_TOLD: usize = 64; // the last ones: as many as a person reads
const VERSIONS_TIMED: usize = 4096; // of a model of which the age is known
pub const ERROR_MAX: usize = 512; // characters of an error, of which a roster may hold many
pub const NO_OBSERVER: &str =
    "only an observer's key looks on here: `weightbus keygen DIR --observer NAME` makes one";

/// Says how many milliseconds it is since 1970.
pub type Clock = Box<dyn Fn() -> u64 + Send>;

/// A worker and a model, as observers were told of them: what runs, what arrives, what failed.
type Told = (Key, Option<(u64, Doing, u64)>, Option<(u64, String)>);

/// What is kept of a worker for observers alone, by model.
#[derive(Default)]
pub struct Seen {
    /// Which version took how many microseconds to run.
    pub took: BTreeMap<String, (u64, u64)>,
    /// Which version it will not run, and why.
    pub failed: BTreeMap<String, (u64, String)>,
    subscribed: Option<bool>,
    told: BTreeMap<String, Told>,
}

/// A model as observers are told of it.
#[derive(Default)]
pub struct ModelSeen {
    pub latest: Key,
    pub nbytes: u64,
    pub metadata: Metadata,
    /// When each of its versions was published.
    pub times: BTreeMap<u64, Time>,
    revision: u64,
    targeted: BTreeMap<String, u64>,
}

/// What is known for those who look on, and of them.
pub struct Observers {
    clock: Option<Clock>, // nothing: nobody is told
    asked: HashMap<Identity, Time>,
    rows: TokenBucket,
    models: BTreeMap<String, ModelSeen>,
    events: VecDeque<(u64, Time, WorkerEvent)>,
}

impl Default for Observers {
    fn default() -> Observers {
        Observers {
            clock: None,
            asked: HashMap::new(),
            rows: TokenBucket::new(Time::ZERO),
            models: BTreeMap::new(),
            events: VecDeque::new(),
        }
    }
}

impl Observers {
    /// A version was published.
    pub fn published(&mut self, model: &str, number: u64, now: Time) {
        let times = &mut self.models.entry(model.to_owned()).or_default().times;
        times.insert(number, now);
        if times.len() > VERSIONS_TIMED {
            let oldest = times.keys().next().copied();
            oldest.map(|oldest| times.remove(&oldest));
        }
    }

    /// Makes room for another event: the oldest of this worker goes if it has many, so that one that comes and goes hides
    /// nothing of the others; else the oldest.
    fn drop_event(&mut self, worker: &str) {
        let its = |(_, _, event): &&(u64, Time, WorkerEvent)| event.worker == worker;
        let many = self.events.iter().filter(its).count() > EVENTS_OF_WORKER;
        let oldest = self.events.iter().position(|event| its(&event));
        self.events.remove(oldest.filter(|_| many).unwrap_or(0));
    }

    /// Whether somebody may look on; takes note that it does.
    fn admit(&mut self, from: &[u8], now: Time) -> bool {
        self.asked.retain(|_, at| now.saturating_sub(*at) < OBSERVER_LIFE);
        let room = self.asked.len() < OBSERVERS_MAX || self.asked.contains_key(from);
        if room {
            self.asked.insert(from.to_vec(), now);
        }
        room
    }
}

/// What a worker says that may be news to observers.
pub(super) enum News {
    Nothing,
    Road,
    Of(String),
    Failed { model: String, version: u64, error: String },
}

impl News {
    pub fn of(message: &FromWorker) -> News {
        match message {
            FromWorker::Ping(_) => News::Road,
            FromWorker::Progress(said) => News::Of(said.model.clone()),
            FromWorker::Staged(said) | FromWorker::Applied(said) => News::Of(said.model.clone()),
            FromWorker::Failed(said) => {
                let text = printable(&said.text, ERROR_MAX - said.code.len() - 2);
                let error = format!("{}: {}", said.code, text);
                News::Failed { model: said.model.clone(), version: said.version, error }
            }
            _ => News::Nothing,
        }
    }
}

impl PublisherMachine {
    /// Tells observers the time of day.
    pub fn clock(mut self, clock: Clock) -> PublisherMachine {
        self.observers.clock = Some(clock);
        self
    }

    /// Milliseconds since 1970, if this publisher has such a clock.
    pub(super) fn time_ms(&self) -> Option<u64> {
        self.observers.clock.as_ref().map(|clock| clock())
    }

    // What happens.

    /// A worker has said something, and that was dealt with: takes note of it if it is news to observers.
    pub(super) fn tell_observers(&mut self, name: &str, news: News, now: Time) {
        let epoch = self.epoch();
        let peer = match self.roster.get_mut(name) {
            Some(peer) => peer,
            None => return,
        };
        let changed = match news {
            News::Nothing => false,
            News::Road => peer.seen.subscribed.replace(peer.subscribed) != Some(peer.subscribed),
            News::Of(model) if peer.wants(&model) => {
                settled(peer, &model, epoch, self.observers.models.get(&model), now);
                is_news(peer, &model)
            }
            News::Failed { model, version, error } if peer.wants(&model) => {
                peer.seen.failed.insert(model.clone(), (version, error));
                is_news(peer, &model)
            }
            News::Of(_) | News::Failed { .. } => false,
        };
        if changed {
            self.roster.touch(name);
        }
    }

    /// Something became of a worker, as whoever listens is told.
    pub fn happened(&mut self, event: &WorkerEvent, now: Time) {
        if event.worker.is_empty() {
            return;
        }
        let revision = self.roster.revise();
        self.observers.events.push_back((revision, now, event.clone()));
        if self.observers.events.len() > EVENTS_TOLD {
            self.observers.drop_event(&event.worker);
        }
        self.roster.touch(&event.worker);
    }

    // What is told.

    /// Answers somebody who looks on, if its key, where there are keys, lets it do that (K4).
    pub(super) fn observed(&mut self, from: &[u8], key: &str, asked: &Observe, now: Time) {
        if !self.may_look_on(key) {
            return self.refuse(from, "not-allowed", NO_OBSERVER, None);
        }
        if !self.observers.admit(from, now) {
            let text =
                format!("{} observers look on already: end one of them, or wait a moment", OBSERVERS_MAX);
            return self.refuse(from, "limit", &text, None);
        }
        for header in self.pages(asked, now) {
            self.perform(Effect::Answer { to: from.to_vec(), header });
        }
    }

    /// What has changed since a revision, as far as it fits so many pages.
    fn pages(&mut self, asked: &Observe, now: Time) -> Vec<Vec<u8>> {
        self.look_at_models();
        let (epoch, latest) = (self.epoch(), self.roster.revision());
        let since = if asked.epoch == epoch && asked.since <= latest { asked.since } else { 0 };
        let Observers { rows, models, events, .. } = &mut self.observers;
        let (mut pages, mut page, mut more) = (Vec::new(), Page::new(since), false);
        for (at, what) in changed(models, events, &self.roster, since) {
            more = !rows.take(1.0, ROWS, now);
            if !more && !page.takes(at, &what, &self.store, &self.timing, now) {
                more = pages.len() + 1 >= asked.pages.min(PAGES_MAX) as usize;
                if !more {
                    let next = Page::new(page.revision);
                    pages.push(std::mem::replace(&mut page, next));
                    page.takes(at, &what, &self.store, &self.timing, now);
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

    /// Takes note of each model's latest version, and of which workers another one is the newest.
    fn look_at_models(&mut self) {
        for (name, versions) in &self.store.models {
            let model = self.observers.models.entry(name.clone()).or_default();
            let latest = versions.latest().and_then(|number| versions.get(number));
            if let Some(latest) = latest.filter(|latest| self.store.key(latest.number) != model.latest) {
                model.latest = self.store.key(latest.number);
                (model.revision, model.nbytes) = (self.roster.revise(), latest.content.plan.nbytes);
                model.metadata = latest.content.metadata.clone();
            }
            let (before, targeted) = (&model.targeted, versions.targeted());
            if before != targeted {
                let others = before.iter().filter(|(name, number)| targeted.get(*name) != Some(number));
                let other = targeted.iter().filter(|(name, number)| before.get(*name) != Some(number));
                let names: BTreeSet<&String> = others.chain(other).map(|(name, _)| name).collect();
                names.into_iter().for_each(|name| self.roster.touch(name));
                model.targeted = targeted.clone();
            }
        }
    }
}

/// What has changed since, the longest ago first, as far as pages may hold it. The revisions are all different.
fn changed<'a>(
    models: &'a BTreeMap<String, ModelSeen>,
    events: &'a VecDeque<(u64, Time, WorkerEvent)>,
    roster: &'a Roster,
    since: u64,
) -> Vec<(u64, Changed<'a>)> {
    let models = models.iter().filter(|(_, model)| model.revision > since);
    let mut found: Vec<_> =
        models.map(|(name, model)| (model.revision, Changed::Model(name, model))).collect();
    let workers = roster.changed(since).map(|(at, peer)| (at, Changed::Worker(peer)));
    found.extend(workers.take(PAGES_MAX as usize * Page::ROWS_MAX + 1)); // more never fit
    let events = events.iter().filter(|(at, ..)| *at > since);
    found.extend(events.map(|(at, time, event)| (*at, Changed::Event(*time, event))));
    found.sort_by_key(|(at, _)| *at);
    found
}

/// Takes note of how long a worker took to what it runs, and of what that makes up for.
fn settled(peer: &mut Peer, model: &str, epoch: u64, seen: Option<&ModelSeen>, now: Time) {
    let (of, version) = peer.runs(model);
    let new = of == epoch && peer.seen.took.get(model).map(|(number, _)| *number) != Some(version);
    if let Some(published) = seen.and_then(|seen| seen.times.get(&version)).filter(|_| new) {
        let took = (now.saturating_sub(*published).as_micros() as u64).max(1);
        peer.seen.took.insert(model.to_owned(), (version, took));
    }
    if peer.seen.failed.get(model).map_or(false, |(failed, _)| *failed <= version) {
        peer.seen.failed.remove(model);
    }
}

/// Whether observers know other things of a worker and a model than are so; from now on they are to know these.
fn is_news(peer: &mut Peer, model: &str) -> bool {
    let at = peer.incoming.get(model).map(|its| (its.version, its.phase, its.chunks));
    let now = (peer.runs(model), at, peer.seen.failed.get(model).cloned());
    let told = peer.seen.told.get(model) != Some(&now);
    if told {
        peer.seen.told.insert(model.to_owned(), now);
    }
    told
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
            machine.happened(&event, Time::ZERO);
        };
        happens("good");
        (0..1000).for_each(|_| happens("noisy"));
        let of =
            |name: &str| machine.observers.events.iter().filter(|(_, _, its)| its.worker == name).count();
        assert_eq!((of("good"), of("noisy")), (1, EVENTS_TOLD - 1));
    }
}
