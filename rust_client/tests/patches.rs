//! Versions that arrive as patches on what runs, and what comes of a patch that is of no use.
#![allow(clippy::needless_update)] // in literals of messages, which later fields leave alone

mod publisher;

use publisher::sealer::Sealer;
use publisher::worker::{worker, AnyLayout};
use publisher::{layout, receive_published, Message, Publisher, Version, MODEL};
use std::sync::Arc;
use std::time::Duration;
use weightbus::effects::Effect;
use weightbus::limits::BYTES_MAX;
use weightbus::machine::WorkerMachine;
use weightbus::messages::*;
use weightbus::patching::{Base, Bytes, Patching};
use weightbus::sealing::AVAILABLE;
use weightbus::staging::{Source, StagedVersion};
use weightbus::{Model, Tensor};

const TICK: Duration = Duration::from_millis(100);
const TOOK: Duration = Duration::from_micros(1234); // decoding each patch, as the worker is told

/// A worker and its publisher, between which nothing is lost.
struct World {
    machine: WorkerMachine,
    publisher: Publisher,
    sealer: Option<Sealer>,
    now: Duration,
    topics: Vec<String>,
    loses_patches: bool,     // that are fetched
    resident: Option<Model>, // has the bytes of what runs instead of a buffer
    sent: Vec<FromWorker>,
    notices: Vec<String>,
    jobs: Vec<Patching>,
    ready: Vec<StagedVersion>,
    runs: Option<(u64, Vec<u8>)>, // number and bytes
}

impl World {
    fn new(sealed: bool, patches: bool) -> World {
        let mut machine = worker("w", "0".repeat(32), Arc::new(AnyLayout));
        if sealed {
            machine.require_sealed();
        }
        if patches {
            machine.accept_patches();
        }
        let mut world = World {
            machine,
            publisher: Publisher::new(1, "tcp://*:1"),
            sealer: sealed.then(|| Sealer::new(1)),
            now: Duration::from_secs(100),
            topics: Vec::new(),
            loses_patches: false,
            resident: None,
            sent: Vec::new(),
            notices: Vec::new(),
            jobs: Vec::new(),
            ready: Vec::new(),
            runs: None,
        };
        let hello = world.machine.connected(world.now);
        world.perform(hello);
        assert!(world.machine.in_session());
        world
    }

    fn perform(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send(message) => {
                    let patch = matches!(&message, FromWorker::Fetch(fetch) if fetch.patch.is_some());
                    let mut answers = self.publisher.hear(&encode(&message));
                    answers.retain(|_| !(patch && self.loses_patches));
                    self.sent.push(message);
                    answers.into_iter().for_each(|answer| self.control(answer));
                }
                Effect::Subscribe { topic, on } => {
                    self.topics.retain(|known| *known != topic);
                    self.topics.extend(Some(topic).filter(|_| on));
                }
                Effect::Decode(job) => self.jobs.push(job),
                Effect::Ready(staged) => self.ready.push(staged),
                Effect::Notice { code, text } => self.notices.push(format!("{}: {}", code, text)),
                _ => {}
            }
        }
    }

    fn control(&mut self, message: Message) {
        let message = match &mut self.sealer {
            Some(sealer) => sealer.addressed(message),
            None => message,
        };
        let payloads: Vec<&[u8]> = message.1.iter().map(|payload| &payload[..]).collect();
        let effects = self.machine.receive(&message.0, &payloads, self.now);
        self.perform(effects);
    }

    /// Publishes on a topic; what is not subscribed to is sealed, and lost.
    fn data(&mut self, channel: &str, message: Message) {
        let message = match &mut self.sealer {
            Some(sealer) => sealer.published(message),
            None => message,
        };
        if !self.topics.contains(&format!("{}/{}", MODEL, channel)) {
            return;
        }
        let effects = receive_published(&mut self.machine, message, self.now);
        self.perform(effects);
    }

    fn announce(&mut self, version: &Version) {
        self.publisher.publish(version.clone(), true);
        self.data("ctl", version.announcement(self.publisher.epoch, true));
    }

    /// A publisher of this epoch answers what the worker said first.
    fn welcomed(&mut self, epoch: u64) {
        self.publisher = Publisher::new(epoch, "tcp://*:1");
        let answers = self.publisher.hear(&encode(&self.sent[0]));
        answers.into_iter().for_each(|answer| self.control(answer));
    }

    /// Publishes it: as its first patch if it has one, else whole.
    fn publish(&mut self, version: &Version) {
        self.announce(version);
        if version.patches.is_empty() {
            let mut pushed = version.pushed(self.publisher.epoch, true).split_off(1);
            let end = pushed.pop().unwrap();
            pushed.into_iter().for_each(|message| self.data("dat", message));
            return self.data("ctl", end);
        }
        version.pushed_patch(self.publisher.epoch).into_iter().for_each(|message| self.data("dlt", message));
    }

    /// Time goes by, and all that is to be decoded is.
    fn wait(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now += TICK;
            let effects = self.machine.tick(self.now);
            self.perform(effects);
            for mut job in std::mem::take(&mut self.jobs) {
                let done = job.run(&|| false).map(|_| TOOK);
                let effects = self.machine.decoded(job, done, self.now);
                self.perform(effects);
            }
        }
    }

    /// Applies what is ready, and keeps it if that is wanted.
    fn apply(&mut self) {
        let StagedVersion { key, layout, source, keep, .. } =
            self.ready.pop().expect("a version that is ready");
        let mut buffer = match source {
            Source::Buffer(buffer) => buffer,
            Source::Segment { .. } => panic!("there is no shared memory here"),
        };
        self.runs = Some((key.1, buffer.to_vec()));
        buffer.keep();
        let bytes = self.resident.clone().map_or_else(|| Bytes::Kept(Arc::new(buffer)), Bytes::Model);
        let base = keep.then_some(Base { layout, bytes });
        self.machine.taken(MODEL, key);
        let effects = self.machine.applied(MODEL, key, "", base, "", self.now);
        self.perform(effects);
    }

    /// Publishes, decodes and applies; returns how often the worker has fetched meanwhile.
    fn bring(&mut self, version: &Version) -> usize {
        let before = self.fetches().len();
        self.publish(version);
        self.wait(3 * TICK);
        self.apply();
        assert_eq!(self.runs, Some((version.number, version.data.clone())));
        self.fetches().len() - before
    }

    fn fetches(&self) -> Vec<&Fetch> {
        let mut found = Vec::new();
        for sent in &self.sent {
            if let FromWorker::Fetch(fetch) = sent {
                found.push(fetch);
            }
        }
        found
    }

    /// The patch that a version came by, as it was told.
    fn applied(&self, number: u64) -> Option<PatchId> {
        let applied = self.publisher.applied.iter().rfind(|applied| applied.version == number);
        let applied = applied.expect("it was applied");
        let took = if applied.patch.is_some() { TOOK } else { Duration::ZERO };
        assert_eq!(Duration::from_micros(applied.decode_us), took);
        applied.patch.clone()
    }

    fn topic(&self) -> &str {
        self.topics
            .iter()
            .find(|topic| !topic.ends_with("/ctl"))
            .map_or("", |topic| &topic[MODEL.len() + 1..])
    }
}

fn first() -> Version {
    let data = (0..400u32).map(|at| (at * 7 % 251) as u8).collect();
    Version { keep: true, ..Version::of_bytes(1, data, 50) }
}

/// The next one, of which some bytes are others; with a patch.
fn after(base: &Version) -> Version {
    let mut data = base.data.clone();
    data.iter_mut().skip(base.number as usize).step_by(60).for_each(|byte| *byte ^= 5);
    Version { keep: true, ..Version::of_bytes(base.number + 1, data, 50) }.on(1, base)
}

fn id(version: u64) -> PatchId {
    PatchId { encoding: DELTA.to_owned(), epoch: 1, version, ..Default::default() }
}

#[test]
fn what_changed_arrives_fetched_at_first_and_then_pushed() {
    for sealed in [false, AVAILABLE] {
        let mut world = World::new(sealed, true);
        let one = first();
        assert_eq!((world.bring(&one), world.topic()), (0, "dat"));
        assert_eq!(world.applied(1), None);
        let two = after(&one);
        assert!(world.bring(&two) > 0, "what it does not listen to it fetches");
        assert!(world.fetches().iter().all(|fetch| fetch.patch == Some(id(1)) && fetch.unpatched.is_empty()));
        assert_eq!((world.applied(2), world.topic()), (Some(id(1)), "dlt"));
        let three = after(&two);
        assert_eq!(world.bring(&three), 0, "it was pushed all of it");
        assert_eq!(world.applied(3), Some(id(2)));
        let four = Version { number: 4, ..first() };
        assert!(world.bring(&four) > 0);
        assert_eq!((world.applied(4), world.topic()), (None, "dat"));
        assert!(world.notices.is_empty() && world.publisher.unpatched.is_empty(), "{:?}", world.notices);
    }
}

#[test]
fn what_was_applied_late_of_a_later_publisher_is_told_until_that_is_settled() {
    let mut world = World::new(false, false);
    world.welcomed(2);
    world.publish(&first());
    let StagedVersion { key, .. } = world.ready.pop().expect("a version that is ready");
    world.machine.taken(MODEL, key);
    world.welcomed(1);
    let mut said = world.machine.applied(MODEL, key, "", None, "", world.now);
    let hellos = |effects: &[Effect]| {
        let hello =
            |effect: &&Effect| matches!(effect, Effect::Send(FromWorker::Hello(hello)) if hello.epoch == 2);
        effects.iter().filter(hello).count()
    };
    for _ in 0..10 {
        world.now += TICK;
        said.extend(world.machine.tick(world.now)); // and every one is lost
    }
    assert!(hellos(&said) >= 3, "{} were said", hellos(&said));
    world.welcomed(3);
    world.now += 5 * TICK;
    assert_eq!(hellos(&world.machine.tick(world.now)), 0);
}

#[test]
fn memory_that_a_patch_takes_that_is_being_decoded_is_waited_for() {
    let mut world = World::new(false, true);
    let (one, two) = (first(), after(&first()));
    world.bring(&one);
    world.publish(&two);
    world.now += TICK;
    let effects = world.machine.tick(world.now);
    world.perform(effects);
    assert_eq!(world.jobs.len(), 1, "it is being decoded");
    let few = libc::rlimit { rlim_cur: BYTES_MAX / 2, rlim_max: BYTES_MAX / 2 };
    // SAFETY: it reads one rlimit, which is plenty for all other tests.
    let _ = unsafe { libc::setrlimit(libc::RLIMIT_AS, &few) }; // it fails where there is less
    let json = format!(r#"{{"w":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, BYTES_MAX);
    let three = Version { number: 3, layout: layout(&json), chunk_bytes: 1 << 26, ..first() };
    let announce = Announce { nbytes: BYTES_MAX, ..three.announce(1) };
    let announced = (encode(&FromPublisher::Announce(announce)), vec![three.layout.clone()]);
    world.data("ctl", announced);
    let failed = |world: &World| world.sent.iter().any(|sent| matches!(sent, FromWorker::Failed(_)));
    assert!(!failed(&world), "the decoder still holds memory");
    world.wait(TICK);
    assert!(failed(&world), "now there is none to wait for");
}

#[test]
fn one_patch_leads_from_what_runs_though_versions_were_missed() {
    let mut world = World::new(false, true);
    let (one, mut three) = (first(), after(&Version { number: 2, ..first() }));
    world.bring(&one);
    three = three.on(1, &one);
    assert_eq!(three.patches.len(), 2);
    world.bring(&three);
    assert_eq!(world.applied(3), Some(id(1)), "the second of two");
    assert!(world.publisher.unpatched.is_empty());
}

#[test]
fn whoever_does_not_name_the_feature_or_has_kept_nothing_takes_all_of_it() {
    for (patches, keep) in [(false, true), (true, false)] {
        let mut world = World::new(false, patches);
        let hello =
            world.sent.iter().find_map(|sent| if let FromWorker::Hello(h) = sent { Some(h) } else { None });
        assert_eq!(hello.unwrap().features.contains(&DELTA.to_owned()), patches);
        let one = Version { keep, ..first() };
        world.bring(&one);
        world.announce(&after(&one));
        world.wait(10 * TICK);
        world.apply();
        assert_eq!(world.applied(2), None);
        let why = world.publisher.unpatched.join(" ");
        assert_eq!(why.contains("its bytes were not kept; there are patches on 1"), patches, "{}", why);
        assert_eq!(why.is_empty(), !patches);
        assert!(world.notices.is_empty(), "that is nobody's fault");
    }
}

#[test]
fn why_a_version_is_not_patched_is_said_where_only_its_gaps_are_fetched() {
    let mut world = World::new(false, true);
    world.bring(&first());
    let two = after(&Version { number: 7, ..first() }); // on what does not run here
    let two = Version { number: 2, ..two };
    world.announce(&two);
    let mut pushed = two.pushed(1, true).split_off(1);
    pushed.remove(1);
    let end = pushed.pop().unwrap();
    pushed.into_iter().for_each(|message| world.data("dat", message));
    world.data("ctl", end);
    world.wait(TICK);
    world.apply();
    assert!(world.fetches().iter().all(|fetch| fetch.count > 0), "no other was needed");
    assert!(world.publisher.unpatched[0].contains("there are patches on 7"));
}

#[test]
fn all_of_a_version_is_fetched_where_its_patch_is_of_no_use() {
    type Spoil = fn(&mut Version);
    let ways: [(&str, Spoil); 8] = [
        ("leads to", |v| {
            let mut other = v.clone();
            other.data[3] ^= 1;
            v.patches = other.on(1, &first()).patches.split_off(1);
        }),
        ("is for the base", |v| {
            let mut base = first();
            base.data[3] ^= 1;
            let own = v.patches.remove(0).0;
            *v = v.clone().on(1, &base);
            v.patches[0].0.digest = own.digest;
        }),
        ("begin with", |v| v.patches[0].1[0] ^= 1),
        ("follow the last block", |v| {
            v.patches[0].1.push(0);
            v.patches[0].0.nbytes += 1;
        }),
        ("the block at byte 0", |v| v.patches[0].1[122] ^= 1),
        ("there are patches on 1", |v| v.patches[0].0.digest = "0".repeat(64)),
        ("there are patches on 1", |v| v.patches[0].0.epoch += 1),
        ("there are patches on 1", |v| {
            v.patches[0].1.resize(v.data.len() + 1, 0); // larger than the version
            v.patches[0].0.nbytes = v.patches[0].1.len() as u64;
        }),
    ];
    for (words, spoil) in ways {
        let mut world = World::new(false, true);
        world.bring(&first());
        let mut two = after(&first());
        spoil(&mut two);
        world.bring(&two);
        assert_eq!(world.applied(2), None);
        let why = world.publisher.unpatched.join(" ");
        assert!(why.contains(words), "{:?} in {:?}", words, why);
        let told = world.notices.join(" ");
        assert_eq!(told.contains(words), words != "there are patches on 1", "{:?}", told);
        world.bring(&after(&two));
        assert_eq!(world.applied(3), Some(id(2)), "the next one is a patch again");
    }
}

#[test]
fn no_patch_leads_from_one_layout_to_another() {
    let mut world = World::new(false, true);
    world.bring(&first());
    let other = layout(r#"{"v":{"dtype":"U8","shape":[400],"data_offsets":[0,400]}}"#);
    let two = Version { layout: other, ..after(&first()) };
    world.bring(&two);
    assert_eq!(world.runs, Some((2, two.data)));
    assert!(
        world.publisher.unpatched[0].contains("there are patches on 1"),
        "{:?}",
        world.publisher.unpatched
    );
    assert!(world.notices.is_empty(), "it was not even begun: {:?}", world.notices);
}

#[test]
fn bytes_that_somebody_has_changed_are_found_out() {
    let mut world = World::new(false, true);
    world.publish(&first());
    match &mut world.ready[0].source {
        Source::Buffer(buffer) => buffer[9] ^= 1,
        Source::Segment { .. } => panic!("there is no shared memory here"),
    }
    world.apply();
    world.bring(&after(&first()));
    assert_eq!(world.applied(2), None);
    assert!(world.publisher.unpatched[0].contains("is for the base"), "{:?}", world.publisher.unpatched);
}

#[test]
fn a_patch_that_is_refused_or_never_comes_is_given_up() {
    let mut world = World::new(false, true);
    world.bring(&first());
    let two = after(&first());
    world.publisher.publish(Version { patches: Vec::new(), ..two.clone() }, true);
    world.data("ctl", two.announcement(1, true));
    world.wait(TICK);
    world.apply();
    assert_eq!(world.publisher.unpatched, ["the publisher does not have this patch"]);
    world.loses_patches = true;
    let three = after(&two);
    world.announce(&three);
    world.wait(Duration::from_secs(10));
    assert!(world.ready.is_empty() && world.publisher.unpatched.len() == 1, "it is patient");
    world.wait(Duration::from_secs(50));
    assert_eq!(world.publisher.unpatched[1], "no more of its chunks arrive");
    world.apply();
    assert_eq!(world.runs, Some((3, three.data)));
    assert_eq!(world.notices.len(), 2, "{:?}", world.notices);
}

#[test]
fn what_speaks_of_another_patch_or_of_the_version_has_no_effect() {
    let mut world = World::new(false, true);
    world.bring(&first());
    let two = after(&first());
    let mut other = two.clone();
    other.patches[0].0.version = 7;
    world.loses_patches = true;
    world.data("ctl", two.announcement(1, true));
    let here =
        |world: &World| world.machine.follower(MODEL).unwrap().state().arriving.map(|(_, here, _)| here);
    assert_eq!(here(&world), Some(0));
    for message in other.patch_chunks(1, 0).into_iter().chain(two.pushed(1, true).split_off(1)) {
        world.control(message);
    }
    world.control(other.patch_end(1, 0));
    assert_eq!(here(&world), Some(0));
    for message in two.patch_chunks(1, 0) {
        world.control(message);
    }
    assert!(here(&world) > Some(1) && world.jobs.is_empty(), "nobody has said what it leads to");
    world.control(two.patch_end(1, 0));
    assert_eq!(world.jobs.len(), 1);
    world.control(two.patch_end(1, 0));
    assert_eq!(world.jobs.len(), 1, "it is decoded once");
}

#[test]
fn a_newer_version_takes_the_place_of_one_that_is_being_decoded() {
    let mut world = World::new(false, true);
    world.bring(&first());
    let two = after(&first());
    world.publish(&two);
    let mut job = world.jobs.pop().expect("a patch that is here");
    let three = Version { number: 3, ..after(&first()) };
    world.announce(&three);
    assert!(job.run(&|| false).is_err(), "nobody wants it any more");
    let effects = world.machine.decoded(job, Ok(TOOK), world.now);
    world.perform(effects);
    assert!(world.ready.is_empty(), "it is of no use to anybody");
    world.wait(5 * TICK);
    world.apply();
    assert_eq!((world.runs.clone(), world.applied(3)), (Some((3, three.data)), Some(id(1))));
}

#[test]
fn a_model_builds_no_patch_once_another_version_is_written_to_it() {
    for begun in [false, true] {
        let mut world = World::new(false, true);
        world.resident = Some(Model::new([Tensor::new("w", &[400], first().data)]).unwrap());
        world.bring(&first());
        let two = Version { number: 2, patches: Vec::new(), ..after(&first()) };
        world.publish(&two);
        world.wait(3 * TICK);
        if begun {
            world.machine.taken(MODEL, (1, 2)); // somebody writes it just now
        }
        world.loses_patches = true;
        let three = Version { number: 3, ..after(&first()) };
        world.announce(&three);
        world.apply();
        world.wait(3 * TICK);
        let why = if begun { "another is being applied" } else { "another version runs now" };
        assert!(world.publisher.unpatched[0].contains(why), "{:?}", world.publisher.unpatched);
        world.apply();
        assert_eq!(world.runs, Some((3, three.data)));
    }
}

#[test]
fn a_patched_version_waits_for_its_commit_and_says_staged_by_which_patch() {
    let mut world = World::new(false, true);
    world.bring(&first());
    let mut two = after(&first());
    (two.commit, two.acknowledge) = (AnnounceCommit::Together, AnnounceAcknowledge::Staged);
    world.bring(&two);
    let staged =
        |sent: &FromWorker| matches!(sent, FromWorker::Staged(staged) if staged.patch == Some(id(1)));
    assert!(world.sent.iter().any(staged));
    assert_eq!(world.applied(2), Some(id(1)));
}

#[test]
fn patches_build_on_what_runs_by_its_new_name() {
    let mut world = World::new(false, true);
    world.bring(&first());
    let was = Running { epoch: 1, version: 1, digest: first().digest(), ..Default::default() };
    let rename = Rename { model: MODEL.to_owned(), epoch: 1, version: 5, was, ..Default::default() };
    world.control((encode(&FromPublisher::Rename(rename)), Vec::new()));
    let six = after(&Version { number: 5, ..first() });
    world.bring(&six);
    assert_eq!(world.applied(6), Some(id(5)));
}
