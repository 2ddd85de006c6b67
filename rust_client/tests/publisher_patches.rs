//! What a publisher's machine pushes where a version is offered by patches: to whom one of them fits that, and the
//! version to the others (D6); each at the pace of those who follow it (P7).
#![allow(clippy::needless_update)] // in literals of messages, which later fields leave alone

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weightbus::limits::Timing;
use weightbus::messages::*;
use weightbus::publisher::bases::{Bases, PatchCandidate};
use weightbus::publisher::content::{Content, Copier};
use weightbus::publisher::effects::Effect;
use weightbus::publisher::machine::PublisherMachine;
use weightbus::publisher::publication::PublishTerms;
use weightbus::{Dtype, Encoding, TensorView};

const MODEL: &str = "m";
const DAT: &str = "m/dat";
const DLT: &str = "m/dlt";
const NOW: Duration = Duration::from_secs(1);
const CHUNK_BYTES: u64 = 16;
const WINDOW: u64 = 64; // chunks that a push runs ahead of reports

struct Bench {
    machine: PublisherMachine,
    bases: Bases,
    versions: Vec<Arc<Content>>,
    /// The numbers of versions on which there are patches to the newest, in their order.
    on: Vec<u64>,
    /// How many chunks each of these patches has.
    patches: Vec<u64>,
}

impl Bench {
    fn new() -> Bench {
        let machine = PublisherMachine::new(7, "tcp://*:1", Timing::default(), None, None);
        Bench {
            machine,
            bases: Bases::new(2, u64::MAX),
            versions: Vec::new(),
            on: Vec::new(),
            patches: Vec::new(),
        }
    }

    fn say(&mut self, name: &str, message: FromWorker) -> Vec<Effect> {
        self.machine.receive(name.as_bytes(), &encode(&message), 0, NOW)
    }

    fn join(&mut self, name: &str, takes_patches: bool, subscribed: bool) {
        self.say(
            name,
            FromWorker::Hello(Hello {
                name: name.to_owned(),
                instance: "0".repeat(32),
                models: Some((MODEL.to_owned(), None)).into_iter().collect(),
                features: if takes_patches { vec![DELTA.to_owned()] } else { Vec::new() },
                ..Default::default()
            }),
        );
        self.say(name, FromWorker::Ping(Ping { subscribed, ..Default::default() }));
    }

    /// Publishes a version of which a third differs from the one before; returns what goes out of it, as far as it may.
    fn publish(&mut self) -> Vec<Effect> {
        let number = self.versions.len() + 1;
        let bytes: Vec<u8> =
            (0..100_000).map(|at| if at % 6 == 0 { number as u8 } else { at as u8 }).collect();
        let tensor = TensorView { name: "w", dtype: Dtype::BF16, shape: &[50_000], bytes: &bytes };
        let content = Arc::new(Copier::default().copy(&[tensor], CHUNK_BYTES).unwrap());
        self.versions.push(content.clone());
        let patch_candidates = self.machine.patch_candidates(MODEL, None);
        let until = Instant::now() + Duration::from_secs(600);
        let offer = self.bases.offer(content, Encoding::DeltaFlat, &patch_candidates, true, until);
        self.patches = offer.patches.iter().map(|patch| patch.content.plan.count()).collect();
        self.on = offer.patches.iter().map(|patch| patch.id.version).collect();
        assert!(self.patches.iter().all(|&count| count > 2 * WINDOW));
        let asked = PublishTerms::default();
        let mut effects = self.machine.publish(number as u64, MODEL, offer, asked, NOW, NOW).unwrap();
        effects.extend(self.push());
        effects
    }

    /// Pushes what may go out now.
    fn push(&mut self) -> Vec<Effect> {
        let topics: Vec<String> = self.machine.pushing().cloned().collect();
        let mut effects = Vec::new();
        for topic in topics {
            effects.extend(self.machine.push(&topic, NOW));
        }
        effects
    }

    fn applied(&mut self, name: &str, version: u64) {
        let (model, digest) = (MODEL.to_owned(), self.versions[version as usize - 1].digest.clone());
        let applied = Applied { model, epoch: 7, version, digest, ..Default::default() };
        self.say(name, FromWorker::Applied(applied));
    }

    /// Says that so many chunks are here, and returns on which topics how many more go out.
    fn progress(&mut self, name: &str, version: u64, chunks: u64, patch: Option<u64>) -> [u64; 2] {
        let patch = patch.map(|version| PatchId {
            encoding: DELTA.to_owned(),
            epoch: 7,
            version,
            ..Default::default()
        });
        let model = MODEL.to_owned();
        let said = Progress { model, epoch: 7, version, chunks, patch, ..Default::default() };
        self.say(name, FromWorker::Progress(said));
        chunks_in(&self.push())
    }
}

/// How many chunks are pushed of the version, and of a patch.
fn chunks_in(effects: &[Effect]) -> [u64; 2] {
    let on = |wanted: &str| {
        let chunk = |effect: &&Effect| matches!(effect, Effect::Broadcast { topic, message: FromPublisher::Chunk(_), .. } if topic == wanted);
        effects.iter().filter(chunk).count() as u64
    };
    [on(DAT), on(DLT)]
}

fn pushed(effects: &[Effect]) -> BTreeSet<&str> {
    let topic = |effect: &Effect| match effect {
        Effect::Broadcast { topic, message: FromPublisher::Chunk(_), .. } => {
            Some(if topic == DAT { DAT } else { DLT })
        }
        _ => None,
    };
    effects.iter().filter_map(topic).collect()
}

/// What is pushed of the third version to these workers: whether each takes patches, whether it is subscribed, and the
/// version that it runs.
fn pushed_to(workers: &[(bool, bool, u64)]) -> (Vec<u64>, Vec<&'static str>) {
    let mut bench = Bench::new();
    let name = |at: usize| format!("w{}", at);
    bench.join("keeper", true, false); // for whom versions are kept at first
    for (at, &(takes_patches, subscribed, _)) in workers.iter().enumerate() {
        bench.join(&name(at), takes_patches, subscribed);
    }
    for number in 1..=2 {
        bench.publish();
        for (at, &(.., runs)) in workers.iter().enumerate().filter(|(_, its)| its.2 >= number) {
            bench.applied(&name(at), number.min(runs));
        }
    }
    bench.say("keeper", FromWorker::Bye(Bye::default()));
    let effects = bench.publish();
    let topics = pushed(&effects).into_iter().map(|topic| if topic == DAT { DAT } else { DLT }).collect();
    (bench.on, topics)
}

#[test]
fn each_is_pushed_one_of_the_two() {
    let (patched, whole) = ((true, true, 2), (false, true, 2));
    assert_eq!(pushed_to(&[patched, patched]), (vec![2], vec![DLT]), "it fits all");
    assert_eq!(pushed_to(&[patched, whole]), (vec![2], vec![DAT, DLT]), "one takes none");
    assert_eq!(pushed_to(&[whole, patched]), (vec![2], vec![DAT, DLT]), "in whatever order they came");
    assert_eq!(pushed_to(&[patched, (true, true, 0)]), (vec![2], vec![DAT, DLT]), "one runs nothing");
    assert_eq!(pushed_to(&[whole, whole]), (vec![], vec![DAT]));
    let behind = (true, true, 1);
    assert_eq!(pushed_to(&[patched, patched, behind]), (vec![2, 1], vec![DLT]), "the second is fetched");
    let deaf = (true, false, 2);
    assert_eq!(pushed_to(&[deaf, deaf, behind]), (vec![2, 1], vec![]), "nobody hears the first");
    assert_eq!(
        pushed_to(&[patched, (false, false, 2)]),
        (vec![2], vec![DLT]),
        "who needs all does not hear it"
    );
}

#[test]
fn what_is_reported_moves_that_alone_of_which_it_is() {
    let mut bench = Bench::new();
    bench.join("p", true, true);
    bench.join("w", false, true);
    bench.publish();
    for name in ["p", "w"] {
        bench.applied(name, 1);
    }
    assert_eq!(chunks_in(&bench.publish()), [WINDOW, WINDOW]);
    assert_eq!(bench.progress("w", 2, 16, None), [16, 0]);
    assert_eq!(bench.progress("p", 2, 10, Some(1)), [0, 10]);
    assert_eq!(bench.progress("p", 2, 30, Some(2)), [0, 0], "of another patch");
    assert_eq!(bench.progress("p", 1, 30, Some(1)), [0, 0], "of another version");
    assert_eq!(bench.progress("w", 1, 30, None), [0, 0], "of another version");
    assert_eq!(bench.progress("w", 2, 20, None), [4, 0]);
    assert_eq!(bench.progress("p", 2, 30, Some(1)), [0, 20]);
}

#[test]
fn of_a_patch_are_fetched_the_chunks_that_it_has() {
    let mut bench = Bench::new();
    bench.join("p", true, true);
    bench.publish();
    bench.applied("p", 1);
    bench.publish();
    let count = bench.patches[0];
    let mut fetch = |version, first, count, on| {
        let patch = Some(PatchId { encoding: DELTA.to_owned(), epoch: 7, version: on, ..Default::default() });
        let model = MODEL.to_owned();
        let fetch = Fetch { model, epoch: 7, version, first, count, patch, ..Default::default() };
        let said = bench.say("p", FromWorker::Fetch(fetch)).into_iter().filter_map(|effect| match effect {
            Effect::Send { message: FromPublisher::Refuse(refuse), .. } => Some(refuse.code),
            Effect::Send { message: FromPublisher::Chunk(chunk), .. } => Some(chunk.index.to_string()),
            Effect::Send { message: FromPublisher::End(_), .. } => Some("end".to_owned()),
            _ => None,
        });
        said.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(fetch(2, count - 2, 2, 1), format!("{} {}", count - 2, count - 1));
    assert_eq!(fetch(2, count - 2, 3, 1), "no-patch", "one more than there is");
    assert_eq!(fetch(2, count + 1, 0, 1), "no-patch");
    assert_eq!(fetch(2, 0, 0, 1), "end");
    assert_eq!(fetch(2, 0, 1, 2), "no-patch", "of another base");
    assert_eq!(fetch(0, 0, 1, 1), "no-patch", "to whatever is the latest");
}

#[test]
fn links_are_known_by_what_workers_say_and_decide_whether_a_patch_is_made() {
    let mut bench = Bench::new();
    bench.join("w", true, true);
    bench.publish();
    let rate = |bench: &Bench| bench.machine.patch_candidates(MODEL, None)[0].rate;
    assert!(rate(&bench).is_infinite());
    let model = MODEL.to_owned();
    let said = |chunks| Progress { model: model.clone(), epoch: 7, version: 1, chunks, ..Default::default() };
    for (chunks, at) in [(10, 1), (20, 2), (40, 4)] {
        let header = encode(&FromWorker::Progress(said(chunks)));
        bench.machine.receive(b"w", &header, 0, NOW + Duration::from_secs(at));
    }
    assert_eq!(rate(&bench), 10.0 * CHUNK_BYTES as f64, "ten chunks a second");
    bench.applied("w", 1);
    let (first, rate_now) = (bench.versions[0].clone(), bench.machine.patch_candidates(MODEL, None));
    let mut bytes = first.bytes().to_vec();
    bytes[0] ^= 1;
    let tensor = TensorView { name: "w", dtype: Dtype::BF16, shape: &[50_000], bytes: &bytes };
    let content = Arc::new(Copier::default().copy(&[tensor], CHUNK_BYTES).unwrap());
    let until = Instant::now() + Duration::from_secs(600);
    let patches = |patch_candidates: &[PatchCandidate]| {
        bench
            .bases
            .clone()
            .offer(content.clone(), Encoding::Auto, patch_candidates, true, until)
            .patches
            .len()
    };
    assert_eq!(patches(&rate_now), 1);
    let fast = PatchCandidate { rate: 1e15, ..rate_now[0].clone() };
    assert_eq!(patches(&[fast]), 0);
}
