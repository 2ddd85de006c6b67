//! A worker that takes chunks from sources, on real sockets of the loopback (N1 to N3).
#![allow(clippy::needless_update)] // in literals of messages, which later fields leave alone

mod publisher;

use publisher::{Message, Publisher, Version, MODEL};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use weightbus::messages::{from_worker, FromWorker, Source};
use weightbus::{Event, Timing, Worker};

const LONG: Duration = Duration::from_secs(20); // for what takes milliseconds
const SHORT: Timing = Timing {
    hello_retry: Duration::from_millis(100),
    ping: Duration::from_millis(100),
    lost_after: Duration::from_millis(800),
    deaf_after: Duration::from_secs(30),
    quiet: Duration::from_millis(250),
    patience: Duration::from_secs(1),
    patience_max: Duration::from_secs(16),
    gone_after: Duration::from_secs(2),
    stuck_after: Duration::from_secs(5),
};
const CHUNKS: u64 = 60; // more than three windows

/// What is answered to a message; `None`: the process ends.
type Answer = Box<dyn FnMut(&[u8]) -> Option<Vec<Message>> + Send>;

/// The control socket of a publisher or of a source, in a thread.
struct Serving {
    address: String,
    heard: Arc<Mutex<Vec<FromWorker>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Serving {
    fn start(mut answer: Answer) -> Serving {
        let context = zmq::Context::new();
        let control = context.socket(zmq::ROUTER).unwrap();
        control.set_linger(0).unwrap();
        control.bind("tcp://127.0.0.1:*").unwrap();
        let address = control.get_last_endpoint().unwrap().unwrap();
        let (heard, stop) = (Arc::<Mutex<Vec<_>>>::default(), Arc::<AtomicBool>::default());
        let (listened, stopped) = (heard.clone(), stop.clone());
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                control.poll(zmq::POLLIN, 5).unwrap();
                while let Ok(frames) = control.recv_multipart(zmq::DONTWAIT) {
                    listened.lock().unwrap().push(from_worker(&frames[1], 0).unwrap());
                    let answers = match answer(&frames[1]) {
                        Some(answers) => answers,
                        None => return,
                    };
                    for (header, payloads) in answers {
                        let message = [frames[0].clone(), header].into_iter().chain(payloads);
                        control.send_multipart(message, 0).unwrap();
                    }
                }
            }
        });
        Serving { address, heard, stop, thread: Some(thread) }
    }

    /// The chunks that were requested here, in order.
    fn requested(&self) -> Vec<u64> {
        let heard = self.heard.lock().unwrap();
        let ranges = heard.iter().filter_map(|message| match message {
            FromWorker::Fetch(fetch) => Some(fetch.first..fetch.first + fetch.count),
            _ => None,
        });
        ranges.flatten().collect()
    }

    /// Ends once the worker has said goodbye.
    fn wait_bye(&self) {
        let bye = |message: &FromWorker| matches!(message, FromWorker::Bye(_));
        wait("the goodbye", || self.heard.lock().unwrap().iter().any(bye));
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn version(number: u64) -> Version {
    Version::of_bytes(number, (0..CHUNKS * 100).map(|at| (at % 251) as u8).collect(), 100)
}

/// What a publisher answers that has all of a version.
fn sound(version: Version) -> Answer {
    let mut publisher = Publisher::new(1, "tcp://*:1"); // nothing is pushed
    publisher.latest = Some(version);
    Box::new(move |header| Some(publisher.hear(header)))
}

/// What a source answers whose chunks `change` changes; it counts them.
fn changed(mut change: impl FnMut(usize, Message) -> Option<Message> + Send + 'static) -> Answer {
    let (mut sound, mut count) = (sound(version(1)), 0);
    Box::new(move |header| {
        let mut answers = Vec::new();
        for message in sound(header)? {
            if message.1.is_empty() {
                answers.push(message);
            } else {
                count += 1;
                answers.push(change(count, message)?);
            }
        }
        Some(answers)
    })
}

/// Has a worker take a version of which each source has a third. Returns the requests of its
/// publisher, and what the worker notices.
fn taken(addresses: &[&str]) -> (Vec<u64>, Vec<String>) {
    let mut version = version(1);
    for (at, address) in (1..).zip(addresses) {
        let chunks = (at..CHUNKS).step_by(3).flat_map(|index| [index, 1]).collect();
        version.sources.push(Source { address: (*address).to_owned(), chunks, ..Default::default() });
    }
    let server = Serving::start(sound(version.clone()));
    let notices = Arc::new(Mutex::new(Vec::new()));
    let noticed = notices.clone();
    let worker = Worker::builder(&server.address)
        .name("w")
        .snapshots(MODEL)
        .timing(SHORT)
        .on_event(move |event: &Event| {
            if let Event::Notice { text, .. } = event {
                noticed.lock().unwrap().push(text.clone());
            }
        })
        .connect()
        .unwrap();
    let update = worker.receive(LONG).unwrap().expect("the version comes");
    assert_eq!((update.version, &update.digest), (1, &version.digest()));
    assert_eq!(&update.snapshot.unwrap().get::<u8>("w").unwrap()[..], &version.data[..]);
    worker.close();
    let mut requested = server.requested();
    requested.sort_unstable();
    let texts = notices.lock().unwrap().clone();
    (requested, texts)
}

fn third(at: u64) -> Vec<u64> {
    (at..CHUNKS).step_by(3).collect()
}

#[test]
fn each_chunk_comes_from_the_publisher_that_has_it() {
    let sources = [Serving::start(sound(version(1))), Serving::start(sound(version(1)))];
    let (requested, notices) = taken(&[&sources[0].address, &sources[1].address]);
    assert_eq!((requested, notices), (third(0), vec![]));
    for (at, source) in (1..).zip(&sources) {
        assert_eq!(source.requested(), third(at));
        source.wait_bye();
    }
}

/// One source does as `answer` has it. Returns its requests, those of the publisher, and the notice.
fn with_one(answer: Answer) -> (Vec<u64>, Vec<u64>, String) {
    let (source, other) = (Serving::start(answer), Serving::start(sound(version(1))));
    let (requested, mut notices) = taken(&[&source.address, &other.address]);
    assert_eq!(other.requested(), third(2), "the other source sends its chunks meanwhile");
    assert!(notices.len() < 2, "{:?}", notices);
    (source.requested(), requested, notices.pop().unwrap_or_default())
}

fn and_publisher(lacking: &[u64]) -> Vec<u64> {
    let mut all = [&third(0)[..], lacking].concat();
    all.sort_unstable();
    all
}

#[test]
fn what_a_source_does_not_send_before_it_ends_comes_from_the_publisher() {
    // the second window is requested once half of the first is here
    let ends = changed(|count, message| (count < 17).then_some(message));
    let (requested, others, notice) = with_one(ends);
    assert_eq!(requested, third(1)[..requested.len()]);
    let missing = others.len() - third(0).len();
    assert!((4..=12).contains(&missing), "{} chunks are missing", missing);
    assert!(notice.contains("are lacking: its connection is closed"), "{}", notice);
}

#[test]
fn a_source_that_says_nothing_is_given_up() {
    let (requested, others, notice) = with_one(Box::new(|_| Some(Vec::new())));
    assert_eq!((requested, others), (vec![], and_publisher(&third(1))));
    assert!(notice.contains("it has sent nothing for 0.8 s"), "{}", notice);
}

#[test]
fn a_source_that_answers_pings_alone_is_given_up() {
    let mut sound = sound(version(1));
    let (requested, others, notice) = with_one(Box::new(move |header| {
        let chunks = matches!(from_worker(header, 0), Ok(FromWorker::Fetch(_)));
        if chunks {
            Some(Vec::new())
        } else {
            sound(header)
        }
    }));
    assert_eq!((&requested[..], others), (&third(1)[..16], and_publisher(&third(1))));
    assert!(notice.contains("it does not send what was requested"), "{}", notice);
}

#[test]
fn a_source_of_another_version_or_epoch_is_given_up() {
    let (_, others, notice) = with_one(sound(version(2)));
    assert_eq!(others, and_publisher(&third(1)));
    assert!(notice.contains("it refuses (gone): as the test has it"), "{}", notice);
    let mut later = Publisher::new(2, "tcp://*:1");
    let (requested, _, notice) = with_one(Box::new(move |header| Some(later.hear(header))));
    assert!(requested.is_empty());
    assert!(notice.contains("its epoch is 2, not 1"), "{}", notice);
}

fn damaged((header, mut payloads): Message) -> Message {
    payloads[0][7] ^= 1;
    (header, payloads)
}

#[test]
fn damaged_chunks_are_requested_again_until_there_are_too_many() {
    let few = changed(|count, message| Some(if count <= 3 { damaged(message) } else { message }));
    let (requested, others, notice) = with_one(few);
    assert_eq!((requested.len(), others, notice), (third(1).len() + 3, third(0), String::new()));
    let (_, others, notice) = with_one(changed(|_, message| Some(damaged(message))));
    assert_eq!(others, and_publisher(&third(1)));
    assert!(notice.contains("its chunks are damaged"), "{}", notice);
    let short = changed(|_, (header, _)| Some((header, vec![vec![0; 99]])));
    let (_, _, notice) = with_one(short);
    assert!(notice.contains("its chunks are damaged"), "{}", notice);
}

#[test]
fn without_keys_a_worker_connects_to_no_source_on_another_host() {
    let far = "tcp://192.0.2.1:1"; // in a network for documentation
    let (requested, notices) = taken(&[far, "udp://x"]);
    assert_eq!(requested, (0..CHUNKS).collect::<Vec<_>>());
    assert!(notices[0].contains("it is not on the host of the publisher"), "{:?}", notices);
    assert!(notices[1].contains("not an address to connect to"), "{:?}", notices);
}

/// Waits until something holds.
fn wait(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < end, "{} did not happen", what);
        thread::yield_now();
    }
}

#[test]
fn neither_a_newer_version_nor_a_worker_that_closes_waits_for_a_source() {
    let silent = Serving::start(Box::new(|_| Some(Vec::new())));
    let lent = |number| {
        let (address, chunks) = (silent.address.clone(), vec![0, CHUNKS]);
        Version { sources: vec![Source { address, chunks, ..Default::default() }], ..version(number) }
    };
    let publisher = Arc::new(Mutex::new(Publisher::new(1, "tcp://*:1")));
    publisher.lock().unwrap().latest = Some(lent(1));
    let answers = publisher.clone();
    let server = Serving::start(Box::new(move |header| Some(answers.lock().unwrap().hear(header))));
    let timing = Timing { lost_after: LONG, ..SHORT };
    let worker =
        Worker::builder(&server.address).name("w").snapshots(MODEL).timing(timing).connect().unwrap();
    let hellos = || {
        let heard = silent.heard.lock().unwrap();
        heard.iter().filter(|message| matches!(message, FromWorker::Hello(_))).count()
    };
    wait("a hello", || hellos() > 0);
    publisher.lock().unwrap().latest = Some(version(2));
    let begun = Instant::now();
    assert_eq!(worker.receive(LONG).unwrap().expect("it comes").version, 2);
    silent.wait_bye();
    let before = hellos();
    publisher.lock().unwrap().latest = Some(lent(3));
    wait("another hello", || hellos() > before);
    worker.close();
    assert!(begun.elapsed() < LONG / 2, "it waited for the source");
}
