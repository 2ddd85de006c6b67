//! Whoever says what is no use to a publisher, or never comes to an end, is hung up on; and workers are served.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;
use weightbus::{Publisher, Worker};

const MODEL: &str = "policy";
const LONG: Duration = Duration::from_secs(20); // for what takes milliseconds
const MORE: u8 = 1; // the flag of a frame that is not the last
const MESSAGES: usize = 10_000;
const MIB: usize = 1 << 20;

/// A DEALER in ZMTP 3.0, without keys.
fn dial(publisher: &Publisher) -> TcpStream {
    let mut stranger = TcpStream::connect(publisher.address().strip_prefix("tcp://").unwrap()).unwrap();
    stranger.set_read_timeout(Some(LONG)).unwrap();
    stranger.set_write_timeout(Some(LONG)).unwrap();
    let mut greeting = [0; 64];
    greeting[..16].copy_from_slice(b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL");
    stranger.write_all(&greeting).unwrap();
    stranger.write_all(b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER").unwrap();
    stranger.read_exact(&mut greeting).unwrap();
    stranger
}

fn joined(publisher: &Publisher) -> Worker {
    let worker = Worker::builder(publisher.address()).name("w").snapshots(MODEL).connect().unwrap();
    assert!(publisher.wait_for_workers(1, MODEL, LONG).unwrap());
    worker
}

fn is_over(error: &std::io::Error) -> bool {
    assert_ne!(error.kind(), ErrorKind::WouldBlock, "neither read nor closed");
    true
}

#[test]
fn who_never_ends_a_message_is_hung_up_on() {
    let publisher = Publisher::bind("tcp://127.0.0.1:0").unwrap();
    let _worker = joined(&publisher);
    let mut stranger = dial(&publisher);
    let frames: Vec<u8> = [&[MORE, 255][..], &[7; 255]].concat().repeat(100);
    let mut sent = 0;
    while stranger.write_all(&frames).map_err(|error| is_over(&error)).is_ok() {
        sent += frames.len();
        assert!(sent < 64 * MIB, "all of that is kept");
    }
    assert!(publisher.workers().unwrap()["w"].models.contains_key(MODEL));
}

#[test]
fn who_says_what_is_of_no_use_is_hung_up_on_after_a_while() {
    let publisher = Publisher::bind("tcp://127.0.0.1:0").unwrap();
    let _worker = joined(&publisher);
    let mut stranger = dial(&publisher);
    let _ = stranger.write_all(&b"\0\x02{}".repeat(MESSAGES)); // it may be over before all is sent
    let mut answers = 0;
    let mut answer = [0; 4096];
    while let Ok(count @ 1..) = stranger.read(&mut answer).map_err(|error| is_over(&error)) {
        answers += count;
    }
    assert!(answers > 0, "at first it is told what is wrong");
    assert!(answers < 100 * MESSAGES, "each was answered");
    assert!(publisher.workers().unwrap()["w"].models.contains_key(MODEL));
}

#[test]
fn of_a_crowd_that_says_nothing_a_few_are_taken_and_whoever_works_comes_in() {
    let publisher = Publisher::bind("tcp://127.0.0.1:0").unwrap();
    let address = publisher.address().strip_prefix("tcp://").unwrap();
    let mut crowd: Vec<_> = (0..64).map(|_| TcpStream::connect(address).unwrap()).collect();
    let last = crowd.last_mut().unwrap();
    last.set_read_timeout(Some(LONG)).unwrap();
    while let Ok(1..) = last.read(&mut [0; 64]).map_err(|error| is_over(&error)) {} // libzmq has a word for each
    joined(&publisher);
}
