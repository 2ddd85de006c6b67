//! Whoever says what is of no use to a publisher, or never comes to an end, is hung up on; and workers are served.

#[path = "publisher/dice.rs"]
mod dice;

use dice::Dice;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::io::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use weightbus::{Dtype, PublishOptions, Publisher, TensorView, Worker};

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
    while let Ok(1..) = last.read(&mut [0; 64]).map_err(|error| is_over(&error)) {}
    joined(&publisher);
}

/// What other programs say first, or older or later versions of ZMTP; some of it is followed by junk.
fn greetings() -> Vec<Vec<u8>> {
    let zmtp = |major: u8, minor: u8, mechanism: &[u8]| {
        let mut bytes = vec![0; 64];
        (bytes[0], bytes[8], bytes[9], bytes[10], bytes[11]) = (0xff, 1, 0x7f, major, minor);
        bytes[12..12 + mechanism.len()].copy_from_slice(mechanism);
        bytes
    };
    let ready = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER";
    let mut all: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".to_vec(),
        b"GET /metrics HTTP/1.1\r\nHost: trainer:5555\r\nUser-Agent: Prometheus/2.42.0\r\nAccept: text/plain\r\n\r\n".to_vec(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x06\x04\0\0\0\0\0\0\x03\0\0\0\x64".to_vec(),
        b"SSH-2.0-OpenSSH_9.2\r\n".to_vec(),
        b"*1\r\n$4\r\nPING\r\n".to_vec(),
        [&b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03"[..], &[0x5a; 506]].concat(), // a TLS ClientHello
        b"\x01\0\x03\0{}\0".to_vec(),                 // ZMTP 1: an anonymous peer and a message
        b"\xff\0\0\0\0\0\0\0\x01\x7f\0\x05\0\0\0\x02{}".to_vec(), // ZMTP 1, long
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x05\0\0\0\x02{}".to_vec(), // ZMTP 2: a DEALER, its identity, a message
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x02\x05\0\0\0\x02{}".to_vec(),
    ];
    for mechanism in [&b"NULL"[..], b"PLAIN", b"CURVE", b"NULLX", b"GSSAPI"] {
        for (major, minor) in [(1, 0), (2, 0), (3, 0), (3, 1), (4, 0)] {
            all.push([&zmtp(major, minor, mechanism)[..], ready, b"\0\x02{}\x04\x07\x04PING\0\0"].concat());
        }
    }
    all
}

/// A request of a web page that holds a worker's hello where ZMTP 1 has a message.
fn post() -> Vec<u8> {
    let hello = format!(
        r#"{{"wbp":1,"type":"hello","name":"from-a-web-page","instance":"{}","models":{{"policy":null}},"epoch":0}}"#,
        "0".repeat(32)
    );
    let framed = [&[(hello.len() + 1) as u8, 0], hello.as_bytes()].concat();
    [b"POST / HTTP/1.1\r\nHost: 127.0.0.1:5555\r\n\r\n", &framed[..]].concat()
}

fn stream_to(address: &str) -> File {
    let descriptor: OwnedFd = match address.strip_prefix("ipc://") {
        Some(path) => UnixStream::connect(path).unwrap().into(),
        None => TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap().into(),
    };
    descriptor.into()
}

fn published(publisher: &Publisher, worker: &Worker, value: u8) {
    let bytes = [value; 1000];
    let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[1000], bytes: &bytes };
    let publishing = publisher.publish_later(MODEL, &[tensor], &PublishOptions::default()).unwrap();
    assert_eq!(worker.receive(LONG).unwrap().unwrap().snapshot.unwrap().bytes("w").unwrap(), bytes);
    assert_eq!(publishing.wait().unwrap().workers.len(), 1);
}

#[test]
fn no_first_bytes_of_a_stranger_disturb_a_publisher() {
    let folder = std::env::temp_dir().join(format!("weightbus-strangers-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for address in ["tcp://127.0.0.1:0".to_owned(), format!("ipc://{}", folder.join("s").display())] {
        let mut dice = Dice(7);
        let publisher = Publisher::builder(&address).keys("").bind().unwrap();
        let worker = joined(&publisher);
        let mut firsts = greetings();
        firsts.extend([post(), post()]);
        firsts.extend((0..=255).map(|first| [&[first], &[0x41; 80][..]].concat()));
        for number in 0..400_usize {
            let mut mutated = firsts[number % 40].clone();
            for _ in 0..=dice.roll(4) {
                let at = dice.roll(mutated.len() as u32) as usize;
                mutated[at] ^= 1 << dice.roll(8);
            }
            if dice.hits(50) {
                mutated.truncate(1 + dice.roll(mutated.len() as u32) as usize);
            }
            firsts.push(mutated);
        }
        let mut kept = Vec::new();
        for (number, first) in firsts.iter().enumerate() {
            for address in [publisher.address(), publisher.data_address()] {
                let mut stranger = stream_to(address);
                let _ = stranger.write_all(first); // it may be over before all is sent
                if number % 16 == 0 {
                    kept.push(stranger);
                }
            }
            if number % 64 == 0 {
                published(&publisher, &worker, number as u8);
            }
        }
        published(&publisher, &worker, 1);
        assert_eq!(publisher.workers().unwrap().keys().collect::<Vec<_>>(), ["w"], "nobody else has joined");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_browser_is_hung_up_on_at_once() {
    let publisher = Publisher::bind("tcp://127.0.0.1:0").unwrap();
    let mut browser = stream_to(publisher.address());
    let begun = Instant::now();
    browser.write_all(&post()).unwrap();
    let mut answer = Vec::new();
    let _ = browser.read_to_end(&mut answer); // it may be cut off with a reset
    assert!(begun.elapsed() < Duration::from_secs(1), "before any time is over");
    assert!(answer.is_empty() || answer[0] == 0xff);
}

/// Dials from another address of this host.
fn dial_from(host: u8, port: u16) -> Option<OwnedFd> {
    // SAFETY: zeros are an address of nothing.
    let mut name: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    name.sin_family = libc::AF_INET as libc::sa_family_t;
    let size = std::mem::size_of_val(&name) as libc::socklen_t;
    // SAFETY: it takes no pointer, and what it returns is nobody's yet; the others read one address.
    unsafe {
        let descriptor = libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        assert!(descriptor >= 0);
        let socket = OwnedFd::from_raw_fd(descriptor);
        name.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 1, host]);
        if libc::bind(descriptor, (&name as *const libc::sockaddr_in).cast(), size) != 0 {
            return None;
        }
        (name.sin_addr.s_addr, name.sin_port) = (u32::from_ne_bytes([127, 0, 0, 1]), port.to_be());
        let done = libc::connect(descriptor, (&name as *const libc::sockaddr_in).cast(), size) == 0;
        Some(socket).filter(|_| done)
    }
}

#[test]
fn handshakes_that_nobody_finishes_keep_no_worker_out() {
    let publisher = Publisher::bind("tcp://127.0.0.1:0").unwrap();
    let port: u16 = publisher.address().rsplit(':').next().unwrap().parse().unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let (mut held, mut number) = (VecDeque::new(), 0);
            while !stop.load(Ordering::Relaxed) {
                held.extend(dial_from(number, port));
                number = (number + 1) % 60;
                if held.len() > 300 {
                    held.pop_front();
                }
            }
            held.len()
        });
        for number in 0..10 {
            let begun = Instant::now();
            let worker = Worker::builder(publisher.address()).name(format!("w{}", number)).snapshots(MODEL);
            let worker = worker.keys("").connect().unwrap();
            assert!(publisher.wait_for_workers(1, MODEL, LONG).unwrap());
            let took = begun.elapsed();
            assert!(took < Duration::from_secs(5), "{:?} until it was in", took);
            drop(worker);
            assert!(publisher.wait_until(LONG, |all| all.is_empty()).unwrap());
        }
        stop.store(true, Ordering::Relaxed);
        assert!(flood.join().unwrap() > 0);
    });
}
