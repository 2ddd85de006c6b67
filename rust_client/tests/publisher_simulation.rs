//! A publisher's machine and those of some workers, on a network that loses, delays and doubles, under a virtual
//! clock; workers are killed, stopped and cut off, and the publisher is restarted. Whatever is applied is what was
//! published, whole, and never older than before; no receipt claims what did not happen; and once the network heals,
//! the next publish is achieved by everybody.

#[path = "publisher/dice.rs"]
mod dice;

use dice::Dice;
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use weightbus::effects::{Effect as WorkerEffect, Host, Source, Staged};
use weightbus::layout::Layout;
use weightbus::limits::Timing;
use weightbus::machine::{Identity, Machine as WorkerMachine, Wanted};
use weightbus::messages::{encode, CommitMode, FromWorker, Hello, OfVersion};
use weightbus::publisher::content::{Content, Copier};
use weightbus::publisher::effects::{Effect, Payload};
use weightbus::publisher::machine::Machine;
use weightbus::publisher::publication::Asked;
use weightbus::zmtp::{Published, PublishedPayload};
use weightbus::{Dtype, Outcome, Receipt, Require, TensorView, Wait};

const MODEL: &str = "policy";
const STEP: Duration = Duration::from_millis(20);
const SOON: u32 = 3000; // steps: a minute

type Key = (u64, u64);
type Message = (Vec<u8>, Payload);

struct AnyLayout;

impl Host for AnyLayout {
    fn fault(&self, _model: &str, _layout: &Layout) -> Option<String> {
        None
    }
}

/// How bad the network is, in parts of a hundred.
#[derive(Clone, Debug)]
struct Weather {
    loss: u32,
    doubling: u32,
    delay_steps: u32,
}

/// Something that happens at a step.
#[derive(Clone, Debug)]
enum Deed {
    Publish { bytes: usize, chunk_bytes: u64, how: How, require: Option<usize>, timeout: u32 },
    RestartPublisher,
    RestartWorker(usize),
    Cut(usize),
    Stop(usize, u32),
    Leave(usize),
}

#[derive(Clone, Debug)]
enum How {
    Applied,
    Staged,
    Together,
    Nobody,
    For(usize),
}

struct Worker {
    name: String,
    machine: WorkerMachine,
    connection: u32,
    subscribed: Vec<String>,
    control: VecDeque<(u32, Message)>, // to it, by the step at which it arrives
    published: VecDeque<(u32, String, Message)>,
    ready: VecDeque<(u32, Staged)>,
    ran: Vec<Key>,
    stopped_until: u32,
}

impl Worker {
    fn new(at: usize, life: u32) -> Worker {
        let name = format!("w{}", at);
        let identity = Identity {
            name: name.clone(),
            instance: format!("{:016x}{:016x}", at, life),
            client: String::new(),
            host: String::new(),
            pid: 0,
        };
        let wanted = [Wanted { model: MODEL.to_owned(), nbytes: 0 }];
        Worker {
            name,
            machine: WorkerMachine::new(identity, &wanted, Arc::new(AnyLayout), 1 << 20, Timing::default()),
            connection: life,
            subscribed: Vec::new(),
            control: VecDeque::new(),
            published: VecDeque::new(),
            ready: VecDeque::new(),
            ran: Vec::new(),
            stopped_until: 0,
        }
    }

    fn identity(&self) -> Vec<u8> {
        format!("{}/{}", self.name, self.connection).into_bytes()
    }
}

struct World {
    publisher: Machine,
    workers: Vec<Worker>,
    heard: VecDeque<(u32, Vec<u8>, Vec<u8>)>, // to the publisher
    history: BTreeMap<Key, (Vec<u8>, bool)>,  // what was published, and whether together
    ran: BTreeMap<String, Vec<Key>>,          // by whoever had the name
    receipts: BTreeMap<u64, (Receipt, bool)>,
    asked: BTreeMap<u64, Asked>,
    ids: u64,
    number: u64,
    lives: u32,
    now: Duration,
    step: u32,
    dice: Dice,
    weather: Weather,
}

impl World {
    fn new(seed: u64, weather: Weather, workers: usize) -> World {
        World {
            publisher: machine(1),
            workers: (0..workers).map(|at| Worker::new(at, 0)).collect(),
            heard: VecDeque::new(),
            history: BTreeMap::new(),
            ran: BTreeMap::new(),
            receipts: BTreeMap::new(),
            asked: BTreeMap::new(),
            ids: 0,
            number: 0,
            lives: 1,
            now: Duration::ZERO,
            step: 0,
            dice: Dice(seed),
            weather,
        }
    }

    fn act(&mut self, deed: Deed) {
        match deed {
            Deed::Publish { bytes, chunk_bytes, how, require, timeout } => {
                let workers = match how {
                    How::For(at) => Some(vec![format!("w{}", at % self.workers.len())]),
                    _ => None,
                };
                let count = self.workers.len();
                let require = require.map_or(Require::All, |least| Require::AtLeast(least % (count + 1)));
                let asked = Asked {
                    require: if workers.is_some() { Require::All } else { require },
                    workers,
                    wait: match how {
                        How::Staged => Wait::Staged,
                        How::Nobody => Wait::Nobody,
                        _ => Wait::Applied,
                    },
                    commit: if matches!(how, How::Together) {
                        CommitMode::Together
                    } else {
                        CommitMode::Auto
                    },
                    timeout: STEP * timeout,
                    ..Asked::default()
                };
                self.publish(bytes, chunk_bytes, asked);
            }
            Deed::RestartPublisher => {
                self.publisher = machine(self.publisher.epoch() + 1);
                self.number = 0;
                for worker in &mut self.workers {
                    worker.connection += 1;
                }
            }
            Deed::RestartWorker(at) => self.restart(at),
            Deed::Cut(at) => {
                let count = self.workers.len();
                self.workers[at % count].connection += 1;
            }
            Deed::Stop(at, steps) => {
                let count = self.workers.len();
                self.workers[at % count].stopped_until = self.step + steps;
            }
            Deed::Leave(at) => {
                let at = at % self.workers.len();
                for effect in self.workers[at].machine.close() {
                    if let WorkerEffect::Send(message) = effect {
                        self.heard.push_back((self.step, self.workers[at].identity(), encode(&message)));
                    }
                }
                self.restart(at);
            }
        }
    }

    fn restart(&mut self, at: usize) {
        self.lives += 1;
        let at = at % self.workers.len();
        self.workers[at] = Worker::new(at, 1000 * self.lives);
    }

    fn publish(&mut self, bytes: usize, chunk_bytes: u64, asked: Asked) -> u64 {
        let data: Vec<u8> = (0..bytes).map(|_| self.dice.roll(256) as u8).collect();
        let content = content(&data, chunk_bytes);
        let together = asked.commit == CommitMode::Together;
        self.ids += 1;
        self.asked.insert(self.ids, asked.clone());
        let published = self.publisher.publish(self.ids, MODEL, content, asked, self.now, self.now);
        if let Ok(effects) = published {
            self.number += 1;
            self.history.insert((self.publisher.epoch(), self.number), (data, together));
            self.perform(effects);
        } // else nobody of that name was ever there
        self.ids
    }

    fn due(&mut self) -> u32 {
        self.step + 1 + self.dice.roll(self.weather.delay_steps + 1)
    }

    fn copies(&mut self) -> u32 {
        if self.dice.hits(self.weather.loss) {
            0
        } else {
            1 + u32::from(self.dice.hits(self.weather.doubling))
        }
    }

    // The publisher.

    fn perform(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send { to, message, payload } => {
                    match self.workers.iter().position(|worker| worker.identity() == to) {
                        Some(at) => {
                            for _ in 0..self.copies() {
                                let due = self.due();
                                let message = (encode(&message), payload.clone());
                                self.workers[at].control.push_back((due, message));
                            }
                        }
                        None => {
                            let effects = self.publisher.unreachable(&to, self.now);
                            self.perform(effects);
                        }
                    }
                }
                Effect::Broadcast { topic, message, payload } => {
                    for at in 0..self.workers.len() {
                        self.give(at, &topic, (encode(&message), payload.clone()));
                    }
                }
                Effect::Withdraw { .. } => {}
                Effect::Resolve { id, receipt, achieved, .. } => self.resolved(id, receipt, achieved),
                Effect::Tell(event) => {
                    let wrong = event.kind == weightbus::WorkerEventKind::WrongDigest;
                    assert!(!wrong, "{}", event.text);
                }
            }
        }
    }

    fn give(&mut self, at: usize, topic: &str, message: Message) {
        for _ in 0..self.copies() {
            let due = self.due();
            self.workers[at].published.push_back((due, topic.to_owned(), message.clone()));
        }
    }

    /// A receipt must not claim what did not happen.
    fn resolved(&mut self, id: u64, receipt: Receipt, achieved: bool) {
        let key = (receipt.epoch, receipt.version);
        for (name, worker) in &receipt.workers {
            let ran = self.ran.get(name).cloned().unwrap_or_default();
            match worker.outcome {
                Outcome::Applied => assert!(ran.contains(&key), "{}", receipt),
                Outcome::Skipped => assert!(ran.iter().any(|other| *other > key), "{}", receipt),
                _ => {}
            }
        }
        let asked = &self.asked[&id];
        if achieved && (asked.require, asked.wait) == (Require::All, Wait::Applied) {
            let there = [Outcome::Applied, Outcome::Skipped, Outcome::Left];
            assert!(receipt.workers.values().all(|worker| there.contains(&worker.outcome)), "{}", receipt);
        }
        assert!(self.receipts.insert(id, (receipt, achieved)).is_none(), "an answer was given twice");
    }

    // The workers.

    fn advance(&mut self) {
        self.step += 1;
        self.now += STEP;
        while let Some((from, header)) = pop(&mut self.heard, self.step, |(_, from, header)| (from, header)) {
            let effects = self.publisher.receive(&from, &header, 0, self.now);
            self.perform(effects);
        }
        let pushing: Vec<String> = self.publisher.pushing().cloned().collect();
        for model in pushing {
            let effects = self.publisher.push(&model, self.now);
            self.perform(effects);
        }
        if self.step % 5 == 0 {
            let effects = self.publisher.tick(self.now);
            self.perform(effects);
        }
        for at in 0..self.workers.len() {
            if self.step >= self.workers[at].stopped_until {
                self.turn(at);
            }
        }
    }

    fn turn(&mut self, at: usize) {
        let (step, now) = (self.step, self.now);
        while let Some((header, payload)) = pop(&mut self.workers[at].control, step, |(_, message)| message) {
            let payloads: Vec<&[u8]> = payload.bytes().into_iter().collect();
            let effects = self.workers[at].machine.receive(&header, &payloads, now);
            self.perform_worker(at, effects);
        }
        while let Some((topic, (header, payload))) =
            pop(&mut self.workers[at].published, step, |(_, topic, message)| (topic, message))
        {
            if self.workers[at].subscribed.contains(&topic) {
                let bytes = payload.bytes().map(<[u8]>::to_vec);
                let payloads = usize::from(bytes.is_some());
                let payload = bytes.map_or(PublishedPayload::None, PublishedPayload::Bytes);
                let published = Published { header, payloads, payload };
                let effects = self.workers[at].machine.receive_published(&published, now);
                self.perform_worker(at, effects);
            }
        }
        let machine = &mut self.workers[at].machine;
        let mut effects = if machine.inside() { Vec::new() } else { machine.connected(now) };
        effects.extend(machine.tick(now));
        self.perform_worker(at, effects);
        while let Some(staged) = pop(&mut self.workers[at].ready, step, |(_, staged)| staged) {
            self.apply(at, staged);
        }
    }

    fn perform_worker(&mut self, at: usize, effects: Vec<WorkerEffect>) {
        for effect in effects {
            match effect {
                WorkerEffect::Send(message) => {
                    let header = encode(&message);
                    for _ in 0..self.copies() {
                        let due = self.due();
                        let identity = self.workers[at].identity();
                        self.heard.push_back((due, identity, header.clone()));
                    }
                }
                WorkerEffect::Subscribe { topic, on } => {
                    self.workers[at].subscribed.retain(|known| *known != topic);
                    if on {
                        self.workers[at].subscribed.push(topic.clone());
                        if let Some(beacon) = self.publisher.subscribed(&topic) {
                            self.give(at, &topic, (encode(&beacon), Payload::None));
                        }
                    }
                }
                WorkerEffect::Ready(staged) => {
                    let due = self.step + self.dice.roll(10);
                    self.workers[at].ready.push_back((due, staged));
                }
                WorkerEffect::Redial => self.workers[at].connection += 1,
                WorkerEffect::Rejected { code, text, .. } => panic!("{}: {}", code, text),
                WorkerEffect::Refused { code, .. } => assert_eq!(code, "name-taken"), // for a moment
                _ => {}
            }
        }
    }

    fn apply(&mut self, at: usize, staged: Staged) {
        let (key, now) = (staged.key, self.now);
        if self.workers[at].ran.last().map_or(false, |&last| key <= last) {
            let effects = self.workers[at].machine.dropped(MODEL, key, now);
            drop(staged);
            return self.perform_worker(at, effects);
        }
        let (data, _) = self.history.get(&key).expect("nothing is applied that was not published");
        match &staged.source {
            Source::Buffer(buffer) => assert!(buffer[..] == data[..], "other bytes than published"),
            Source::Segment { .. } => panic!("there is no shared road here"),
        }
        drop(staged);
        let worker = &mut self.workers[at];
        worker.ran.push(key);
        self.ran.entry(worker.name.clone()).or_default().push(key);
        worker.machine.taken(MODEL, key);
        let effects = worker.machine.applied(MODEL, key, "", None, now);
        self.perform_worker(at, effects);
    }
}

fn machine(epoch: u64) -> Machine {
    Machine::new(epoch, "tcp://*:1", Timing::default(), None, None)
}

fn content(data: &[u8], chunk_bytes: u64) -> Arc<Content> {
    let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[data.len() as u64], bytes: data };
    Arc::new(Copier::default().copy(&[tensor], chunk_bytes).unwrap())
}

/// Due things in order, as on a connection: what is due later holds up what comes behind it.
fn pop<T, R>(queue: &mut VecDeque<T>, step: u32, take: impl FnOnce(T) -> R) -> Option<R>
where
    T: Due,
{
    if queue.front().map_or(false, |first| first.due() <= step) {
        queue.pop_front().map(take)
    } else {
        None
    }
}

trait Due {
    fn due(&self) -> u32;
}

impl<A> Due for (u32, A) {
    fn due(&self) -> u32 {
        self.0
    }
}

impl<A, B> Due for (u32, A, B) {
    fn due(&self) -> u32 {
        self.0
    }
}

fn weather() -> impl Strategy<Value = Weather> {
    let loss = prop_oneof![Just(0u32), Just(10), Just(40)];
    (loss, 0..20u32, 0..20u32).prop_map(|(loss, doubling, delay_steps)| Weather {
        loss,
        doubling,
        delay_steps,
    })
}

fn deed() -> impl Strategy<Value = Deed> {
    let sizes = prop_oneof![Just(0usize), Just(7), Just(64), 1..1000usize];
    let how = prop_oneof![
        4 => Just(How::Applied), 1 => Just(How::Staged), 2 => Just(How::Together), 1 => Just(How::Nobody),
        1 => (0..3usize).prop_map(How::For),
    ];
    let require = prop::option::weighted(0.3, 0..4usize);
    let publish =
        (sizes, 1..50u64, how, require, 1..400u32).prop_map(|(bytes, chunk_bytes, how, require, timeout)| {
            Deed::Publish { bytes, chunk_bytes, how, require, timeout }
        });
    let who = || 0..3usize;
    prop_oneof![
        8 => publish,
        1 => Just(Deed::RestartPublisher),
        1 => who().prop_map(Deed::RestartWorker),
        1 => who().prop_map(Deed::Cut),
        1 => who().prop_map(Deed::Leave),
        1 => (who(), 1..400u32).prop_map(|(at, steps)| Deed::Stop(at, steps)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_network_that_heals_brings_the_newest_version_to_all(
        seed: u64,
        weather in weather(),
        workers in 1..4usize,
        deeds in prop::collection::vec((deed(), 0..60u32), 1..12),
    ) {
        let mut world = World::new(seed, weather, workers);
        for (deed, steps) in deeds {
            world.act(deed);
            for _ in 0..steps {
                world.advance();
            }
        }
        world.weather.loss = 0;
        let asked = Asked { expect: workers, timeout: STEP * SOON, grace: STEP * SOON, ..Asked::default() };
        let last = world.publish(100, 9, asked);
        let mut steps = 0;
        while !world.receipts.contains_key(&last) {
            world.advance();
            steps += 1;
            prop_assert!(steps < 2 * SOON, "no answer");
        }
        let (receipt, achieved) = &world.receipts[&last];
        prop_assert!(*achieved, "{}", receipt);
        prop_assert!(receipt.workers.values().filter(|w| w.outcome == Outcome::Applied).count() >= workers);
        let newest = (receipt.epoch, receipt.version);
        for worker in &world.workers {
            prop_assert_eq!(worker.ran.last(), Some(&newest), "{}", receipt);
        }
        // Of two calls of which one must have been answered by now, none is forgotten.
        world.act(Deed::RestartWorker(0));
        let close = world.publisher.close(world.now);
        world.perform(close);
    }
}

#[test]
fn a_version_that_is_applied_together_is_applied_by_all_or_by_none() {
    for seed in 0..50 {
        let mut world = World::new(seed, Weather { loss: 20, doubling: 10, delay_steps: 3 }, 3);
        for _ in 0..300 {
            world.advance();
        }
        let timeout = STEP * (seed as u32 * 4 + 1);
        let commit = CommitMode::Together;
        let id = world.publish(500, 50, Asked { commit, expect: 3, timeout, ..Asked::default() });
        while !world.receipts.contains_key(&id) {
            world.advance();
            let ran = world.ran.values().flatten().count();
            assert!(ran == 0 || world.publisher.status(world.now).len() == 3);
        }
        let (receipt, achieved) = world.receipts[&id].clone();
        for _ in 0..1500 {
            world.advance();
        }
        let ran: Vec<_> = world.workers.iter().map(|worker| worker.ran.len()).collect();
        if achieved {
            assert_eq!(ran, [1, 1, 1], "{}", receipt);
        } else {
            // The call may be over because not all have applied in time; the version was decided before.
            assert!(ran == [0, 0, 0] || ran == [1, 1, 1], "{:?} of {}", ran, receipt);
        }
    }
}

fn hello(epoch: u64, age_ms: u64) -> Vec<u8> {
    encode(&FromWorker::Hello(Hello {
        name: "w".to_owned(),
        instance: "0".repeat(32),
        models: Some((MODEL.to_owned(), None)).into_iter().collect(),
        epoch,
        age_ms,
        features: Vec::new(),
        client: String::new(),
        host: String::new(),
        pid: 0,
    }))
}

#[test]
fn who_reports_other_bytes_never_counts() {
    let now = Duration::from_secs(1);
    let mut publisher = machine(7);
    publisher.receive(b"w", &hello(0, 0), 0, now);
    let content = content(b"bytes", 2);
    let digest = content.digest.clone();
    publisher.publish(1, MODEL, content, Asked::default(), now, now).unwrap();
    let mut say = |digest: &str, epoch: u64| {
        let (model, digest) = (MODEL.to_owned(), digest.to_owned());
        let said = OfVersion { model, epoch, version: 1, digest, ..OfVersion::default() };
        let applied = FromWorker::Applied(said);
        let told = publisher.receive(b"w", &encode(&applied), 0, now);
        let wrong = |effect: &Effect| matches!(effect, Effect::Tell(e) if e.kind == weightbus::WorkerEventKind::WrongDigest);
        let resolved = |effect: &Effect| matches!(effect, Effect::Resolve { achieved: true, .. });
        (told.iter().any(wrong), told.iter().any(resolved))
    };
    assert_eq!(say(&"0".repeat(64), 7), (true, false));
    assert_eq!(say("", 7), (true, false)); // nothing is read from shared memory here
    assert_eq!(say(&digest, 8), (false, false)); // of an epoch that is not
    assert_eq!(say(&digest, 7), (false, true));
}

#[test]
fn a_later_epoch_is_taken_with_proof_alone() {
    let now = Duration::from_secs(1);
    let young = || Some(Box::new(|| Duration::from_secs(10)) as weightbus::publisher::machine::Age);
    let mut publisher = Machine::new(500, "tcp://*:1", Timing::default(), young(), None);
    publisher.receive(b"w", &hello(900, 5_000), 0, now); // that one started later
    assert_eq!(publisher.epoch(), 500);
    publisher.receive(b"w", &hello(900, 90_000), 0, now);
    assert_eq!(publisher.epoch(), 900 + 90_000 - 10_010);
    assert_eq!(publisher.status(now).len(), 1);
}
