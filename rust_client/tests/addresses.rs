//! A worker with several control addresses: which one it is with, and when it changes over.

mod publisher;

use publisher::worker::{worker, AnyLayout};
use publisher::{welcome, Message, Version, MODEL};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::mpsc::{channel, Receiver};
use std::sync::Arc;
use std::time::{Duration, Instant};
use weightbus::addresses::Addresses;
use weightbus::effects::Effect;
use weightbus::machine::WorkerMachine;
use weightbus::messages::*;
use weightbus::{
    Builder, Code, Dtype, Error, Event, PublishOptions, Publisher, Require, TensorView, Timing, Worker,
};

const LONG: Duration = Duration::from_secs(20); // for what takes milliseconds
const LOST_AFTER: Duration = Duration::from_secs(1); // of a worker on real sockets
const DATA: &str = "tcp://*:1";

/// A worker's machine with some addresses, and the time.
struct Session {
    machine: WorkerMachine,
    now: Duration,
}

impl Session {
    fn new(addresses: usize) -> Session {
        let mut machine = worker("w", "0".repeat(32), Arc::new(AnyLayout));
        machine.use_addresses(addresses);
        Session { machine, now: Duration::from_secs(100) }
    }

    fn passes(&mut self, seconds: f64) {
        self.now += Duration::from_secs_f64(seconds);
    }

    fn receive(&mut self, (header, payloads): Message) -> Vec<Effect> {
        let payloads: Vec<&[u8]> = payloads.iter().map(|payload| &payload[..]).collect();
        self.machine.receive(&header, &payloads, self.now)
    }

    /// Begins a session of an epoch, as the first version of it is the newest one.
    fn join(&mut self, epoch: u64) -> Vec<Effect> {
        let effects = self.receive(welcome(epoch, DATA, BTreeMap::from([(MODEL.to_owned(), 1)])));
        assert!(self.machine.in_session());
        effects
    }

    fn disconnect(&mut self) -> Option<(usize, f64)> {
        changed(&self.machine.disconnected(self.now))
    }

    /// Ticks until the machine has the first address probed; returns the seconds until then. The
    /// publisher answers every ping.
    fn probed_after(&mut self, most: f64) -> Option<f64> {
        const STEP: f64 = 0.1;
        let steps = (most / STEP).round() as u32;
        for step in 1..=steps {
            self.passes(STEP);
            let pong = Pong { epoch: 1, ..Default::default() };
            self.receive((encode(&FromPublisher::Pong(pong)), Vec::new()));
            if self.machine.tick(self.now).iter().any(|effect| matches!(effect, Effect::Probe)) {
                return Some((f64::from(step) * STEP * 10.0).round() / 10.0);
            }
        }
        None
    }
}

/// The change-over in some effects: the index of the address, and the seconds before it is dialled.
fn changed(effects: &[Effect]) -> Option<(usize, f64)> {
    effects.iter().find_map(|effect| match effect {
        Effect::ChangeOver { to, pause } => Some((*to, pause.as_secs_f64())),
        _ => None,
    })
}

#[test]
fn addresses_are_tried_in_their_order_with_a_pause_after_each_round() {
    let mut session = Session::new(3);
    for _ in 0..2 {
        for expected in [(1, 0.0), (2, 0.0), (0, 0.25)] {
            assert_eq!(session.disconnect(), Some(expected));
        }
    }
    assert_eq!(session.disconnect(), Some((1, 0.0)));
    session.join(1);
    session.passes(1.0);
    for expected in [(2, 0.0), (0, 0.0), (1, 0.0), (2, 0.25)] {
        assert_eq!(session.disconnect(), Some(expected), "a round begins after a session");
    }
    let mut alone = Session::new(1);
    alone.join(1);
    assert!(alone.machine.disconnected(alone.now).is_empty(), "its session may go on");
    assert!(alone.machine.in_session());
}

#[test]
fn sessions_that_end_at_once_are_no_reason_to_spin() {
    let mut session = Session::new(2);
    for expected in [(1, 0.0), (0, 0.25), (1, 0.0), (0, 0.25)] {
        session.join(1);
        assert_eq!(session.disconnect(), Some(expected));
    }
}

#[test]
fn silence_refusals_and_keys_make_it_change_over() {
    let mut session = Session::new(2);
    session.join(1);
    session.passes(5.0);
    let effects = session.machine.tick(session.now);
    assert!(matches!(effects[..], [Effect::Lost, Effect::ChangeOver { to: 1, .. }]), "{:?}", effects);

    assert!(!session.machine.connected(session.now).is_empty(), "it need not wait to say hello here");
    session.passes(5.0);
    let effects = session.machine.tick(session.now);
    assert!(matches!(effects[..], [Effect::ChangeOver { to: 0, .. }]), "no answer: {:?}", effects);

    let refuse = Refuse { code: "limit".to_owned(), ..Default::default() };
    let effects = session.receive((encode(&FromPublisher::Refuse(refuse)), Vec::new()));
    assert!(
        matches!(effects[..], [Effect::Refused { .. }, Effect::ChangeOver { to: 1, .. }]),
        "{:?}",
        effects
    );

    let effects = session.machine.shut_out("why", session.now);
    assert!(
        matches!(effects[..], [Effect::Refused { .. }, Effect::ChangeOver { to: 0, .. }]),
        "{:?}",
        effects
    );
    session.passes(2.0);
    assert!(session.machine.tick(session.now).is_empty(), "no redial is left over");
}

/// The messages in some effects.
fn sent(effects: Vec<Effect>) -> Vec<FromWorker> {
    let message = |effect| if let Effect::Send(message) = effect { Some(message) } else { None };
    effects.into_iter().filter_map(message).collect()
}

#[test]
fn what_has_arrived_is_not_requested_again_from_the_next_publisher() {
    let mut session = Session::new(2);
    session.join(1);
    let version = Version::of_bytes(1, vec![7; 30], 10);
    session.receive(version.announcement(1, true));
    session.receive(version.chunk_message(1, 0));
    assert_eq!(session.disconnect(), Some((1, 0.0)));
    session.passes(1.0);

    let effects = session.join(1);
    let connects = |effect: &Effect| matches!(effect, Effect::Connect { endpoint, .. } if endpoint == DATA);
    assert!(effects.iter().any(connects), "the same text is an endpoint on another host: {:?}", effects);
    let mut effects = effects;
    effects.extend(session.machine.tick(session.now));
    let fetched: Vec<u64> = sent(effects)
        .into_iter()
        .filter_map(|message| if let FromWorker::Fetch(fetch) = message { Some(fetch) } else { None })
        .flat_map(|fetch| fetch.first..fetch.first + fetch.count)
        .collect();
    assert_eq!(fetched, [1, 2]);

    session.receive(version.chunk_message(1, 1));
    session.receive(version.chunk_message(1, 2));
    let effects = session.receive(version.end(1));
    let staged =
        effects.into_iter().find_map(|e| if let Effect::Ready(staged) = e { Some(staged) } else { None });
    let key = staged.expect("the version is whole").key;
    session.machine.taken(MODEL, key);
    session.machine.applied(MODEL, key, &version.digest(), None, "", session.now);
    assert_eq!(session.machine.applied_epoch(), 1);
    let before = session.machine.disconnected(session.now);
    assert!(changed(&before).is_some());
    let effects = session.receive(welcome(0, DATA, BTreeMap::new()));
    let stale = |effect: &Effect| matches!(effect, Effect::Refused { code, .. } if code == "stale-epoch");
    assert!(effects.iter().any(stale) && changed(&effects).is_some(), "{:?}", effects);
    assert!(!session.machine.in_session());
}

#[test]
fn it_returns_to_the_first_address_and_tries_less_often_if_sessions_there_end_soon() {
    let mut session = Session::new(2);
    for expected in [5.0, 10.0, 20.0, 40.0, 60.0, 60.0] {
        assert_eq!(session.disconnect().unwrap().0, 1);
        session.join(1);
        assert_eq!(session.probed_after(100.0), Some(expected));
        assert!(session.machine.probed(false, session.now).is_empty());
        assert_eq!(session.probed_after(100.0), Some(expected), "nobody was there");
        let effects = session.machine.probed(true, session.now);
        let bye = |effect: &Effect| matches!(effect, Effect::Send(FromWorker::Bye(_)));
        assert!(bye(&effects[0]) && changed(&effects) == Some((0, 0.0)), "{:?}", effects);
        assert!(!session.machine.in_session());
    }
    session.join(1);
    assert_eq!(session.probed_after(6.0), None, "the first address is not probed while it is used");
    session.disconnect();
    session.join(1);
    assert_eq!(session.probed_after(100.0), Some(5.0), "the session was long enough");
    session.disconnect();
    assert!(session.machine.probed(true, session.now).is_empty(), "it is there already");
}

#[test]
fn a_worker_that_waits_long_for_its_publisher_looks_seldom_for_the_first_one() {
    for (lost_after, expected) in [(Duration::from_secs(90), Some(90)), (Duration::MAX, None)] {
        let mut addresses = Addresses::new(2, &Timing { lost_after, ..Timing::default() });
        for _ in 0..2 {
            addresses.advance(Duration::ZERO);
            addresses.joined(Duration::ZERO);
            let due = (1..200).find(|&second| addresses.take_probe(Duration::from_secs(second)));
            assert_eq!(due, expected);
            addresses.go_back(Duration::ZERO);
        }
    }
}

// On real sockets.

fn publisher(address: &str, epoch: u64) -> Publisher {
    let end = Instant::now() + LONG; // the last owner of the address may be just closing
    loop {
        match Publisher::builder(address).epoch(epoch).bind() {
            Ok(publisher) => return publisher,
            Err(error) => assert!(Instant::now() < end, "{}", error),
        }
        std::thread::yield_now();
    }
}

fn publish(publisher: &Publisher, byte: u8) {
    let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[1], bytes: &[byte] };
    let options = PublishOptions { require: Require::AtLeast(0), ..PublishOptions::default() };
    publisher.publish(MODEL, &[tensor], &options).unwrap();
}

fn builder(first: &str) -> (Builder, Receiver<Event>) {
    let (told, events) = channel();
    let timing = Timing { lost_after: LOST_AFTER, ..Timing::default() };
    let builder = Worker::builder(first).name("w").snapshots(MODEL).timing(timing);
    (builder.on_event(move |event: &Event| told.send(event.clone()).unwrap_or(())), events)
}

/// An address where nothing listens.
fn nowhere() -> String {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    format!("tcp://127.0.0.1:{}", port)
}

fn received(worker: &Worker) -> (u64, u8) {
    let update = worker.receive(LONG).unwrap().expect("a version in time");
    (update.epoch, update.snapshot.unwrap().bytes("w").unwrap()[0])
}

#[test]
fn versions_come_from_the_next_publisher_and_from_the_first_one_once_it_is_back() {
    let (first, second) = (publisher("tcp://127.0.0.1:0", 1), publisher("tcp://127.0.0.1:0", 2));
    let addresses = [first.address().to_owned(), second.address().to_owned()];
    publish(&first, 1);
    publish(&second, 2);
    let (builder, events) = builder(&addresses[0]);
    let worker = builder.fallback(&addresses[1]).connect().unwrap();
    assert_eq!((received(&worker), worker.address()), ((1, 1), &addresses[0][..]));

    let closed = Instant::now();
    drop(first);
    assert_eq!((received(&worker), worker.address()), ((2, 2), &addresses[1][..]));
    assert!(closed.elapsed() < LOST_AFTER, "{:?}: silence need not show it", closed.elapsed());
    let moved = |event: &Event, [from, to]: [&String; 2]| matches!(event, Event::ChangedOver { from: its, to: next } if its == from && next == to);
    let there = events.iter().find(|event| moved(event, [&addresses[0], &addresses[1]]));
    assert!(there.is_some());

    let first = publisher(&addresses[0], 3);
    publish(&first, 3);
    assert_eq!((received(&worker), worker.address()), ((3, 3), &addresses[0][..]));
    assert!(events.try_iter().any(|event| moved(&event, [&addresses[1], &addresses[0]])));
    let left = second.wait_until(LONG, |all| !all.contains_key("w"));
    assert!(left.unwrap(), "it says goodbye to the second one");
}

#[test]
fn a_refusal_is_an_error_only_if_no_address_takes_the_worker() {
    let (first, second) = (publisher("tcp://127.0.0.1:0", 1), publisher("tcp://127.0.0.1:0", 2));
    let taken = |publisher: &Publisher| {
        let worker = builder(publisher.address()).0.connect().unwrap();
        assert!(publisher.wait_for_workers(1, MODEL, LONG).unwrap());
        worker
    };
    let _one = taken(&first);
    let (alike, events) = builder(&format!("{},{}", first.address(), second.address()));
    let worker = alike.connect().unwrap();
    assert_eq!(worker.wait_joined(LONG).unwrap(), Some(2));
    assert!(events.iter().any(|event| matches!(event, Event::Refused { code: Code::NameTaken, .. })));
    worker.close();

    let dead = nowhere();
    let worker = builder(first.address()).0.fallback(&dead).connect().unwrap();
    let error = worker.receive(LONG).unwrap_err();
    assert!(matches!(&error, Error::Refused { code: Code::NameTaken, .. }), "{}", error);
    let text = error.to_string();
    assert!(text.contains(first.address()) && text.contains(&dead), "{}", text);
}

#[test]
fn a_list_of_addresses_is_checked_at_once() {
    let text = |list: &str| builder(list).0.connect().map(drop).unwrap_err().to_string();
    assert!(text("tcp://127.0.0.1:1,tcp://nowhere").contains("\"tcp://nowhere\""));
    assert!(text("tcp://127.0.0.1:1,tcp://127.0.0.1:1").contains("given twice"));
}
