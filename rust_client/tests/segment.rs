//! Shared memory: what is opened, what is copied, and how a machine takes it or leaves it.
#![allow(clippy::needless_update)] // in literals of messages, which later fields leave alone

#[path = "../conformance/memfd.rs"]
mod memfd;
mod publisher;

use publisher::worker::worker;
use publisher::{welcome, Version, MODEL};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::io::AsRawFd;
use std::sync::Arc;
use std::time::Duration;
use weightbus::digest::bytes_of_hex;
use weightbus::effects::{Effect, Host};
use weightbus::layout::Layout;
use weightbus::limits::SEGMENTS_MAX;
use weightbus::machine::WorkerMachine;
use weightbus::messages::*;
use weightbus::segment::{Segment, Segments, Stale, Stamp};
use weightbus::staging::{Source, StagedVersion};
use weightbus::zmtp::{Published, PublishedPayload};

const TOKEN: &str = "00112233445566778899aabbccddeeff";
const NOW: Duration = Duration::from_secs(1);

/// The bytes of a segment that holds this version.
fn filled(epoch: u64, version: u64, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"WBPSHM1\0".to_vec();
    bytes.extend(bytes_of_hex(TOKEN));
    for number in [epoch, version, MODEL.len() as u64] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes.extend_from_slice(MODEL.as_bytes());
    bytes.resize(4096, 0);
    bytes.extend_from_slice(data);
    bytes
}

fn shared(path: &str) -> Shared {
    Shared { path: path.to_owned(), token: TOKEN.to_owned(), ..Default::default() }
}

fn lock(file: &File, operation: i32) {
    // SAFETY: the descriptor is open.
    assert_eq!(unsafe { libc::flock(file.as_raw_fd(), operation) }, 0);
}

#[test]
fn nothing_else_is_opened() {
    let (file, path) = memfd::segment(&filled(1, 2, b"data")).unwrap();
    assert!(Segment::open(&shared(&path), 4).is_some());
    let pid = std::process::id();
    for other in [
        "/etc/passwd".to_owned(),
        format!("/proc/{}/fd/{}/", pid, file.as_raw_fd()),
        format!("/proc/self/fd/{}", file.as_raw_fd()),
        format!("/proc/{}/fd/../fd/{}", pid, file.as_raw_fd()),
        format!("/proc/{:011}/fd/{}", pid, file.as_raw_fd()),
        format!("/proc/{}/fd/", pid),
        String::new(),
    ] {
        assert!(Segment::open(&shared(&other), 4).is_none(), "{}", other);
    }
    let folder = std::env::temp_dir().join(format!("weightbus-{}", pid));
    std::fs::write(&folder, filled(1, 2, b"data")).unwrap();
    let unsealed = File::open(&folder).unwrap();
    std::fs::remove_file(&folder).unwrap();
    let path = format!("/proc/{}/fd/{}", pid, unsealed.as_raw_fd());
    assert!(Segment::open(&shared(&path), 4).is_none(), "it could be cut short while it is read");
}

#[test]
fn a_segment_that_is_being_filled_is_stale() {
    let (file, path) = memfd::segment(&filled(1, 2, b"data")).unwrap();
    let segment = Segment::open(&shared(&path), 4).unwrap();
    let stamp = Stamp::new(MODEL, 1, 2);
    let copy = |segment: &Segment| {
        segment.read(&stamp, |memory| {
            let mut data = vec![0; memory.nbytes()];
            memory.copy_to(0, &mut data);
            data
        })
    };
    assert_eq!(copy(&segment), Ok(b"data".to_vec()));
    let writer = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    lock(&writer, libc::LOCK_EX | libc::LOCK_NB); // so our own lock was let go
    assert_eq!(copy(&segment), Err(Stale));
    lock(&writer, libc::LOCK_UN);
    assert_eq!(copy(&segment), Ok(b"data".to_vec()));
    drop(file);
}

#[test]
fn segments_are_kept_open_within_a_bound() {
    let kept: Vec<(File, String)> =
        (0..20).map(|_| memfd::segment(&filled(1, 2, b"data")).unwrap()).collect();
    let segments = Segments::default();
    let mut opened = Vec::new();
    for (at, (_, path)) in kept.iter().enumerate() {
        // Each with a token of its own: segments are told apart by it.
        let token = format!("{:032x}", at);
        let mut bytes = filled(1, 2, b"data");
        bytes[8..24].copy_from_slice(&bytes_of_hex(&token));
        let mut file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.write_all(&bytes).unwrap();
        drop(file);
        let segment = segments.open(&Shared { path: path.clone(), token, ..Default::default() }, 4).unwrap();
        opened.push(Arc::downgrade(&segment));
    }
    let open = opened.iter().filter(|segment| segment.upgrade().is_some()).count();
    assert_eq!(open, SEGMENTS_MAX);
}

struct Here(Segments);

impl Host for Here {
    fn fault(&self, _model: &str, _layout: &Layout) -> Option<String> {
        None
    }

    fn open(&self, shared: &Shared, nbytes: u64) -> Option<Arc<Segment>> {
        self.0.open(shared, nbytes)
    }
}

/// A machine in a session over shared memory, and what it did at the welcome.
fn joined(probe: &str) -> (WorkerMachine, Vec<Effect>) {
    let mut machine = worker("w", "0".repeat(32), Arc::new(Here(Segments::default())));
    machine.connected(NOW);
    let (header, _) = welcome(1, "tcp://*:1", BTreeMap::new());
    let mut fields: serde_json::Value = serde_json::from_slice(&header).unwrap();
    fields["shared"] = serde_json::json!({ "path": probe, "token": TOKEN });
    let effects = machine.receive(&serde_json::to_vec(&fields).unwrap(), &[], NOW);
    (machine, effects)
}

/// Announces a version that lies in a segment, with its layout.
fn announce(machine: &mut WorkerMachine, version: &Version, path: &str, hash: bool) -> Vec<Effect> {
    let announce = Announce { shared: Some(shared(path)), hash, ..version.announce(1) };
    machine.receive(&encode(&FromPublisher::Announce(announce)), &[&version.layout], NOW)
}

fn sent(effects: &[Effect]) -> Vec<&FromWorker> {
    effects
        .iter()
        .filter_map(|effect| if let Effect::Send(message) = effect { Some(message) } else { None })
        .collect()
}

fn ready(effects: Vec<Effect>) -> Option<StagedVersion> {
    effects
        .into_iter()
        .find_map(|effect| if let Effect::Ready(staged) = effect { Some(staged) } else { None })
}

fn probe() -> (File, String) {
    let mut bytes = filled(0, 0, b"");
    bytes[24..].fill(0);
    memfd::segment(&bytes).unwrap()
}

#[test]
fn a_version_in_a_segment_is_ready_at_once() {
    let (_probe, probe) = probe();
    let (mut machine, effects) = joined(&probe);
    assert!(matches!(sent(&effects)[..], [FromWorker::Ping(Ping { shared: true, subscribed: false, .. })]));
    let data: Vec<String> = effects
        .iter()
        .filter_map(
            |e| if let Effect::Subscribe { topic, on: true } = e { Some(topic.clone()) } else { None },
        )
        .collect();
    assert_eq!(data, [control_topic(MODEL)]);
    let version = Version::of_bytes(2, b"0123456789".to_vec(), 4);
    let (_file, path) = memfd::segment(&filled(1, 2, &version.data)).unwrap();
    let effects = announce(&mut machine, &version, &path, true);
    assert!(sent(&effects).is_empty(), "nothing needs to be fetched");
    let staged = ready(effects).unwrap();
    match &staged.source {
        Source::Segment { segment, hash_chunks: 4 } => {
            let digest = segment.read(&Stamp::new(MODEL, 1, 2), |memory| memory.digest(&staged.layout.id, 4));
            assert_eq!(digest, Ok(version.digest()));
        }
        _ => panic!("it is not in the segment"),
    }
    machine.taken(MODEL, staged.key);
    let effects = machine.applied(MODEL, staged.key, "", None, "", NOW);
    assert!(
        matches!(sent(&effects)[..], [FromWorker::Applied(Applied { version: 2, digest, .. })] if digest.is_empty())
    );
}

#[test]
fn a_stale_version_is_asked_for_again_and_then_fetched() {
    let (_probe, probe) = probe();
    let (mut machine, _) = joined(&probe);
    let version = Version::of_bytes(2, b"0123456789".to_vec(), 4);
    let (_file, path) = memfd::segment(&filled(1, 3, &version.data)).unwrap();
    let staged = ready(announce(&mut machine, &version, &path, false)).unwrap();
    machine.taken(MODEL, staged.key);
    let effects = machine.stale(MODEL, staged.key, NOW);
    assert!(matches!(sent(&effects)[..], [FromWorker::Fetch(Fetch { version: 0, count: 0, .. })]));
    let effects = announce(&mut machine, &version, &path, false); // it is still the newest
    let asked: u64 =
        sent(&effects).iter().map(|m| if let FromWorker::Fetch(f) = m { f.count } else { 0 }).sum();
    assert_eq!(asked, 3, "all chunks come over the network");
}

#[test]
fn after_a_torn_copy_nothing_runs_and_the_network_brings_what_is_next() {
    let (_probe, probe) = probe();
    let (mut machine, _) = joined(&probe);
    let version = Version::of_bytes(2, b"0123456789".to_vec(), 4);
    let (_file, path) = memfd::segment(&filled(1, 2, &version.data)).unwrap();
    let staged = ready(announce(&mut machine, &version, &path, false)).unwrap();
    machine.taken(MODEL, staged.key);
    let effects = machine.failed(MODEL, staged.key, "overwritten", false, NOW);
    assert!(matches!(sent(&effects)[..], [FromWorker::Failed(Failed { intact: false, .. })]));
    assert_eq!(machine.follower(MODEL).unwrap().running(), None);
    assert_eq!(machine.applied_epoch(), 1, "no older publisher is followed");
    let effects = announce(&mut machine, &version, &path, false);
    assert!(ready(effects).is_none(), "it was not to be had from there");
    assert!(machine
        .tick(NOW + Duration::from_secs(1))
        .iter()
        .any(|effect| matches!(effect, Effect::Send(FromWorker::Failed(Failed { intact: false, .. })))));
}

#[test]
fn a_new_name_has_its_epoch() {
    let (_probe, probe) = probe();
    let (mut machine, _) = joined(&probe);
    let version = Version::of_bytes(2, b"0123456789".to_vec(), 4);
    let (_file, path) = memfd::segment(&filled(1, 2, &version.data)).unwrap();
    let staged = ready(announce(&mut machine, &version, &path, false)).unwrap();
    machine.taken(MODEL, staged.key);
    machine.applied(MODEL, staged.key, "", None, "", NOW);
    let (header, _) = welcome(5, "tcp://*:1", BTreeMap::new());
    machine.receive(&header, &[], NOW);
    let was = Running { epoch: 1, version: 2, ..Default::default() };
    let metadata = Metadata::from([("step".to_owned(), "by the new name".to_owned())]);
    let rename = Rename {
        model: MODEL.to_owned(),
        epoch: 5,
        version: 1,
        was,
        metadata: metadata.clone(),
        ..Default::default()
    };
    let effects = machine.receive(&encode(&FromPublisher::Rename(rename)), &[], NOW);
    let told = |e: &Effect| match e {
        Effect::Renamed { was, key, metadata: said, .. } => (*was, *key, said) == ((1, 2), (5, 1), &metadata),
        _ => false,
    };
    assert!(effects.iter().any(told));
    assert_eq!(machine.follower(MODEL).unwrap().state().metadata, metadata);
    assert_eq!(machine.applied_epoch(), 5, "no older publisher is followed");
}

#[test]
fn a_version_to_be_staged_is_copied_out_of_the_segment() {
    let (_probe, probe) = probe();
    let (mut machine, _) = joined(&probe);
    let version = Version {
        commit: AnnounceCommit::Together,
        acknowledge: AnnounceAcknowledge::Staged,
        ..Version::of_bytes(2, b"0123456789".to_vec(), 4)
    };
    let (_file, path) = memfd::segment(&filled(1, 2, &version.data)).unwrap();
    let effects = announce(&mut machine, &version, &path, false);
    assert!(
        matches!(sent(&effects)[..], [FromWorker::Fetch(Fetch { version: 2, count: 0, .. })]),
        "only the end"
    );
    let (header, _) = version.end(1);
    let effects = machine.receive(&header, &[], NOW);
    assert!(matches!(sent(&effects)[..], [FromWorker::Staged(staged)] if staged.digest == version.digest()));
    let (header, _) = version.commit_message(1);
    let staged = ready(machine.receive(&header, &[], NOW)).unwrap();
    assert!(matches!(&staged.source, Source::Buffer(buffer) if buffer[..] == version.data[..]));
}

#[test]
fn a_version_that_came_whole_is_not_fetched() {
    let (_probe, probe) = probe();
    let (mut machine, _) = joined(&probe);
    let first = Version::of_bytes(2, b"0123456789".to_vec(), 10);
    let (_file, path) = memfd::segment(&filled(1, 2, &first.data)).unwrap();
    let staged = ready(announce(&mut machine, &first, &path, false)).unwrap();
    machine.taken(MODEL, staged.key);
    machine.applied(MODEL, staged.key, "", None, "", NOW);
    let (header, payloads) = Version::of_bytes(3, b"9876543210".to_vec(), 10).whole(1);
    let payload = PublishedPayload::Bytes(payloads[0].clone());
    let effects = machine.receive_published(&Published { header, payload_count: 1, payload }, NOW);
    assert!(!sent(&effects).iter().any(|message| matches!(message, FromWorker::Fetch(_))));
    assert_eq!(ready(effects).unwrap().key, (1, 3));
}
