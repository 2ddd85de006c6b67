//! A publisher's machine, two relays with sessions, and a third one behind the second, under a virtual clock. Workers
//! join at a relay or at the publisher, move, leave and are killed; relays are cut off and killed. No receipt claims
//! what did not happen, or has a relay; nothing is sent to a worker behind a relay; no version is both committed and
//! aborted; and once all is well, the next publish is achieved by every worker, and the publisher knows where each is.
#![allow(clippy::needless_update)] // in literals of messages, which later fields leave alone

#[path = "publisher/dice.rs"]
mod dice;

use dice::Dice;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use weightbus::limits::Timing;
use weightbus::messages::*;
use weightbus::publisher::content::Copier;
use weightbus::publisher::effects::Effect;
use weightbus::publisher::machine::PublisherMachine;
use weightbus::publisher::publication::PublishTerms;
use weightbus::{Dtype, Outcome, Receipt, Require, TensorView, Wait, WorkerState};

const EPOCH: u64 = 1;
const STEP: Duration = Duration::from_millis(100);
const PING_STEPS: u32 = 10;
const SOON: u32 = 600; // steps: a minute
const MODEL: &str = "m";
const PLACES: [&[&str]; 4] = [&["r0"], &["r1"], &["r1", "r2"], &[]]; // the last: at the publisher
const DIRECT: usize = 3;
const WORKERS: usize = 4;

/// Something that happens at a step.
#[derive(Clone, Debug)]
enum Deed {
    Publish { how: How, timeout: u32 },
    Move(usize, usize),
    Kill(usize, usize),
    Leave(usize, usize),
    Notice(usize),
    Cut(usize, bool),
    Reconnect(usize, u32),
    KillRelay(usize),
}

#[derive(Clone, Debug)]
enum How {
    Applied(Option<usize>),
    Staged,
    Together(Option<usize>),
    For(BTreeSet<usize>),
}

/// A version at a relay with a session, or at a worker with one.
#[derive(Clone, Default)]
struct Held {
    committed: bool,
    stages: bool,
    only: Vec<String>,
}

/// A connection with the publisher: of a relay, or of a worker.
#[derive(Default)]
struct Session {
    name: String,
    instance: u64,
    relay: bool,
    connection: u32,
    welcomed: bool,
    held: BTreeMap<u64, Held>,
    sent: BTreeMap<String, WorkerRow>, // the last row of each worker
    first: bool,
    staged: BTreeSet<u64>, // the versions that it has reported so
    muted_until: u32,
}

impl Session {
    fn identity(&self) -> Vec<u8> {
        format!("{}/{}", self.name, self.connection).into_bytes()
    }

    fn hello(&self) -> FromWorker {
        FromWorker::Hello(Hello {
            name: self.name.clone(),
            instance: format!("{:032x}", self.instance),
            models: Some((MODEL.to_owned(), None)).into_iter().collect(),
            features: if self.relay { vec![RELAY.to_owned()] } else { Vec::new() },
            ..Default::default()
        })
    }
}

#[derive(Default)]
struct Worker {
    at: usize,
    instance: u64,
    heard: u32, // the step at which it joined there
    running: u64,
    staged: u64,
    failed: u64,
}

/// What a relay knows of a worker, which may be elsewhere by now.
#[derive(Clone)]
struct Known {
    row: WorkerRow,
    heard: u32,
}

struct World {
    machine: PublisherMachine,
    sessions: Vec<Session>, // of r0, r1, and the workers
    workers: Vec<Worker>,
    known: [BTreeMap<String, Known>; 3], // by relay
    heard: VecDeque<(u32, Vec<u8>, Vec<u8>)>,
    said: VecDeque<(u32, Vec<u8>, FromPublisher)>,
    log: BTreeSet<(String, &'static str, u64)>,
    decided: BTreeMap<u64, &'static str>,
    digests: BTreeMap<u64, String>,
    asked: BTreeMap<u64, PublishTerms>,
    receipts: BTreeMap<u64, (Receipt, bool)>,
    lives: u64,
    step: u32,
    dice: Dice,
    well: bool,
}

fn name(worker: usize) -> String {
    format!("w{}", worker)
}

impl World {
    fn new(seed: u64) -> World {
        let machine = PublisherMachine::new(EPOCH, "tcp://*:1", Timing::default(), None, None);
        let names = ["r0", "r1"].iter().map(|name| (*name).to_owned()).chain((0..WORKERS).map(name));
        let session = |(at, name)| Session { name, relay: at < 2, instance: 1, ..Session::default() };
        let mut world = World {
            machine,
            sessions: names.enumerate().map(session).collect(),
            workers: Vec::new(),
            known: Default::default(),
            heard: VecDeque::new(),
            said: VecDeque::new(),
            log: BTreeSet::new(),
            decided: BTreeMap::new(),
            digests: BTreeMap::new(),
            asked: BTreeMap::new(),
            receipts: BTreeMap::new(),
            lives: 1,
            step: 0,
            dice: Dice(seed),
            well: false,
        };
        for worker in 0..WORKERS {
            let at = world.dice.roll(PLACES.len() as u32) as usize;
            world.workers.push(Worker { at, instance: 1, ..Worker::default() });
            world.joins(worker);
        }
        world
    }

    fn now(&self) -> Duration {
        STEP * self.step
    }

    /// The session by which a place is connected to the publisher.
    fn session_of(&self, worker: usize) -> usize {
        match self.workers[worker].at {
            DIRECT => 2 + worker,
            at => at.min(1),
        }
    }

    fn act(&mut self, deed: Deed) {
        match deed {
            Deed::Publish { how, timeout } => {
                self.publish(&how, timeout);
            }
            Deed::Move(worker, to) => {
                self.workers[worker].at = to;
                self.joins(worker);
            }
            Deed::Kill(worker, to) => {
                self.lives += 1;
                self.workers[worker] = Worker { at: to, instance: self.lives, ..Worker::default() };
                self.joins(worker);
            }
            Deed::Leave(worker, to) => {
                match self.workers[worker].at {
                    DIRECT => self.say(2 + worker, FromWorker::Bye(Bye::default())),
                    at => drop(self.known[at].remove(&name(worker))),
                }
                self.act(Deed::Kill(worker, to));
            }
            Deed::Notice(at) => self.notice(at),
            Deed::Cut(session, seen) => self.cut(session, seen),
            Deed::Reconnect(session, steps) => {
                // With its old routing id; what it says until then is lost.
                let identity = self.sessions[session].identity();
                self.heard.retain(|(_, from, _)| *from != identity);
                self.sessions[session].muted_until = self.step + steps;
                let effects = self.machine.unreachable(&identity, self.now());
                self.perform(effects);
            }
            Deed::KillRelay(relay) => {
                self.cut(relay, true);
                self.lives += 1;
                self.sessions[relay].instance = self.lives;
                for at in if relay == 0 { 0..1 } else { 1..3 } {
                    self.known[at].clear();
                    for worker in
                        (0..WORKERS).filter(|&worker| self.workers[worker].at == at).collect::<Vec<_>>()
                    {
                        self.joins(worker);
                    }
                }
            }
        }
    }

    fn joins(&mut self, worker: usize) {
        self.workers[worker].heard = self.step;
        if self.workers[worker].at == DIRECT {
            self.sessions[2 + worker].instance = self.workers[worker].instance;
            self.cut(2 + worker, false);
        } else {
            // A relay reports a worker that says hello, even if the worker has not changed.
            let relay = usize::from(self.workers[worker].at > 0);
            self.sessions[relay].sent.remove(&name(worker));
        }
    }

    /// A relay finds out which of its workers are gone, and how.
    fn notice(&mut self, at: usize) {
        let (workers, dice, well) = (&self.workers, &mut self.dice, self.well);
        self.known[at].retain(|name, known| {
            let here = (0..WORKERS).any(|w| {
                let worker = &workers[w];
                self::name(w) == *name
                    && worker.at == at
                    && known.row.instance == format!("{:032x}", worker.instance)
            });
            known.row.state = if here { WorkerRowState::Live } else { WorkerRowState::Lost };
            here || !(well || dice.hits(50))
        });
    }

    fn cut(&mut self, session: usize, seen: bool) {
        let before = self.sessions[session].identity();
        let its = &mut self.sessions[session];
        (its.connection, its.welcomed) = (its.connection + 1, false);
        its.held.clear();
        its.staged.clear();
        if seen {
            let effects = self.machine.unreachable(&before, self.now());
            self.perform(effects);
        }
    }

    fn publish(&mut self, how: &How, timeout: u32) -> u64 {
        let number = self.digests.len() as u64 + 1;
        let bytes = [number as u8; 40];
        let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[40], bytes: &bytes };
        let content = Arc::new(Copier::default().copy(&[tensor], 16).unwrap());
        let least = |count: Option<usize>| count.map_or(Require::All, Require::AtLeast);
        let mut terms = PublishTerms { timeout: STEP * timeout, ..PublishTerms::default() };
        match how {
            How::Applied(count) => terms.require = least(*count),
            How::Staged => terms.wait = Wait::Staged,
            How::Together(count) => {
                (terms.require, terms.commit) = (least(*count), AnnounceCommit::Together);
            }
            How::For(workers) => terms.workers = Some(workers.iter().map(|&worker| name(worker)).collect()),
        }
        if self.well {
            (terms.expect, terms.grace, terms.grace_of_gone) = (WORKERS, terms.timeout, terms.timeout);
        }
        let (id, digest) = (self.asked.len() as u64 + 1, content.digest.clone());
        self.asked.insert(id, terms.clone());
        if let Ok(effects) = self.machine.publish(id, MODEL, content, terms, self.now(), self.now()) {
            self.digests.insert(number, digest);
            self.perform(effects);
        } // else nobody of that name was ever there
        id
    }

    // The publisher.

    fn perform(&mut self, effects: Vec<Effect>) {
        let due = self.step + 1;
        for effect in effects {
            match effect {
                Effect::Send { to, message, .. } => {
                    assert!(!to.is_empty(), "{:?}", message);
                    let its = |decision: &'static str, version: u64, decided: &mut BTreeMap<u64, _>| {
                        let before = *decided.entry(version).or_insert(decision);
                        assert_eq!(before, decision, "of version {}", version);
                    };
                    match &message {
                        FromPublisher::Commit(commit) => {
                            its("commit", commit.version, &mut self.decided);
                            let relay = self.sessions[..2].iter().find(|relay| relay.identity() == to);
                            assert!(relay.map_or(true, |relay| relay.staged.contains(&commit.version)));
                        }
                        FromPublisher::Abort(abort)
                            if abort.text != "the version was aborted or superseded" =>
                        {
                            its("abort", abort.version, &mut self.decided);
                        }
                        _ => {}
                    }
                    self.said.push_back((due, to, message));
                }
                Effect::Broadcast { message, .. } => {
                    for session in &self.sessions {
                        self.said.push_back((due, session.identity(), message.clone()));
                    }
                }
                Effect::Resolve { id, receipt, achieved, .. } => self.resolved(id, receipt, achieved),
                _ => {}
            }
        }
    }

    /// A receipt must not claim what did not happen.
    fn resolved(&mut self, id: u64, receipt: Receipt, achieved: bool) {
        let version = receipt.version;
        for (name, worker) in &receipt.workers {
            assert!(name.starts_with('w'), "a relay is no target: {}", receipt);
            let did = |what| self.log.contains(&(name.clone(), what, version));
            let so = match worker.outcome {
                Outcome::Applied => did("applied"),
                Outcome::Staged => did("staged"),
                Outcome::Failed => did("failed"),
                Outcome::Skipped => self
                    .log
                    .iter()
                    .any(|(who, what, other)| who == name && *what == "applied" && *other > version),
                _ => true,
            };
            assert!(so, "{} did not: {}", name, receipt);
        }
        let asked = &self.asked[&id];
        if achieved && (asked.require, asked.wait) == (Require::All, Wait::Applied) {
            let there = [Outcome::Applied, Outcome::Skipped, Outcome::Left];
            assert!(receipt.workers.values().all(|worker| there.contains(&worker.outcome)), "{}", receipt);
        }
        assert!(self.receipts.insert(id, (receipt, achieved)).is_none(), "an answer was given twice");
    }

    /// Nobody is live behind a relay that is lost.
    fn check_lost(&self) {
        let status = self.machine.status(self.now());
        for (name, its) in status.iter().filter(|(_, its)| its.state != WorkerState::Lost) {
            let relay = its.through.first().and_then(|relay| status.get(relay));
            assert!(relay.map_or(true, |relay| relay.state != WorkerState::Lost), "{}: {:?}", name, its);
        }
    }

    // The relays and the workers.

    fn say(&mut self, session: usize, message: FromWorker) {
        if self.step < self.sessions[session].muted_until {
            return;
        }
        self.heard.push_back((self.step + 1, self.sessions[session].identity(), encode(&message)));
    }

    /// Plays deeds, each followed by as many steps; then heals the tree, and lets it settle.
    fn play(&mut self, deeds: Vec<(Deed, u32)>) {
        for (deed, steps) in deeds {
            self.act(deed);
            (0..steps).for_each(|_| self.advance());
        }
        self.well = true;
        (0..3).for_each(|at| self.notice(at));
        (0..200).for_each(|_| self.advance());
    }

    fn advance(&mut self) {
        self.step += 1;
        while self.heard.front().map_or(false, |(due, ..)| *due <= self.step) {
            let (_, from, header) = self.heard.pop_front().unwrap();
            if self.sessions.iter().any(|session| session.identity() == from) {
                let effects = self.machine.receive(&from, &header, 0, self.now());
                self.perform(effects);
            } // else the connection has ended
        }
        let effects = self.machine.tick(self.now());
        self.perform(effects);
        while self.said.front().map_or(false, |(due, ..)| *due <= self.step) {
            let (_, to, message) = self.said.pop_front().unwrap();
            if let Some(at) = self.sessions.iter().position(|session| session.identity() == to) {
                self.receive(at, message);
            }
        }
        self.check_lost();
        for worker in 0..WORKERS {
            if self.dice.hits(30) {
                self.go_on(worker);
            }
        }
        for session in 0..self.sessions.len() {
            self.report(session);
        }
    }

    fn receive(&mut self, session: usize, message: FromPublisher) {
        let its = &mut self.sessions[session];
        let latest = |its: &mut Session, models: &BTreeMap<String, u64>| {
            if let Some(&latest) = models.get(MODEL) {
                its.held.insert(latest, Held { committed: true, ..Held::default() });
            }
        };
        match message {
            FromPublisher::Welcome(said) => {
                assert_eq!(said.features.contains(&RELAY.to_owned()), its.relay);
                (its.welcomed, its.first) = (true, true);
                latest(its, &said.models);
            }
            FromPublisher::Pong(said) => latest(its, &said.models),
            FromPublisher::Refuse(said) => its.welcomed &= said.code == "gone",
            FromPublisher::Ping(_) => self.say(session, FromWorker::Pong(Pong::default())),
            FromPublisher::Announce(said) if its.welcomed => {
                let committed = said.commit == AnnounceCommit::Auto;
                let stages = said.acknowledge == AnnounceAcknowledge::Staged;
                assert!(its.relay || said.workers.is_empty());
                its.held.insert(said.version, Held { committed, stages, only: said.workers });
                let (model, digest) = (said.model, self.digests[&said.version].clone());
                let (epoch, version) = (EPOCH, said.version);
                if its.relay && !committed {
                    its.staged.insert(version);
                    let staged = Staged { model, epoch, version, digest, ..Default::default() };
                    self.say(session, FromWorker::Staged(staged));
                } else if its.relay {
                    let applied = Applied { model, epoch, version, digest, ..Default::default() };
                    self.say(session, FromWorker::Applied(applied));
                }
            }
            FromPublisher::Commit(said) => {
                if let Some(held) = its.held.get_mut(&said.version) {
                    held.committed = true;
                }
            }
            FromPublisher::Abort(said) => drop(its.held.remove(&said.version)),
            _ => {}
        }
    }

    /// A worker stages, applies or fails the newest version that it can have.
    fn go_on(&mut self, worker: usize) {
        let (session, name) = (self.session_of(worker), name(worker));
        let its = &mut self.workers[worker];
        let newer = |(&version, held): &(&u64, &Held)| {
            let mine = held.only.is_empty() || held.only.contains(&name);
            mine && version > its.running && version > its.failed
        };
        let newest = self.sessions[session].held.iter().rev().find(newer);
        let (version, held) = match newest {
            Some((&version, held)) if self.sessions[session].welcomed => (version, held.clone()),
            _ => return,
        };
        let did = match its.staged == version {
            false if held.stages || !held.committed => "staged",
            _ if !held.committed => return,
            _ if !self.well && self.dice.hits(10) => "failed",
            _ => "applied",
        };
        match did {
            "staged" => its.staged = version,
            "failed" => its.failed = version,
            _ => its.running = version,
        }
        self.log.insert((name, did, version));
        if session >= 2 {
            self.say_what(session, did, version);
        }
    }

    fn say_what(&mut self, session: usize, did: &str, version: u64) {
        let (model, epoch, digest) = (MODEL.to_owned(), EPOCH, self.digests[&version].clone());
        let message = match did {
            "staged" => FromWorker::Staged(Staged { model, epoch, version, digest, ..Default::default() }),
            "applied" => FromWorker::Applied(Applied { model, epoch, version, digest, ..Default::default() }),
            _ => {
                let (code, text, intact) = ("apply".to_owned(), "no".to_owned(), true);
                FromWorker::Failed(Failed { model, epoch, version, code, text, intact, ..Default::default() })
            }
        };
        self.say(session, message);
    }

    /// What a connection says by itself: hello, ping, and of a relay what has changed behind it.
    fn report(&mut self, session: usize) {
        let pings = self.step % PING_STEPS == 0;
        if session >= 2 && self.workers[session - 2].at != DIRECT {
            return;
        }
        if !self.sessions[session].welcomed {
            if pings {
                self.say(session, self.sessions[session].hello());
            }
            return;
        }
        if pings {
            self.say(session, FromWorker::Ping(Ping { subscribed: true, ..Default::default() }));
        }
        if session < 2 {
            self.report_below(session);
        } else if self.sessions[session].first {
            self.sessions[session].first = false;
            let runs = self.workers[session - 2].running;
            if runs > 0 {
                self.say_what(session, "applied", runs);
            }
        }
    }

    fn report_below(&mut self, session: usize) {
        let step = self.step;
        for (w, worker) in self.workers.iter().enumerate().filter(|(_, worker)| worker.at != DIRECT) {
            let heard = worker.heard;
            let known = Known { row: row(w, worker), heard };
            self.known[worker.at].insert(name(w), known);
        }
        let mut rows = BTreeMap::new();
        let places = if session == 0 { 0..1 } else { 1..3 };
        for at in places {
            if at == 2 {
                let inner = WorkerRow { name: "r2".to_owned(), relay: true, ..row(0, &Worker::default()) };
                rows.insert(inner.name.clone(), (inner, step));
            }
            for (name, known) in &self.known[at] {
                let through = PLACES[at][1..].iter().map(|&name| name.to_owned()).collect();
                let better = rows.get(name).map_or(true, |(_, heard)| known.heard > *heard);
                if better {
                    rows.insert(name.clone(), (WorkerRow { through, ..known.row.clone() }, known.heard));
                }
            }
        }
        let its = &mut self.sessions[session];
        let first = std::mem::take(&mut its.first);
        let all: BTreeMap<String, WorkerRow> =
            rows.iter().map(|(name, (row, _))| (name.clone(), row.clone())).collect();
        let left: Vec<String> = its.sent.keys().filter(|name| !all.contains_key(*name)).cloned().collect();
        let changed = |(name, row): &(&String, &WorkerRow)| first || its.sent.get(*name) != Some(row);
        let aged = |(name, row): (&String, &WorkerRow)| {
            let heard_ms = u64::from(step - rows[name].1) * STEP.as_millis() as u64;
            WorkerRow { heard_ms, ..row.clone() }
        };
        let rows: Vec<WorkerRow> = all.iter().filter(changed).map(aged).collect();
        its.sent = all;
        if first || !rows.is_empty() || !left.is_empty() {
            let half = rows.len() / 2 * usize::from(self.dice.hits(50));
            let (epoch, more) = (EPOCH, half > 0);
            let (mut rows, mut begun) = (rows, Below { epoch, first, more, left, ..Default::default() });
            begun.rows = rows.drain(..half).collect();
            if more {
                self.say(session, FromWorker::Below(begun));
                begun = Below { epoch, ..Default::default() };
            }
            self.say(session, FromWorker::Below(Below { rows, ..begun }));
        }
    }
}

fn row(worker: usize, its: &Worker) -> WorkerRow {
    let epoch = if its.running > 0 { EPOCH } else { 0 };
    let staged = its.staged > its.running;
    let failed = its.failed > its.running;
    let doing = Doing {
        epoch,
        version: its.running,
        incoming: if staged { its.staged } else { 0 },
        phase: Some(ProgressPhase::Staged).filter(|_| staged),
        failed: if failed { its.failed } else { 0 },
        error: if failed { "apply: no".to_owned() } else { String::new() },
        ..Default::default()
    };
    WorkerRow {
        name: name(worker),
        state: WorkerRowState::Live,
        road: WorkerRowRoad::Pushed,
        models: Some((MODEL.to_owned(), doing)).into_iter().collect(),
        instance: format!("{:032x}", its.instance),
        ..Default::default()
    }
}

fn deed() -> impl Strategy<Value = Deed> {
    let count = || prop::option::weighted(0.3, 0..=WORKERS);
    let how = prop_oneof![
        3 => count().prop_map(How::Applied),
        1 => Just(How::Staged),
        3 => count().prop_map(How::Together),
        2 => prop::collection::btree_set(0..WORKERS, 1..WORKERS).prop_map(How::For),
    ];
    let (who, place) = (|| 0..WORKERS, || 0..PLACES.len());
    prop_oneof![
        8 => (how, 1..300u32).prop_map(|(how, timeout)| Deed::Publish { how, timeout }),
        2 => (who(), place()).prop_map(|(worker, to)| Deed::Move(worker, to)),
        2 => (who(), place()).prop_map(|(worker, to)| Deed::Kill(worker, to)),
        1 => (who(), place()).prop_map(|(worker, to)| Deed::Leave(worker, to)),
        2 => (0..3usize).prop_map(Deed::Notice),
        3 => (0..2usize, 0..80u32).prop_map(|(relay, steps)| Deed::Reconnect(relay, steps)),
        2 => (0..2 + WORKERS, any::<bool>()).prop_map(|(session, seen)| Deed::Cut(session, seen)),
        1 => (0..2usize).prop_map(Deed::KillRelay),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_tree_that_heals_brings_the_newest_version_to_all(
        seed: u64,
        deeds in prop::collection::vec((deed(), 0..80u32), 1..16),
    ) {
        let mut world = World::new(seed);
        world.play(deeds);
        let status = world.machine.status(world.now());
        for (w, worker) in world.workers.iter().enumerate() {
            let its = &status[&name(w)];
            prop_assert_eq!(&its.through, PLACES[worker.at], "of {}", name(w));
            prop_assert_ne!(its.state, WorkerState::Lost, "of {}", name(w));
            prop_assert_eq!(its.models[MODEL], Some((EPOCH, worker.running)).filter(|_| worker.running > 0));
        }
        let last = world.publish(&How::Applied(None), SOON);
        for _ in 0..SOON + 10 {
            if world.receipts.contains_key(&last) {
                break;
            }
            world.advance();
        }
        let (receipt, achieved) = world.receipts.get(&last).cloned().expect("an answer");
        prop_assert!(achieved, "{}", receipt);
        let applied = receipt.workers.values().filter(|worker| worker.outcome == Outcome::Applied).count();
        prop_assert_eq!(applied, WORKERS, "{}", receipt);
        let status = world.machine.status(world.now());
        for (w, worker) in world.workers.iter().enumerate() {
            let its = &status[&name(w)];
            prop_assert_eq!(&receipt.workers[&name(w)].through, PLACES[worker.at], "{}", receipt);
            prop_assert_eq!(its.models[MODEL], Some((EPOCH, receipt.version)));
        }
    }
}

#[test]
fn of_two_relays_rows_about_a_worker_that_of_the_one_that_heard_it_last_is_kept() {
    let mut world = World::new(7650168117963695133);
    let now = || How::Applied(None);
    world.play(vec![
        (Deed::Publish { how: now(), timeout: 1 }, 20),
        (Deed::Kill(1, 3), 0),
        (Deed::Reconnect(0, 64), 55),
        (Deed::Publish { how: now(), timeout: 1 }, 8),
        (Deed::Kill(1, 1), 19),
    ]);
    let status = world.machine.status(world.now());
    assert_eq!(status[&name(1)].through, PLACES[world.workers[1].at]);
}
