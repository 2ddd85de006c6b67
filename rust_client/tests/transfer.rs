//! A transfer whose chunks are received in their place while others arrive beside them.
#![allow(clippy::needless_update)] // in literals of messages, which later fields leave alone

mod publisher;

use publisher::Version;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weightbus::checksum::crc32c;
use weightbus::layout::Layout;
use weightbus::limits::Timing;
use weightbus::messages::Source;
use weightbus::sources::SourceFetch;
use weightbus::staging::Buffers;
use weightbus::transfer::{Payload, Proof, Transfer, Want};

const NOW: Duration = Duration::from_secs(1);
const DATA: &[u8] = b"0123456789";

fn transfer(buffers: &Buffers) -> Transfer {
    let version = Version::of_bytes(1, DATA.to_vec(), 4);
    let layout = Arc::new(Layout::parse(&version.layout).unwrap());
    let buffer = buffers.take(10).unwrap().unwrap();
    Transfer::new(version.announce(1), layout, buffer, "", NOW, Timing::default())
}

fn receive(transfer: &mut Transfer, id: u64, bytes: &[u8]) {
    transfer.unfilled(id).unwrap()[..bytes.len()].copy_from_slice(bytes);
    transfer.received(id, bytes.len());
}

#[test]
fn nobody_else_writes_where_a_chunk_is_being_received() {
    let buffers = Buffers::default();
    let mut t = transfer(&buffers);
    let crc = crc32c(b"4567");
    assert!(t.lease(1, 4, 7, None));
    receive(&mut t, 7, b"45");
    assert!(!t.add(1, Proof::Crc(crc), Payload::Bytes(b"4567"), NOW, false), "it would be written twice");
    assert!(!t.lease(1, 4, 8, None), "it is lent");
    receive(&mut t, 7, b"67");
    assert!(t.add(1, Proof::Crc(crc), Payload::InPlace(7), NOW, true));
    assert!(t.unfilled(7).is_none() && !t.lease(1, 4, 9, None), "what is here is never written again");
    assert!(!t.add(1, Proof::Crc(crc), Payload::Bytes(b"4567"), NOW, true), "it is not new");
    assert_eq!(t.chunks_received(), 1);
    let (buffer, ..) = t.into_parts();
    assert_eq!(&buffer[4..8], b"4567");
}

#[test]
fn a_chunk_that_was_cut_off_or_damaged_is_missing_again() {
    let buffers = Buffers::default();
    let mut t = transfer(&buffers);
    t.pull();
    let all = Want::Chunks { first: 0, count: 3 };
    assert_eq!(t.wants(NOW), [Want::End, all]);
    assert!(t.lease(0, 4, 1, None));
    receive(&mut t, 1, b"01");
    t.cancel(1);
    assert!(t.unfilled(1).is_none());
    assert!(t.lease(2, 2, 2, None));
    receive(&mut t, 2, b"8x");
    assert!(!t.add(2, Proof::Crc(crc32c(b"89")), Payload::InPlace(2), NOW, true));
    let again = [Want::Chunks { first: 0, count: 1 }, Want::Chunks { first: 2, count: 1 }];
    assert_eq!(t.wants(NOW), again);
    for (index, bytes) in DATA.chunks(4).enumerate() {
        assert!(t.add(index as u64, Proof::Crc(crc32c(bytes)), Payload::Bytes(bytes), NOW, false));
    }
    t.end(Version::of_bytes(1, DATA.to_vec(), 4).digest());
    assert!(t.complete() && t.verify());
    let (buffer, ..) = t.into_parts();
    assert_eq!(&buffer[..], DATA);
}

#[test]
fn only_places_that_exist_are_lent() {
    let buffers = Buffers::default();
    let mut t = transfer(&buffers);
    assert!(
        !t.lease(3, 4, 1, None)
            && !t.lease(u64::MAX, 4, 2, None)
            && !t.lease(0, 3, 3, None)
            && !t.lease(2, 4, 4, None)
    );
    assert!(t.lease(0, 4, 5, None) && t.lease(1, 4, 6, None), "a second one takes the place of the first");
    assert!(t.unfilled(5).is_none() && t.unfilled(6).is_some());
    assert!(!t.add(0, Proof::Crc(crc32c(b"0123")), Payload::InPlace(5), NOW, true));
}

#[test]
fn no_more_than_a_window_is_asked_for_and_half_of_it_brings_more() {
    let version = Version::of_bytes(1, vec![0; 40], 1);
    let layout = Arc::new(Layout::parse(&version.layout).unwrap());
    let buffer = Buffers::default().take(40).unwrap().unwrap();
    let mut t = Transfer::new(version.announce(1), layout, buffer, "", NOW, Timing::default());
    t.end(version.digest());
    assert_eq!(t.wants(NOW), [Want::Chunks { first: 0, count: 16 }]);
    for index in 0..8 {
        assert_eq!(t.wants(NOW), []);
        assert!(t.add(index, Proof::Crc(crc32c(&[0])), Payload::Bytes(&[0]), NOW, false));
    }
    assert_eq!(t.wants(NOW), [Want::Chunks { first: 16, count: 8 }]);
}

/// A transfer of ten chunks of a byte each, of which sources have some: first and count of ranges.
fn of_sources(chunks: &[&[u64]]) -> (Transfer, Vec<SourceFetch>) {
    let source = |chunks: &&[u64]| Source { chunks: chunks.to_vec(), ..Default::default() };
    let mut version = Version::of_bytes(1, DATA.to_vec(), 1);
    version.sources = chunks.iter().map(source).collect();
    let layout = Arc::new(Layout::parse(&version.layout).unwrap());
    let buffer = Buffers::default().take(10).unwrap().unwrap();
    let mut t = Transfer::new(version.announce(1), layout, buffer, "", NOW, Timing::default());
    let jobs = t.fetch_from_sources();
    t.end(version.digest());
    (t, jobs)
}

fn add(t: &mut Transfer, index: usize) -> bool {
    let byte = &DATA[index..=index];
    t.add(index as u64, Proof::Crc(crc32c(byte)), Payload::Bytes(byte), NOW, false)
}

fn add_from_source(t: &mut Transfer, job: &SourceFetch, index: usize) -> bool {
    let byte = &DATA[index..=index];
    t.add_from_source(&job.wanted, index as u64, crc32c(byte), byte, NOW)
}

#[test]
fn a_range_beyond_the_version_has_no_effect_and_no_chunk_is_at_two_sources() {
    let (_, jobs) = of_sources(&[&[8, 5, 3], &[2, 2, 8, 1], &[], &[10, 4]]);
    let indexes: Vec<_> = jobs.iter().map(|job| &job.indexes[..]).collect();
    assert_eq!(indexes, [&[8, 9], &[2, 3]]);
}

#[test]
fn sources_that_name_the_same_chunks_again_and_again_take_no_time() {
    const COUNT: usize = 1 << 20;
    let mut version = Version::of_bytes(1, vec![0; COUNT], 1);
    let chunks = [1, COUNT as u64].repeat(2048);
    version.sources = vec![Source { chunks, ..Default::default() }; 4];
    let layout = Arc::new(Layout::parse(&version.layout).unwrap());
    let buffer = Buffers::default().take(COUNT as u64).unwrap().unwrap();
    let mut t = Transfer::new(version.announce(1), layout, buffer, "", NOW, Timing::default());
    let begun = Instant::now();
    assert_eq!(t.fetch_from_sources()[0].indexes.len(), COUNT - 1);
    assert!(begun.elapsed() < Duration::from_secs(5), "2^33 chunks are named");
}

#[test]
fn chunks_that_sources_have_come_from_nowhere_else_until_that_is_over() {
    let (mut t, jobs) = of_sources(&[&[0, 3], &[5, 2]]);
    assert_eq!(t.wants(NOW), [Want::Chunks { first: 3, count: 2 }, Want::Chunks { first: 7, count: 3 }]);
    assert!(!add(&mut t, 1) && !t.lease(1, 1, 1, None), "a source sends it");
    assert!(add_from_source(&mut t, &jobs[0], 1) && !add_from_source(&mut t, &jobs[0], 1));
    assert!(t.source_over(&jobs[0], NOW) && !add_from_source(&mut t, &jobs[0], 0), "it is over");
    assert_eq!(t.wants(NOW), [Want::Chunks { first: 0, count: 1 }, Want::Chunks { first: 2, count: 1 }]);
    assert!(!add(&mut t, 5), "the other source is not over");
    assert!([0, 2, 3, 4, 7, 8, 9].iter().all(|&index| add(&mut t, index)));
    assert!(jobs[1].wanted.upgrade().is_some());
    assert!(add_from_source(&mut t, &jobs[1], 5) && add_from_source(&mut t, &jobs[1], 6));
    assert!(t.complete() && t.verify());
    assert!(jobs[1].wanted.upgrade().is_none() && !t.source_over(&jobs[1], NOW), "nothing is left to do");
    assert_eq!(&t.into_parts().0[..], DATA);
}

#[test]
fn while_only_sources_are_to_send_chunks_the_publisher_is_not_late() {
    let (mut t, jobs) = of_sources(&[&[0, 10]]);
    let long = Timing::default().patience_max;
    assert!((1..100).all(|times| t.wants(NOW + times * long).is_empty()) && !t.hopeless());
    assert!(t.source_over(&jobs[0], NOW + 100 * long));
    assert_eq!(t.wants(NOW + 100 * long), [Want::Chunks { first: 0, count: 10 }]);
    (0..100).for_each(|times| drop(t.wants(NOW + (101 + times) * long)));
    assert!(t.hopeless());
}

#[test]
fn buffers_are_used_again_and_no_more_than_two_at_once() {
    let buffers = Buffers::default();
    let mut one = buffers.take(10).unwrap().unwrap();
    let two = buffers.take(10).unwrap().unwrap();
    assert!(buffers.take(10).unwrap().is_none());
    one[0] = 9;
    drop(one);
    let mut again = buffers.take(10).unwrap().unwrap();
    assert_eq!(again[0], 9, "the memory of the one that was given back");
    again.keep(); // a snapshot now, which no longer counts
    assert!(buffers.take(10).unwrap().is_some());
    drop((two, again, buffers));
}
