//! Whatever workers do, every call to a publisher that blocks is back by its deadline.
//!
//! Late is what goes beyond the deadline, a tenth of it and a quarter of a second, as seen from a thread of this
//! process that sleeps just as long: where a busy host wakes that late, too, it is not the call.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::process::{Child, Command};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use weightbus::messages::{control_topic, data_topic};
use weightbus::{
    Dtype, Encoding, Error, PublishOptions, Publisher, PublisherBuilder, Publishing, Receipt, TensorView,
};

const MODEL: &str = "line";
const DEADLINE: Duration = Duration::from_millis(400);
const CLOSING: Duration = Duration::from_millis(400); // for which what is on its way is waited for at the end
const LONG: Duration = Duration::from_secs(60); // far more than it takes until things are as a test wants them
const LARGE: usize = 2 << 20; // bytes: more than a connection takes that nobody reads
const SMALL: usize = 1 << 14; // computing with it takes no time, however busy a host is

/// What does not wait for anybody else.
const AT_ONCE: [&str; 5] = ["bind", "builder", "address", "data_address", "epoch"];

type Call = fn(&PublishTerms, Publishing);

/// A publisher whose worker says nothing, and what it is asked. A publish is under way that would take far longer.
struct PublishTerms {
    publisher: Publisher,
    bytes: Vec<u8>,
    file: Vec<u8>,
}

/// Every call that blocks, by name, and the deadline that it has. A worker never does what it waits for.
const CALLS: [(&str, Duration, Call); 9] = [
    ("publish", DEADLINE, |asked, _| {
        unachieved(asked.publisher.publish(MODEL, &[tensor(&asked.bytes)], &options()));
    }),
    ("publish", DEADLINE, |asked, _| {
        let delta = PublishOptions { encoding: Encoding::Delta, ..options() };
        unachieved(asked.publisher.publish(MODEL, &[tensor(&asked.bytes)], &delta));
    }),
    ("publish_later", DEADLINE, |asked, _| {
        unachieved(
            asked
                .publisher
                .publish_later(MODEL, &[tensor(&asked.bytes)], &options())
                .and_then(Publishing::wait),
        );
    }),
    ("publish_safetensors", DEADLINE, |asked, _| {
        unachieved(
            asked.publisher.publish_safetensors(MODEL, &asked.file, &options()).and_then(Publishing::wait),
        );
    }),
    ("wait", DEADLINE, |asked, _| {
        let together = PublishOptions { together: true, ..options() };
        let publishing = asked.publisher.publish_later(MODEL, &[tensor(&asked.bytes)], &together).unwrap();
        unachieved(publishing.wait());
    }),
    ("workers", Duration::ZERO, |asked, _| drop(asked.publisher.workers().unwrap())),
    ("wait_for_workers", DEADLINE, |asked, _| {
        assert!(!asked.publisher.wait_for_workers(2, MODEL, DEADLINE).unwrap());
    }),
    ("wait_until", DEADLINE, |asked, _| assert!(!asked.publisher.wait_until(DEADLINE, |_| false).unwrap())),
    ("close", CLOSING, |asked, under_way| {
        asked.publisher.close();
        unachieved(under_way.wait());
    }),
];

fn options() -> PublishOptions {
    PublishOptions { timeout: DEADLINE, expect: Some(1), ..PublishOptions::default() }
}

fn tensor(bytes: &[u8]) -> TensorView<'_> {
    TensorView { name: "w", dtype: Dtype::U8, shape: &[SMALL as u64], bytes }
}

fn unachieved(result: Result<Receipt, Error>) {
    assert!(matches!(result, Err(Error::Publish { .. })), "{:?}", result);
}

/// By how much more than it may a call overran its deadline.
fn late(deadline: Duration, call: impl FnOnce() + Send) -> Option<Duration> {
    let begin = Barrier::new(2);
    thread::scope(|scope| {
        let control = scope.spawn(|| {
            begin.wait();
            let begun = Instant::now();
            thread::sleep(deadline);
            begun.elapsed()
        });
        begin.wait();
        let begun = Instant::now();
        call();
        let took = begun.elapsed();
        took.checked_sub(control.join().unwrap().mul_f64(1.1) + Duration::from_millis(250))
    })
}

/// A worker that says nothing any more, for as long as it is kept: a process, or connections.
#[derive(Default)]
struct Peer {
    process: Option<Child>,
    _sockets: Vec<zmq::Socket>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill().and_then(|()| process.wait());
        }
    }
}

/// One that was stopped in its tracks.
fn stopped(publisher: &Publisher) -> Peer {
    let program = std::env::current_exe().unwrap().parent().unwrap().with_file_name("examples/worker");
    let worker = Command::new(&program).args([publisher.address(), "--name", "w0"]).spawn();
    let worker =
        worker.unwrap_or_else(|error| panic!("{}: {}; cargo build --examples", program.display(), error));
    let peer = Peer { process: Some(worker), _sockets: Vec::new() };
    pushed_to(publisher);
    if let Some(worker) = &peer.process {
        let stat = format!("/proc/{}/stat", worker.id());
        assert!(Command::new("kill").args(["-STOP", &worker.id().to_string()]).status().unwrap().success());
        while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
            thread::yield_now();
        }
    }
    peer
}

/// One whose connections take what comes until they are full, and nobody reads it.
fn black_hole(publisher: &Publisher) -> Peer {
    let context = zmq::Context::new();
    let (control, data) = (context.socket(zmq::DEALER).unwrap(), context.socket(zmq::SUB).unwrap());
    for socket in [&control, &data] {
        socket.set_linger(0).unwrap();
        socket.set_rcvhwm(1).unwrap();
        socket.set_rcvbuf(4096).unwrap();
    }
    data.connect(publisher.data_address()).unwrap();
    for topic in [control_topic(MODEL), data_topic(MODEL)] {
        data.set_subscribe(topic.as_bytes()).unwrap();
    }
    control.connect(publisher.address()).unwrap();
    let hello = format!(
        r#"{{"wbp":1,"type":"hello","name":"w0","instance":"{}","models":{{"{}":null}}}}"#,
        "0".repeat(32),
        MODEL
    );
    control.send(hello.as_bytes(), 0).unwrap();
    control.send(&br#"{"wbp":1,"type":"ping","subscribed":true}"#[..], 0).unwrap();
    pushed_to(publisher);
    Peer { process: None, _sockets: vec![control, data] }
}

fn pushed_to(publisher: &Publisher) {
    let there = publisher.wait_until(LONG, |all| all.get("w0").map_or(false, |worker| worker.pushed));
    assert!(there.unwrap());
}

fn builder() -> PublisherBuilder {
    // Nobody is lost meanwhile, which would end calls early.
    Publisher::builder("tcp://127.0.0.1:0").timing(Duration::from_millis(200), LONG)
}

/// A safetensors file with one tensor.
fn file_of(bytes: &[u8]) -> Vec<u8> {
    let mut layout = String::new();
    write!(layout, r#"{{"w":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, bytes.len()).unwrap();
    layout += &" ".repeat(8 - layout.len() % 8);
    [&(layout.len() as u64).to_le_bytes()[..], layout.as_bytes(), bytes].concat()
}

#[test]
fn every_call_is_back_in_time() {
    let bytes = vec![7; SMALL];
    let file = file_of(&bytes);
    for (name, deadline, call) in CALLS {
        for peer in ["absent", "stopped", "black hole"] {
            let publisher = builder().bind().unwrap();
            let _peer = match peer {
                "absent" => Peer::default(),
                "stopped" => stopped(&publisher),
                _ => black_hole(&publisher),
            };
            let lasting = PublishOptions { timeout: LONG, ..options() };
            let large = TensorView { shape: &[LARGE as u64], bytes: &[7; LARGE], ..tensor(&[]) };
            let under_way = publisher.publish_later(MODEL, &[large], &lasting).unwrap();
            let asked = PublishTerms { publisher, bytes: bytes.clone(), file: file.clone() };
            let over = late(deadline, || call(&asked, under_way));
            assert_eq!(over, None, "{}, with its worker {}", name, peer);
        }
    }
}

#[test]
fn a_deadline_is_kept_while_others_publish_and_wait() {
    let publisher = Arc::new(builder().bind().unwrap());
    let _peer = black_hole(&publisher);
    let bytes = vec![7; SMALL];
    thread::scope(|scope| {
        let calls: Vec<_> = (0..4)
            .map(|_| {
                let publisher = publisher.clone();
                let bytes = &bytes;
                let publish = move || unachieved(publisher.publish(MODEL, &[tensor(bytes)], &options()));
                scope.spawn(move || late(DEADLINE, publish))
            })
            .collect();
        for call in calls {
            assert_eq!(call.join().unwrap(), None);
        }
    });
}

#[test]
fn a_listener_that_publishes_a_patch_does_not_wait_for_its_own_thread() {
    let (sender, took) = channel();
    let place = Arc::new(Mutex::new(None::<Arc<Publisher>>));
    let its = place.clone();
    let publisher = builder().on_worker(move |_| {
        let began = Instant::now();
        let options = PublishOptions { encoding: Encoding::Delta, ..PublishOptions::default() };
        let publisher = its.lock().unwrap();
        let result = publisher.as_ref().unwrap().publish_later(MODEL, &[tensor(&[7; SMALL])], &options);
        let _ = sender.send((began.elapsed(), result.is_ok()));
    });
    let mut there = place.lock().unwrap();
    let publisher = Arc::new(publisher.bind().unwrap());
    *there = Some(publisher.clone());
    drop(there);
    let _peer = black_hole(&publisher);
    let (took, published) = took.recv_timeout(LONG).unwrap();
    assert!(published && took < Duration::from_secs(5), "{:?}", took);
}

#[test]
fn what_is_late_is_found() {
    assert!(late(DEADLINE, || thread::sleep(3 * DEADLINE + Duration::from_millis(250))).is_some());
}

/// Every public function of a publisher, and of a publish under way, is in one of the tables above.
#[test]
fn every_call_has_a_row() {
    let source = include_str!("../src/publisher/mod.rs");
    let mut found = BTreeSet::new();
    for of in ["\nimpl Publishing {", "\nimpl Publisher {"] {
        let body = source.split_once(of).unwrap().1.split_once("\n}\n").unwrap().0;
        let names = body.lines().filter_map(|line| line.strip_prefix("    pub fn ")?.split('(').next());
        found.extend(names);
    }
    let known = CALLS.iter().map(|(name, ..)| *name).chain(AT_ONCE).collect();
    assert_eq!(found, known);
}
