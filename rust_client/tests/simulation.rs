//! A worker's machine and a publisher, on a network that loses, delays, doubles and damages, under
//! a virtual clock. Whatever is applied is what was published, whole, and never older than before;
//! and once the network heals, the newest version is applied.
#![allow(clippy::needless_update)] // in literals of messages, which later fields leave alone

mod publisher;

use proptest::prelude::*;
use publisher::dice::Dice;
use publisher::sealer::Sealer;
use publisher::worker::{worker, AnyLayout};
use publisher::{Message, Publisher, Version, MODEL};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use weightbus::effects::Effect;
use weightbus::machine::WorkerMachine;
use weightbus::messages::{encode, AnnounceAcknowledge, AnnounceCommit, FromPublisher, FromWorker, Rekey};
use weightbus::patching::{Base, Bytes, Patching};
use weightbus::sealing::AVAILABLE;
use weightbus::staging::{Source, StagedVersion};
use weightbus::zmtp::{Place, Places, Published, PublishedPayload};

const STEP: Duration = Duration::from_millis(20);

/// How bad the network is, in parts of a hundred.
#[derive(Clone, Debug)]
struct Weather {
    loss: u32,
    damage: u32,
    doubling: u32,
    delay_steps: u32,
    in_place: bool,
    tears: u32,
    keyed: bool,
}

/// Something that happens at a step.
#[derive(Clone, Debug)]
enum Deed {
    Publish { bytes: usize, chunk_bytes: u64, together: bool, staged: bool, patched: bool },
    RestartPublisher,
    CutConnections,
    Rekey,
}

struct World {
    machine: WorkerMachine,
    publisher: Publisher,
    sealer: Option<Sealer>,
    keys: u64,     // drawn so far
    rekeyed: bool, // and not told
    now: Duration,
    dice: Dice,
    weather: Weather,
    damages: bool,
    subscribed: Vec<String>,
    to_worker: VecDeque<(u32, Message)>, // by step
    published: VecDeque<(u32, String, Message)>,
    to_publisher: VecDeque<(u32, Vec<u8>)>,
    step: u32,
    number: u64,
    layouts: usize,               // length of the data whose layout was published last
    history: Vec<(u64, Version)>, // by epoch
    ready: VecDeque<(u32, StagedVersion)>,
    decoding: VecDeque<(u32, Patching)>,
    committed: Vec<(u64, u64)>,
    ran: Option<(u64, u64)>,
}

impl World {
    fn new(seed: u64, weather: Weather) -> World {
        let mut machine = worker("w", "0".repeat(32), Arc::new(AnyLayout));
        if weather.keyed {
            machine.require_sealed();
        }
        machine.accept_patches();
        World {
            machine,
            publisher: Publisher::new(1, "tcp://*:1"),
            sealer: weather.keyed.then(|| Sealer::new(1)),
            keys: 1,
            rekeyed: false,
            now: Duration::ZERO,
            dice: Dice(seed),
            damages: weather.damage > 0,
            weather,
            subscribed: Vec::new(),
            to_worker: VecDeque::new(),
            published: VecDeque::new(),
            to_publisher: VecDeque::new(),
            step: 0,
            number: 0,
            layouts: usize::MAX,
            history: Vec::new(),
            ready: VecDeque::new(),
            decoding: VecDeque::new(),
            committed: Vec::new(),
            ran: None,
        }
    }

    fn act(&mut self, deed: Deed) {
        match deed {
            Deed::Publish { bytes, chunk_bytes, together, staged, patched } => {
                self.number += 1;
                let mut version = self.version(bytes, chunk_bytes, patched);
                let bytes = version.data.len();
                if together {
                    version.commit = AnnounceCommit::Together;
                }
                if together || staged {
                    version.acknowledge = AnnounceAcknowledge::Staged;
                }
                self.history.push((self.publisher.epoch, version.clone()));
                let layout_known = std::mem::replace(&mut self.layouts, bytes) == bytes;
                let whole = layout_known && bytes as u64 <= chunk_bytes && bytes > 0;
                let mut pushed = self.publisher.publish(version.clone(), !layout_known);
                if !version.patches.is_empty() && !whole {
                    if self.dice.hits(50) {
                        pushed.drain(1..pushed.len() - 1); // nobody needs all of it (D6)
                    }
                    let patch = version.pushed_patch(self.publisher.epoch);
                    let announcement = pushed.remove(0);
                    self.broadcast("ctl", announcement);
                    patch.into_iter().for_each(|message| self.broadcast("dlt", message));
                    let end = pushed.pop().expect("it was just put there");
                    pushed.into_iter().for_each(|message| self.broadcast("dat", message));
                    return self.broadcast("ctl", end);
                }
                if whole {
                    self.broadcast("ctl", version.whole(self.publisher.epoch));
                    return;
                }
                let last = pushed.len() - 1;
                for (at, message) in pushed.into_iter().enumerate() {
                    self.broadcast(if at == 0 || at == last { "ctl" } else { "dat" }, message);
                }
            }
            Deed::RestartPublisher => {
                self.publisher = Publisher::new(self.publisher.epoch + 1, "tcp://*:1");
                self.keys += 1;
                self.sealer = self.sealer.as_ref().map(|_| Sealer::new(self.keys));
                self.rekeyed = false;
                self.number = 0;
                self.layouts = usize::MAX;
                self.cut();
            }
            Deed::CutConnections => self.cut(),
            Deed::Rekey => {
                if let Some(sealer) = &mut self.sealer {
                    self.keys += 1;
                    sealer.rekey(self.keys);
                    self.rekeyed = true;
                }
            }
        }
    }

    /// A version of so many bytes; or one that differs little from what runs, as a patch on that, too.
    fn version(&mut self, bytes: usize, chunk_bytes: u64, patched: bool) -> Version {
        let runs = self.publisher.applied.last().map(|applied| (applied.epoch, applied.version));
        let base = self.history.iter().find(|(epoch, version)| Some((*epoch, version.number)) == runs);
        let mut version = match base.cloned().filter(|_| patched) {
            Some((epoch, base)) if !base.data.is_empty() => {
                let mut data = base.data.clone();
                for _ in 0..self.dice.roll(9) {
                    let at = self.dice.roll(data.len() as u32) as usize;
                    data[at] = self.dice.roll(256) as u8;
                }
                Version::of_bytes(self.number, data, chunk_bytes).on(epoch, &base)
            }
            _ => {
                let data = (0..bytes).map(|_| self.dice.roll(256) as u8).collect();
                Version::of_bytes(self.number, data, chunk_bytes)
            }
        };
        version.keep = self.dice.hits(80);
        version
    }

    fn cut(&mut self) {
        self.to_worker.clear();
        self.to_publisher.clear();
        self.published.clear();
    }

    fn due(&mut self) -> u32 {
        self.step + 1 + self.dice.roll(self.weather.delay_steps + 1)
    }

    fn broadcast(&mut self, channel: &str, message: Message) {
        let topic = format!("{}/{}", MODEL, channel);
        let message = match &mut self.sealer {
            Some(sealer) => sealer.published(message),
            None => message,
        };
        for _ in 0..self.copies() {
            let (due, message) = (self.due(), self.damaged(message.clone()));
            self.published.push_back((due, topic.clone(), message));
        }
    }

    fn answer(&mut self, messages: Vec<Message>) {
        for message in messages {
            let message = match &mut self.sealer {
                Some(sealer) => sealer.addressed(message),
                None => message,
            };
            for _ in 0..self.copies() {
                let (due, message) = (self.due(), self.damaged(message.clone()));
                self.to_worker.push_back((due, message));
            }
        }
    }

    fn copies(&mut self) -> u32 {
        if self.dice.hits(self.weather.loss) {
            0
        } else {
            1 + u32::from(self.dice.hits(self.weather.doubling))
        }
    }

    /// Flips a bit of a payload, now and then.
    fn damaged(&mut self, mut message: Message) -> Message {
        if let Some(payload) = message.1.first_mut().filter(|payload| !payload.is_empty()) {
            if self.dice.hits(self.weather.damage) {
                let at = self.dice.roll(payload.len() as u32) as usize;
                payload[at] ^= 1 << self.dice.roll(8);
            }
        }
        message
    }

    fn perform(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send(message) => {
                    if matches!(message, FromWorker::Applied(_)) && !self.dice.hits(90) {
                        continue; // reports are lost more often: repetition must cure that
                    }
                    for _ in 0..self.copies() {
                        let due = self.due();
                        self.to_publisher.push_back((due, encode(&message)));
                    }
                }
                Effect::Subscribe { topic, on } => {
                    self.subscribed.retain(|known| *known != topic);
                    if on {
                        self.subscribed.push(topic);
                    }
                }
                Effect::Ready(staged) => {
                    let due = self.step + self.dice.roll(10);
                    self.ready.push_back((due, staged));
                }
                Effect::Decode(job) => {
                    let due = self.step + self.dice.roll(10);
                    self.decoding.push_back((due, job));
                }
                Effect::Rejected { code, text, .. } => {
                    let damaged = self.damages && code != "layout-mismatch";
                    assert!(damaged, "{}: {}", code, text);
                }
                Effect::Refused { code, text } => panic!("{}: {}", code, text),
                Effect::ReadyAtOnce(_) => panic!("there is one model"),
                Effect::Connect { .. }
                | Effect::Redial
                | Effect::ChangeOver { .. }
                | Effect::Probe
                | Effect::FetchFromSource(_)
                | Effect::Renamed { .. }
                | Effect::Joined { .. }
                | Effect::Lost
                | Effect::Notice { .. } => {}
            }
        }
    }

    fn advance(&mut self) {
        self.step += 1;
        self.now += STEP;
        while let Some(header) = pop_due(&mut self.to_publisher, self.step) {
            let undecided = self.publisher.undecided.as_ref().map(|version| version.number);
            let mut answers = self.publisher.hear(&header);
            if let Some(sealer) = self.sealer.as_ref().filter(|_| std::mem::take(&mut self.rekeyed)) {
                let rekey = Rekey {
                    epoch: self.publisher.epoch,
                    keys: vec![sealer.key.clone()],
                    ..Default::default()
                };
                answers.push((encode(&FromPublisher::Rekey(rekey)), Vec::new()));
                // once: it may be lost
            }
            if self.publisher.undecided.is_none() {
                self.committed.extend(undecided.map(|number| (self.publisher.epoch, number)));
            }
            self.answer(answers);
        }
        if self.step % 50 == 0 {
            let beacon = self.publisher.beacon();
            self.broadcast("ctl", beacon);
        }
        while let Some((header, payloads)) = pop_due(&mut self.to_worker, self.step) {
            let payloads: Vec<&[u8]> = payloads.iter().map(|payload| &payload[..]).collect();
            let effects = self.machine.receive(&header, &payloads, self.now);
            self.perform(effects);
        }
        while self.published.front().map_or(false, |(due, ..)| *due <= self.step) {
            let (_, topic, message) = self.published.pop_front().expect("it was just seen");
            if self.subscribed.contains(&topic) {
                self.receive_published(message);
            }
        }
        if !self.machine.in_session() {
            let effects = self.machine.connected(self.now);
            self.perform(effects);
        }
        let effects = self.machine.tick(self.now);
        self.perform(effects);
        while let Some(mut job) = pop_due(&mut self.decoding, self.step) {
            let broken = self.dice.hits(5);
            let done = job.run(&|| broken);
            let effects = self.machine.decoded(job, done, self.now);
            self.perform(effects);
        }
        while let Some(staged) = pop_due(&mut self.ready, self.step) {
            self.apply(staged);
        }
    }

    /// As the subscription does: a payload is received in its place, in pieces; some never end.
    fn receive_published(&mut self, (header, mut payloads): Message) {
        let count = payloads.len();
        let mut payload = match payloads.pop() {
            Some(bytes) => PublishedPayload::Bytes(bytes),
            None => PublishedPayload::None,
        };
        if self.weather.in_place {
            if let PublishedPayload::Bytes(bytes) = &payload {
                if let Place::InBuffer(ticket) = self.machine.place(&header, bytes.len()) {
                    for piece in bytes.chunks(1 + bytes.len() / 3) {
                        match self.machine.unfilled(ticket) {
                            Some(room) => room[..piece.len()].copy_from_slice(piece),
                            None => panic!("nothing else has happened meanwhile"),
                        }
                        self.machine.received(ticket, piece.len());
                    }
                    if self.dice.hits(self.weather.loss / 4) {
                        self.machine.cancel(ticket);
                        return;
                    }
                    payload = PublishedPayload::InPlace(ticket);
                }
            }
        }
        let effects =
            self.machine.receive_published(&Published { header, payload_count: count, payload }, self.now);
        self.perform(effects);
    }

    fn apply(&mut self, staged: StagedVersion) {
        let (key, model) = (staged.key, staged.model.clone());
        if Some(key) <= self.ran {
            let effects = self.machine.dropped(&model, key, self.now);
            drop(staged);
            return self.perform(effects);
        }
        let found = self.history.iter().find(|(epoch, version)| (*epoch, version.number) == key);
        let (_, version) = found.expect("nothing is applied that was not published");
        match &staged.source {
            Source::Buffer(buffer) => assert!(buffer[..] == version.data[..], "other bytes than published"),
            Source::Segment { .. } => panic!("there is no shared memory here"),
        }
        assert_eq!(staged.digest, version.digest());
        if version.commit == AnnounceCommit::Together {
            assert!(self.committed.contains(&key), "{:?} was applied before its commit", key);
        }
        let StagedVersion { layout, source, keep, .. } = staged;
        let base = match source {
            Source::Buffer(mut buffer) if keep => {
                buffer.keep();
                if self.dice.hits(self.weather.damage) && !buffer.is_empty() {
                    buffer[0] ^= 1; // by somebody
                }
                Some(Base { layout, bytes: Bytes::Kept(Arc::new(buffer)) })
            }
            _ => None,
        };
        self.machine.taken(&model, key);
        if self.dice.hits(self.weather.tears) {
            self.ran = None; // half of it was written
            let effects = self.machine.failed(&model, key, "torn", false, self.now);
            return self.perform(effects);
        }
        self.ran = Some(key);
        let effects = self.machine.applied(&model, key, "", base, "", self.now);
        self.perform(effects);
    }
}

fn pop_due<T>(queue: &mut VecDeque<(u32, T)>, step: u32) -> Option<T> {
    // In order, as on a connection: what is due later holds up what comes behind it.
    if queue.front().map_or(false, |(due, _)| *due <= step) {
        queue.pop_front().map(|(_, item)| item)
    } else {
        None
    }
}

fn weather() -> impl Strategy<Value = Weather> {
    let percents = (
        prop_oneof![Just(0), Just(10), Just(50), Just(80)],
        0..20u32,
        0..20u32,
        prop_oneof![Just(0), 0..90u32],
    );
    (percents, 0..20u32, any::<bool>(), any::<bool>()).prop_map(
        |((loss, damage, doubling, tears), delay_steps, in_place, keyed)| Weather {
            loss,
            damage,
            doubling,
            delay_steps,
            in_place,
            tears,
            keyed: keyed && AVAILABLE,
        },
    )
}

fn deed() -> impl Strategy<Value = Deed> {
    let sizes = prop_oneof![Just(0usize), Just(7), Just(64), 1..400usize, Just(400)];
    let publish = (sizes, 1..50u64, 0..4u32, any::<bool>(), any::<bool>()).prop_map(
        |(bytes, chunk_bytes, together, staged, patched)| Deed::Publish {
            bytes,
            chunk_bytes,
            together: together == 0,
            staged,
            patched,
        },
    );
    prop_oneof![8 => publish, 1 => Just(Deed::RestartPublisher), 1 => Just(Deed::CutConnections), 1 => Just(Deed::Rekey)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_network_that_heals_brings_the_newest_version(
        seed: u64,
        weather in weather(),
        deeds in prop::collection::vec((deed(), 0..60u32), 1..12),
    ) {
        let mut world = World::new(seed, weather);
        for (deed, steps) in deeds {
            world.act(deed);
            for _ in 0..steps {
                world.advance();
            }
        }
        world.act(Deed::Publish { bytes: 100, chunk_bytes: 9, together: false, staged: false, patched: false });
        let newest = (world.publisher.epoch, world.number);
        world.weather = Weather { loss: 0, damage: 0, tears: 0, ..world.weather };
        let mut steps = 0;
        let told = |world: &World| world.publisher.applied.iter().any(|a| (a.epoch, a.version) == newest);
        while !told(&world) {
            world.advance();
            steps += 1;
            prop_assert!(steps < 3000, "{:?} was not applied within a minute; runs: {:?}", newest, world.ran);
        }
        prop_assert_eq!(world.ran, Some(newest));
        let digest = world.history.last().expect("one was published").1.digest();
        prop_assert!(world.publisher.applied.iter().all(|a| (a.epoch, a.version) != newest || a.digest == digest));
    }
}
