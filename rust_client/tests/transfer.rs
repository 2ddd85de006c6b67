//! A transfer whose chunks are received in their place while others arrive beside them.

mod publisher;

use publisher::Version;
use std::sync::Arc;
use std::time::Duration;
use weightbus::checksum::crc32c;
use weightbus::layout::Layout;
use weightbus::limits::Timing;
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
    assert!(t.lend(1, 4, 7, None));
    receive(&mut t, 7, b"45");
    assert!(!t.add(1, Proof::Crc(crc), Payload::Bytes(b"4567"), NOW, false), "it would be written twice");
    assert!(!t.lend(1, 4, 8, None), "it is lent");
    receive(&mut t, 7, b"67");
    assert!(t.add(1, Proof::Crc(crc), Payload::InPlace(7), NOW, true));
    assert!(t.unfilled(7).is_none() && !t.lend(1, 4, 9, None), "what is here is never written again");
    assert!(!t.add(1, Proof::Crc(crc), Payload::Bytes(b"4567"), NOW, true), "it is not new");
    assert_eq!(t.here(), 1);
    let (buffer, ..) = t.whole();
    assert_eq!(&buffer[4..8], b"4567");
}

#[test]
fn a_chunk_that_was_cut_off_or_damaged_is_missing_again() {
    let buffers = Buffers::default();
    let mut t = transfer(&buffers);
    t.pull();
    let all = Want::Chunks { first: 0, count: 3 };
    assert_eq!(t.wants(NOW), [Want::End, all]);
    assert!(t.lend(0, 4, 1, None));
    receive(&mut t, 1, b"01");
    t.cancel(1);
    assert!(t.unfilled(1).is_none());
    assert!(t.lend(2, 2, 2, None));
    receive(&mut t, 2, b"8x");
    assert!(!t.add(2, Proof::Crc(crc32c(b"89")), Payload::InPlace(2), NOW, true));
    let again = [Want::Chunks { first: 0, count: 1 }, Want::Chunks { first: 2, count: 1 }];
    assert_eq!(t.wants(NOW), again);
    for (index, bytes) in DATA.chunks(4).enumerate() {
        assert!(t.add(index as u64, Proof::Crc(crc32c(bytes)), Payload::Bytes(bytes), NOW, false));
    }
    t.end(Version::of_bytes(1, DATA.to_vec(), 4).digest());
    assert!(t.complete() && t.verify());
    let (buffer, ..) = t.whole();
    assert_eq!(&buffer[..], DATA);
}

#[test]
fn only_places_that_exist_are_lent() {
    let buffers = Buffers::default();
    let mut t = transfer(&buffers);
    assert!(
        !t.lend(3, 4, 1, None)
            && !t.lend(u64::MAX, 4, 2, None)
            && !t.lend(0, 3, 3, None)
            && !t.lend(2, 4, 4, None)
    );
    assert!(t.lend(0, 4, 5, None) && t.lend(1, 4, 6, None), "a second one takes the place of the first");
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
