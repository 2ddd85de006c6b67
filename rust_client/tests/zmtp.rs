//! The data channel's bytes: what is done with them, and in which order.

use std::collections::BTreeSet;
use weightbus::zmtp::{Place, Places, Stream};

const GREETING_BYTES: usize = 64;
const READY: &[u8] = b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x04XPUB";

/// Takes note of what a place is asked for, and has none.
#[derive(Default)]
struct Asked(Vec<(Vec<u8>, usize)>);

impl Places for Asked {
    type Ticket = ();

    fn place(&mut self, header: &[u8], size: usize) -> Place<()> {
        self.0.push((header.to_vec(), size));
        Place::NewMemory
    }

    fn unfilled(&mut self, _ticket: ()) -> Option<&mut [u8]> {
        None
    }

    fn received(&mut self, _ticket: (), _count: usize) {}

    fn cancel(&mut self, _ticket: ()) {}
}

fn hello() -> Vec<u8> {
    let mut hello = vec![0; GREETING_BYTES];
    hello[0] = 0xff;
    hello[9] = 0x7f;
    hello[10] = 3;
    hello[12..16].copy_from_slice(b"NULL");
    hello.extend_from_slice(READY);
    hello
}

fn message(header: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut bytes = [b"\x01\x01m\x01", &[header.len() as u8][..], header, b"\x02"].concat();
    bytes.extend_from_slice(&(payload.len() as u64).to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// An announcement and the first chunk of its version can come in one read.
#[test]
fn a_payload_is_given_its_place_after_the_messages_before_it_were_dealt_with() {
    let payload = vec![7; 1 << 16];
    let bytes = [hello(), message(b"announce", b"layout"), message(b"chunk", &payload)].concat();
    let mut rest = &bytes[..];
    let (mut stream, mut places) = (Stream::new(&BTreeSet::new()), Asked::default());

    stream.read(&mut rest, &mut places).unwrap();
    let announced = stream.arrived.pop_front().unwrap();
    assert_eq!(announced.header, b"announce");
    assert!(stream.is_deferred() && places.0.is_empty());

    while !rest.is_empty() {
        stream.read(&mut rest, &mut places).unwrap();
    }
    assert!(!stream.is_deferred());
    assert_eq!(places.0, [(b"chunk".to_vec(), payload.len())]);
    assert_eq!(stream.arrived.pop_front().unwrap().header, b"chunk");
}
