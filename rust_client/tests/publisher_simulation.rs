//! A publisher's machine and those of some workers, on a network that loses, delays and doubles, under a virtual
//! clock; workers are killed, stopped and cut off, and the publisher is restarted. Some versions are offered as patches,
//! too. Whatever is applied is what was published, whole, and never older than before; no receipt claims what did not
//! happen, nor that it came in another way; and once the network heals, the next publish is achieved by everybody. With
//! keys everything is sealed, group keys change, and workers are revoked: what is published meanwhile they cannot open,
//! whatever reaches them.

#[path = "publisher/dice.rs"]
mod dice;
#[path = "publisher/worker.rs"]
mod worker;

use dice::Dice;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use weightbus::effects::Effect as WorkerEffect;
use weightbus::limits::Timing;
use weightbus::machine::WorkerMachine;
use weightbus::messages::{encode, AnnounceCommit, Applied, Bye, FromPublisher, FromWorker, Hello};
use weightbus::patching::{Base, Bytes, Patching};
use weightbus::publisher::bases::Bases;
use weightbus::publisher::content::{Content, Copier};
use weightbus::publisher::effects::{Effect, Payload};
use weightbus::publisher::grants::{ByKey, Grant, Role};
use weightbus::publisher::machine::PublisherMachine;
use weightbus::publisher::publication::PublishTerms;
use weightbus::publisher::sealer::Sealer;
use weightbus::sealing::AVAILABLE;
use weightbus::staging::{Source, StagedVersion};
use weightbus::zmtp::{Published, PublishedPayload};
use weightbus::{Dtype, Encoding, Outcome, Receipt, Require, TensorView, Wait};
use worker::{worker, AnyLayout};

const MODEL: &str = "policy";
const STEP: Duration = Duration::from_millis(20);
const SOON: u32 = 3000; // steps: a minute
const TRAINED: usize = 700; // bytes of what is trained, and so patched
const TRAINED_CHUNK: u64 = 40;

type Key = (u64, u64);
type Message = (Vec<u8>, Payload);

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
    Publish {
        bytes: usize,
        chunk_bytes: u64,
        how: How,
        require: Option<usize>,
        timeout: u32,
    },
    /// A step of a training, as what has changed where there is that.
    Train {
        how: How,
        flat: bool,
    },
    RestartPublisher,
    RestartWorker(usize),
    Cut(usize),
    Stop(usize, u32),
    Leave(usize),
    Rekey,
    Revoke(usize),
    Allow(usize),
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
    ready: VecDeque<(u32, StagedVersion)>,
    decoding: VecDeque<(u32, Patching)>,
    ran: Vec<Key>,
    stopped_until: u32,
}

impl Worker {
    fn new(at: usize, life: u32, keyed: bool) -> Worker {
        let name = format!("w{}", at);
        let instance = format!("{:016x}{:016x}", at, life);
        let mut machine = worker(&name, instance, Arc::new(AnyLayout));
        if keyed {
            machine.require_sealed();
        }
        if at != 1 {
            machine.accept_patches();
        }
        Worker {
            name,
            machine,
            connection: life,
            subscribed: Vec::new(),
            control: VecDeque::new(),
            published: VecDeque::new(),
            ready: VecDeque::new(),
            decoding: VecDeque::new(),
            ran: Vec::new(),
            stopped_until: 0,
        }
    }

    fn identity(&self) -> Vec<u8> {
        format!("{}/{}", self.name, self.connection).into_bytes()
    }
}

struct World {
    publisher: PublisherMachine,
    sealer: Option<Sealer>,             // of a publisher with keys
    revoked: BTreeMap<usize, Vec<Key>>, // workers, and what was published since
    workers: Vec<Worker>,
    heard: VecDeque<(u32, Vec<u8>, Vec<u8>)>,    // to the publisher
    history: BTreeMap<Key, (Vec<u8>, bool)>,     // what was published, and whether together
    ran: BTreeMap<String, Vec<Key>>,             // by whoever had the name
    came: BTreeSet<(String, Key, &'static str)>, // to whom in which way
    bases: Bases,
    trained: Vec<u8>,
    receipts: BTreeMap<u64, (Receipt, bool)>,
    asked: BTreeMap<u64, PublishTerms>,
    ids: u64,
    number: u64,
    lives: u32,
    now: Duration,
    step: u32,
    dice: Dice,
    weather: Weather,
}

impl World {
    fn new(seed: u64, weather: Weather, workers: usize, keyed: bool) -> World {
        let mut world = World {
            publisher: machine(1),
            sealer: None,
            revoked: BTreeMap::new(),
            workers: (0..workers).map(|at| Worker::new(at, 0, keyed)).collect(),
            heard: VecDeque::new(),
            history: BTreeMap::new(),
            ran: BTreeMap::new(),
            came: BTreeSet::new(),
            bases: Bases::new(2, u64::MAX),
            trained: vec![7; TRAINED],
            receipts: BTreeMap::new(),
            asked: BTreeMap::new(),
            ids: 0,
            number: 0,
            lives: 1,
            now: Duration::ZERO,
            step: 0,
            dice: Dice(seed),
            weather,
        };
        if keyed {
            world.take_keys();
        }
        world
    }

    /// The publisher, which has just started, has keys.
    fn take_keys(&mut self) {
        let mut dice = Dice(self.dice.roll(u32::MAX).into());
        let draw = Box::new(move || [(); 32].map(|()| dice.roll(256) as u8));
        let sealer = Sealer::new(draw, None, self.now);
        let without = std::mem::replace(&mut self.publisher, machine(1));
        self.publisher = without.trust(self.allowed(), sealer.key());
        self.sealer = Some(sealer);
    }

    /// Each worker's key is its name.
    fn allowed(&self) -> ByKey {
        let all = (0..self.workers.len()).filter(|at| !self.revoked.contains_key(at));
        let row = |at| (format!("w{}", at), Grant { name: format!("w{}", at), role: Role::Worker });
        all.map(row).collect()
    }

    fn grant(&mut self) {
        let effects = self.publisher.grant(self.allowed(), self.now);
        self.perform(effects);
    }

    fn rekey(&mut self) {
        if let Some(sealer) = &mut self.sealer {
            sealer.rekey(self.now);
            let effects = self.publisher.set_group_key(sealer.key());
            self.perform(effects);
        }
    }

    fn act(&mut self, deed: Deed) {
        match deed {
            Deed::Publish { bytes, chunk_bytes, how, require, timeout } => {
                let asked = self.asked(&how, require, timeout);
                self.publish(bytes, chunk_bytes, asked);
            }
            Deed::Train { how, flat } => {
                let asked = self.asked(&how, None, 400);
                self.train(asked, if flat { Encoding::DeltaFlat } else { Encoding::Delta });
            }
            Deed::RestartPublisher => {
                self.publisher = machine(self.publisher.epoch() + 1);
                if self.sealer.is_some() {
                    self.take_keys();
                }
                self.bases = Bases::new(2, u64::MAX);
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
            Deed::Rekey => self.rekey(),
            Deed::Revoke(at) => {
                if self.sealer.is_some() {
                    self.revoked.entry(at % self.workers.len()).or_default();
                    self.grant();
                }
            }
            Deed::Allow(at) => {
                self.revoked.remove(&(at % self.workers.len()));
                self.grant();
            }
        }
    }

    fn asked(&self, how: &How, require: Option<usize>, timeout: u32) -> PublishTerms {
        let workers = match how {
            How::For(at) => Some(vec![format!("w{}", at % self.workers.len())]),
            _ => None,
        };
        let count = self.workers.len();
        let require = require.map_or(Require::All, |least| Require::AtLeast(least % (count + 1)));
        PublishTerms {
            require: if workers.is_some() { Require::All } else { require },
            workers,
            wait: match how {
                How::Staged => Wait::Staged,
                How::Nobody => Wait::Nobody,
                _ => Wait::Applied,
            },
            commit: if matches!(how, How::Together) {
                AnnounceCommit::Together
            } else {
                AnnounceCommit::Auto
            },
            timeout: STEP * timeout,
            ..PublishTerms::default()
        }
    }

    fn restart(&mut self, at: usize) {
        self.lives += 1;
        let at = at % self.workers.len();
        self.workers[at] = Worker::new(at, 1000 * self.lives, self.sealer.is_some());
    }

    fn publish(&mut self, bytes: usize, chunk_bytes: u64, asked: PublishTerms) -> u64 {
        let data: Vec<u8> = (0..bytes).map(|_| self.dice.roll(256) as u8).collect();
        let content = content(&data, chunk_bytes);
        self.offer(data, content, asked, Encoding::Raw)
    }

    fn train(&mut self, asked: PublishTerms, encoding: Encoding) -> u64 {
        for _ in 0..4 {
            let at = self.dice.roll(TRAINED as u32) as usize;
            self.trained[at] = self.trained[at].wrapping_add(1 + self.dice.roll(3) as u8);
        }
        let tensor =
            TensorView { name: "w", dtype: Dtype::BF16, shape: &[TRAINED as u64 / 2], bytes: &self.trained };
        let content = Arc::new(Copier::default().copy(&[tensor], TRAINED_CHUNK).unwrap());
        self.offer(self.trained.clone(), content, asked, encoding)
    }

    fn offer(
        &mut self,
        data: Vec<u8>,
        content: Arc<Content>,
        asked: PublishTerms,
        encoding: Encoding,
    ) -> u64 {
        let together = asked.commit == AnnounceCommit::Together;
        self.ids += 1;
        self.asked.insert(self.ids, asked.clone());
        let patch_candidates = self.publisher.patch_candidates(MODEL, asked.workers.as_deref());
        let until = Instant::now() + Duration::from_secs(600);
        let offer = self.bases.offer(content, encoding, &patch_candidates, asked.workers.is_none(), until);
        assert!(offer.faults.is_empty(), "{:?}", offer.faults);
        let published = self.publisher.publish(self.ids, MODEL, offer, asked, self.now, self.now);
        if let Ok(effects) = published {
            self.number += 1;
            let key = (self.publisher.epoch(), self.number);
            self.revoked.values_mut().for_each(|since| since.push(key));
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
                            let (message, payload) = match &mut self.sealer {
                                Some(sealer) => sealer.seal_for_one(message, payload).expect("memory"),
                                None => (message, payload),
                            };
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
                    let said = self.published(message, payload);
                    for at in 0..self.workers.len() {
                        self.give(at, &topic, said.clone()); // whoever is revoked may listen in
                    }
                }
                Effect::CloseRevoked => self.rekey(),
                Effect::Withdraw { .. } | Effect::Answer { .. } => {}
                Effect::HangUp | Effect::GiveMemoryBack | Effect::Store { .. } => {}
                Effect::Resolve { id, receipt, achieved, .. } => self.resolved(id, receipt, achieved),
                Effect::Notify(event) => {
                    let wrong = event.kind == weightbus::WorkerEventKind::WrongDigest;
                    assert!(!wrong, "{}", event.text);
                }
            }
        }
    }

    fn published(&mut self, message: FromPublisher, payload: Payload) -> Message {
        let (message, payload) = match &mut self.sealer {
            Some(sealer) => sealer.seal_for_all(message, payload).expect("memory"),
            None => (message, payload),
        };
        (encode(&message), payload)
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
                Outcome::Applied => {
                    assert!(ran.contains(&key), "{}", receipt);
                    let way = worker.encoding;
                    let came = way.is_empty() || self.came.contains(&(name.clone(), key, way));
                    assert!(came, "it came in another way: {}", receipt);
                }
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
            let key = match &self.sealer {
                Some(_) => from.iter().take_while(|&&c| c != b'/').map(|&c| char::from(c)).collect(),
                None => String::new(),
            };
            let effects = self.publisher.receive_of(&from, &key, &header, 0, self.now);
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
                let published = Published { header, payload_count: payloads, payload };
                let effects = self.workers[at].machine.receive_published(&published, now);
                self.perform_worker(at, effects);
            }
        }
        let machine = &mut self.workers[at].machine;
        let mut effects = if machine.in_session() { Vec::new() } else { machine.connected(now) };
        effects.extend(machine.tick(now));
        self.perform_worker(at, effects);
        while let Some(mut job) = pop(&mut self.workers[at].decoding, step, |(_, job)| job) {
            let done = job.run(&|| false);
            let effects = self.workers[at].machine.decoded(job, done, now);
            self.perform_worker(at, effects);
        }
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
                            let said = self.published(beacon, Payload::None);
                            self.give(at, &topic, said);
                        }
                    }
                }
                WorkerEffect::Decode(job) => {
                    let due = self.step + self.dice.roll(10);
                    self.workers[at].decoding.push_back((due, job));
                }
                WorkerEffect::Ready(staged) => {
                    let (name, way) = (self.workers[at].name.clone(), staged.encoding);
                    self.came.insert((name, staged.key, way));
                    let due = self.step + self.dice.roll(10);
                    self.workers[at].ready.push_back((due, staged));
                }
                WorkerEffect::Redial => self.workers[at].connection += 1,
                WorkerEffect::Rejected { code, text, .. } => panic!("{}: {}", code, text),
                WorkerEffect::Refused { code, .. } => match &code[..] {
                    "name-taken" => {} // for a moment
                    "revoked" => assert!(self.sealer.is_some()),
                    other => panic!("{}", other),
                },
                _ => {}
            }
        }
    }

    fn apply(&mut self, at: usize, staged: StagedVersion) {
        let (key, now) = (staged.key, self.now);
        if self.workers[at].ran.last().map_or(false, |&last| key <= last) {
            let effects = self.workers[at].machine.dropped(MODEL, key, now);
            drop(staged);
            return self.perform_worker(at, effects);
        }
        let (data, _) = self.history.get(&key).expect("nothing is applied that was not published");
        let sealed_off = self.revoked.get(&at).map_or(false, |since| since.contains(&key));
        assert!(!sealed_off, "what was published since it was revoked");
        let base = match staged.source {
            Source::Buffer(mut buffer) => {
                assert!(buffer[..] == data[..], "other bytes than published");
                buffer.keep();
                let (layout, bytes) = (staged.layout, Bytes::Kept(Arc::new(buffer)));
                staged.keep.then_some(Base { layout, bytes })
            }
            Source::Segment { .. } => panic!("there is no shared memory here"),
        };
        let worker = &mut self.workers[at];
        worker.ran.push(key);
        self.ran.entry(worker.name.clone()).or_default().push(key);
        worker.machine.taken(MODEL, key);
        let effects = worker.machine.applied(MODEL, key, "", base, "", now);
        self.perform_worker(at, effects);
    }
}

fn machine(epoch: u64) -> PublisherMachine {
    PublisherMachine::new(epoch, "tcp://*:1", Timing::default(), None, None)
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
    let how = prop_oneof![
        6 => Just(How::Applied), 1 => Just(How::Staged), 2 => Just(How::Together), 1 => (0..3usize).prop_map(How::For),
    ];
    let train = (how, any::<bool>()).prop_map(|(how, flat)| Deed::Train { how, flat });
    let who = || 0..3usize;
    prop_oneof![
        8 => publish,
        12 => train,
        1 => Just(Deed::RestartPublisher),
        1 => who().prop_map(Deed::RestartWorker),
        1 => who().prop_map(Deed::Cut),
        1 => who().prop_map(Deed::Leave),
        1 => (who(), 1..400u32).prop_map(|(at, steps)| Deed::Stop(at, steps)),
        1 => Just(Deed::Rekey),
        1 => who().prop_map(Deed::Revoke),
        1 => who().prop_map(Deed::Allow),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_network_that_heals_brings_the_newest_version_to_all(
        seed: u64,
        weather in weather(),
        workers in 1..4usize,
        keyed: bool,
        deeds in prop::collection::vec((deed(), 0..60u32), 1..12),
    ) {
        let keyed = keyed && AVAILABLE;
        let mut world = World::new(seed, weather, workers, keyed);
        for (deed, steps) in deeds {
            world.act(deed);
            for _ in 0..steps {
                world.advance();
            }
        }
        world.weather.loss = 0;
        world.revoked.clear();
        world.grant();
        let long = STEP * SOON; // also for one that has just been started again
        let asked =
            PublishTerms { expect: workers, timeout: long, grace: long, grace_of_gone: long, ..PublishTerms::default() };
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
fn what_has_changed_is_all_that_is_sent_where_a_worker_runs_what_it_changed_from() {
    for (seed, loss, keyed) in [(0, 0, false), (1, 5, AVAILABLE), (2, 10, false)] {
        let mut world = World::new(seed, Weather { loss, doubling: 10, delay_steps: 3 }, 3, keyed);
        while world.publisher.status(world.now).len() < 3 {
            world.advance(); // nothing is kept while nobody takes patches
        }
        for step in 0..8 {
            let asked = PublishTerms {
                expect: 3,
                timeout: STEP * SOON,
                grace: STEP * SOON,
                ..PublishTerms::default()
            };
            let id = world.train(asked, Encoding::Delta);
            while !world.receipts.contains_key(&id) {
                world.advance();
            }
            let (receipt, achieved) = &world.receipts[&id];
            assert!(*achieved, "{}", receipt);
            for (name, worker) in &receipt.workers {
                let patched = step > 0 && name != "w1"; // which takes none
                assert_eq!(
                    (worker.patched(), worker.nbytes < TRAINED as u64),
                    (patched, patched),
                    "{}",
                    receipt
                );
            }
        }
    }
}

#[test]
fn a_version_that_is_applied_together_is_applied_by_all_or_by_none() {
    for seed in 0..50 {
        let weather = Weather { loss: 20, doubling: 10, delay_steps: 3 };
        let mut world = World::new(seed, weather, 3, AVAILABLE && seed % 2 > 0);
        for _ in 0..300 {
            world.advance();
        }
        let timeout = STEP * (seed as u32 * 4 + 1);
        let commit = AnnounceCommit::Together;
        let id =
            world.publish(500, 50, PublishTerms { commit, expect: 3, timeout, ..PublishTerms::default() });
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
        ..Default::default()
    }))
}

#[test]
fn who_reports_other_bytes_never_counts() {
    let now = Duration::from_secs(1);
    let mut publisher = machine(7);
    publisher.receive(b"w", &hello(0, 0), 0, now);
    let content = content(b"bytes", 2);
    let digest = content.digest.clone();
    publisher.publish(1, MODEL, content, PublishTerms::default(), now, now).unwrap();
    let mut say = |digest: &str, epoch: u64| {
        let (model, digest) = (MODEL.to_owned(), digest.to_owned());
        let said = Applied { model, epoch, version: 1, digest, ..Default::default() };
        let applied = FromWorker::Applied(said);
        let told = publisher.receive(b"w", &encode(&applied), 0, now);
        let wrong = |effect: &Effect| matches!(effect, Effect::Notify(e) if e.kind == weightbus::WorkerEventKind::WrongDigest);
        let resolved = |effect: &Effect| matches!(effect, Effect::Resolve { achieved: true, .. });
        (told.iter().any(wrong), told.iter().any(resolved))
    };
    assert_eq!(say(&"0".repeat(64), 7), (true, false));
    assert_eq!(say("", 7), (false, false)); // nothing is read from shared memory here; of a version it is told once
    assert_eq!(say(&digest, 8), (true, false)); // this publisher has published nothing in that epoch
    assert_eq!(say(&digest, 7), (false, true));
}

#[test]
fn a_later_epoch_is_taken_with_proof_alone() {
    let now = Duration::from_secs(1);
    let young = || Some(Box::new(|| Duration::from_secs(10)) as weightbus::publisher::machine::Age);
    let mut publisher = PublisherMachine::new(500, "tcp://*:1", Timing::default(), young(), None);
    publisher.receive(b"w", &hello(900, 5_000), 0, now); // that one started later
    assert_eq!(publisher.epoch(), 500);
    publisher.receive(b"w", &hello(900, 90_000), 0, now);
    assert_eq!(publisher.epoch(), 900 + 90_000 - 10_010);
    assert_eq!(publisher.status(now).len(), 1);
}

const DAY_MS: u64 = 86_400_000;

/// A publisher that began ten seconds ago, at this time of day.
fn young(epoch: u64, time_ms: u64) -> PublisherMachine {
    let age = Some(Box::new(|| Duration::from_secs(10)) as weightbus::publisher::machine::Age);
    PublisherMachine::new(epoch, "tcp://*:1", Timing::default(), age, None).clock(Box::new(move || time_ms))
}

/// The hello of a worker that runs a version of one epoch, and says that it has applied from another.
fn runs(of: u64, version: u64, epoch: u64, age_ms: u64) -> Vec<u8> {
    let none = format!(r#""models":{{"{}":null}}"#, MODEL);
    let its = format!(r#""models":{{"{}":{{"epoch":{},"version":{},"digest":""}}}}"#, MODEL, of, version);
    let header = String::from_utf8(hello(epoch, age_ms)).unwrap();
    assert!(header.contains(&none), "{}", header);
    header.replace(&none, &its).into_bytes()
}

#[test]
fn no_word_of_a_worker_moves_the_epoch_down() {
    let mut publisher = young(500, 20 * 366 * DAY_MS);
    let versions = [1, 2, (1 << 53) - 1];
    for version in versions {
        // One that it never published, with proof of any age.
        let told = publisher.receive(b"w", &runs(500, version, 500, 1_000_000_000), 0, NOW);
        assert_eq!(said(&told, b"w"), ["stale-epoch"]);
        // And one whose own words contradict each other.
        let told = publisher.receive(b"w", &runs(500, version, 0, 1_000_000_000), 0, NOW);
        assert_eq!(said(&told, b"w"), ["malformed"]);
    }
    assert_eq!((publisher.epoch(), publisher.malformed), (500, 3));
    assert!(publisher.status(NOW).is_empty());
    let told = publisher.receive(b"w", &runs(400, 7, 400, 1_000_000_000), 0, NOW);
    assert_eq!((said(&told, b"w"), publisher.epoch()), (vec!["welcome".to_owned()], 500));
}

#[test]
fn no_word_of_a_worker_moves_the_epoch_beyond_what_a_clock_may_be_off() {
    let clock = 20 * 366 * DAY_MS;
    let latest = clock - 10_000 + 366 * DAY_MS;
    let mut publisher = young(500, clock);
    publisher.receive(b"w", &hello(600, (1 << 53) - 1), 0, NOW);
    assert_eq!(publisher.epoch(), latest, "as far as it goes");
    let mut next = young(501, clock + 1);
    next.receive(b"w", &hello(latest, 20_000), 0, NOW);
    assert_eq!(next.epoch(), latest + 1, "one that starts later comes after it, at the bound, too");
    let mut publisher = young(500, clock);
    let told = publisher.receive(b"w", &hello(latest, 1 << 50), 0, NOW);
    assert_eq!((said(&told, b"w"), publisher.epoch()), (vec!["stale-epoch".to_owned()], 500));
    let mut late = young(500, 1 << 44);
    late.receive(b"w", &hello(600, (1 << 53) - 1), 0, NOW);
    assert_eq!(late.epoch(), 1 << 43);
}

#[test]
fn epochs_are_taken_more_and_more_rarely() {
    let mut publisher = young(500, 20 * 366 * DAY_MS);
    let (lost_after, mut now, mut epoch) = (publisher.timing.lost_after, NOW, 500);
    let mut pauses = Vec::new();
    for _ in 0..10 {
        let begun = now;
        loop {
            let told = publisher.receive(b"w", &hello(epoch + 1, 20_000), 0, now);
            if publisher.epoch() > epoch {
                break;
            }
            let quiet = now - begun < lost_after;
            assert_eq!(said(&told, b"w"), if quiet { vec![] } else { vec!["stale-epoch".to_owned()] });
            now += lost_after;
            publisher.tick(now);
        }
        pauses.push((now - begun).as_secs() / lost_after.as_secs());
        epoch = publisher.epoch();
    }
    assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 64, 64, 64]);
}

/// A publisher with keys of `w`, of all names that begin with `gpu-`, and of an observer.
fn keyed() -> PublisherMachine {
    let row = |name: &str, role| (name.replace('*', ""), Grant { name: name.to_owned(), role });
    let draw = Some(Box::new(|| Some("ab".repeat(16))) as weightbus::publisher::machine::Draw);
    PublisherMachine::new(7, "tcp://*:1", Timing::default(), None, draw).trust(
        vec![row("w", Role::Worker), row("gpu-*", Role::Worker), row("eye", Role::Observer)]
            .into_iter()
            .collect(),
        "12".repeat(32),
    )
}

/// What is said to a connection, each by the name of its message; of a refusal, its code.
fn said(effects: &[Effect], to: &[u8]) -> Vec<String> {
    let name = |effect: &Effect| match effect {
        Effect::Send { to: its, message, .. } if its == to => Some(match message {
            FromPublisher::Refuse(refuse) => refuse.code.clone(),
            FromPublisher::Welcome(_) => "welcome".to_owned(),
            FromPublisher::Rekey(rekey) => format!("rekey {}", &rekey.keys[0][..2]),
            FromPublisher::Ping(_) => "ping".to_owned(),
            FromPublisher::Pong(_) => "pong".to_owned(),
            other => format!("{:?}", other),
        }),
        _ => None,
    };
    effects.iter().filter_map(name).collect()
}

const NOW: Duration = Duration::from_secs(1);

fn ping() -> Vec<u8> {
    encode(&FromWorker::Ping(Default::default()))
}

#[test]
fn a_key_is_for_its_name_and_an_observers_for_none() {
    let mut publisher = keyed();
    let mut says_hello = |key: &str, name: &str| {
        let header = String::from_utf8(hello(0, 0)).unwrap().replace("\"w\"", &format!("{:?}", name));
        let effects = publisher.receive_of(name.as_bytes(), key, header.as_bytes(), 0, NOW);
        said(&effects, name.as_bytes())
    };
    assert_eq!(says_hello("w", "w"), ["welcome"]);
    assert_eq!(says_hello("w", "x"), ["wrong-name"]);
    assert_eq!(says_hello("gpu-", "gpu-1"), ["welcome"]);
    assert_eq!(says_hello("gpu-", "w2"), ["wrong-name"]);
    assert_eq!(says_hello("eye", "eye"), ["not-allowed"]);
    assert_eq!(says_hello("other", "y"), ["revoked"]);
    assert_eq!(says_hello("", "z"), ["revoked"]);
    assert_eq!(publisher.status(NOW).len(), 2);
}

#[test]
fn the_same_instance_with_another_key_is_another_worker() {
    let mut publisher = keyed();
    let mut by_key: ByKey = ["w", "v"].iter().map(|key| (String::from(*key), grant_of("w"))).collect();
    publisher.grant(by_key.clone(), NOW);
    publisher.receive_of(b"1", "w", &hello(0, 0), 0, NOW);
    let contested = publisher.receive_of(b"2", "v", &hello(0, 0), 0, NOW);
    assert_eq!((said(&contested, b"1"), said(&contested, b"2")), (vec!["ping".to_owned()], vec![]));
    // Nobody speaks for a worker with its identity alone.
    for message in [ping(), encode(&FromWorker::Bye(Bye::default()))] {
        assert!(matches!(publisher.receive_of(b"1", "v", &message, 0, NOW)[..], [Effect::HangUp]));
    }
    assert_eq!(said(&publisher.receive_of(b"1", "w", &ping(), 0, NOW), b"1"), ["pong"]);
    by_key.remove("w");
    let revoked = publisher.grant(by_key, NOW);
    assert!(matches!(revoked[0], Effect::CloseRevoked), "before anything else is said");
    assert_eq!(said(&revoked, b"1"), ["revoked"]);
    assert_eq!(said(&publisher.receive_of(b"1", "w", &ping(), 0, NOW), b"1"), ["revoked"]);
    assert_eq!(said(&publisher.receive_of(b"2", "v", &hello(0, 0), 0, NOW), b"2"), ["welcome"]);
}

fn grant_of(name: &str) -> Grant {
    Grant { name: name.to_owned(), role: Role::Worker }
}

#[test]
fn another_group_key_is_told_to_who_says_something_with_its_own_key() {
    let mut publisher = keyed();
    publisher.receive_of(b"1", "w", &hello(0, 0), 0, NOW);
    assert_eq!(said(&publisher.set_group_key("34".repeat(32)), b"1"), ["ping"], "nobody is told it unasked");
    assert!(matches!(publisher.receive_of(b"1", "gpu-", &ping(), 0, NOW)[..], [Effect::HangUp]));
    assert_eq!(said(&publisher.receive_of(b"1", "w", &ping(), 0, NOW), b"1"), ["rekey 34", "pong"]);
    assert_eq!(said(&publisher.receive_of(b"1", "w", &ping(), 0, NOW), b"1"), ["pong"], "once");
    publisher.set_group_key("56".repeat(32));
    let effects = publisher.receive_of(b"1", "w", &hello(0, 0), 0, NOW);
    let keys = effects.iter().find_map(|effect| match effect {
        Effect::Send { message: FromPublisher::Welcome(welcome), .. } => Some(welcome.keys.clone()),
        _ => None,
    });
    assert_eq!(keys, Some(vec!["56".repeat(32)]));
    assert_eq!(said(&publisher.receive_of(b"1", "w", &ping(), 0, NOW), b"1"), ["pong"], "the welcome had it");
}

#[test]
fn a_ticket_is_good_once_and_for_a_while() {
    let mut publisher = keyed();
    let ticket = "ab".repeat(16);
    let welcome = publisher.receive_of(b"1", "w", &hello(0, 0), 0, NOW);
    let features = welcome.iter().find_map(|effect| match effect {
        Effect::Send { message: FromPublisher::Welcome(welcome), .. } => Some(welcome.features.clone()),
        _ => None,
    });
    assert_eq!(features, Some(vec![format!("ticket.{}", ticket)]));
    assert_eq!(publisher.redeem("other", NOW), None);
    let owner = Some(("w".to_owned(), "w".to_owned()));
    assert_eq!(publisher.redeem(&ticket, NOW), owner);
    assert_eq!(publisher.redeem(&ticket, NOW), None, "it was shown");
    publisher.receive_of(b"1", "w", &hello(0, 0), 0, NOW);
    assert_eq!(publisher.redeem(&ticket, NOW + Duration::from_secs(30)), None, "it is too old");
    publisher.receive_of(b"1", "w", &hello(0, 0), 0, NOW);
    publisher.receive_of(b"1", "w", &encode(&FromWorker::Bye(Bye::default())), 0, NOW);
    assert_eq!(publisher.redeem(&ticket, NOW), None, "its worker has left");
}

#[test]
fn nobody_is_given_a_token_where_there_are_keys() {
    let with_upstream =
        String::from_utf8(hello(0, 0)).unwrap().replace("{\"wbp\"", "{\"features\":[\"upstream\"],\"wbp\"");
    let features = |mut publisher: PublisherMachine, key: &str| {
        let effects = publisher.receive_of(b"1", key, with_upstream.as_bytes(), 0, NOW);
        match effects.iter().find(|effect| matches!(effect, Effect::Send { .. })) {
            Some(Effect::Send { message: FromPublisher::Welcome(welcome), .. }) => welcome.features.join(" "),
            other => panic!("{:?}", other),
        }
    };
    assert!(features(keyed(), "w").starts_with("ticket."));
    let draw = Some(Box::new(|| Some("ab".repeat(16))) as weightbus::publisher::machine::Draw);
    assert!(features(PublisherMachine::new(7, "tcp://*:1", Timing::default(), None, draw), "")
        .starts_with("upstream."));
}
