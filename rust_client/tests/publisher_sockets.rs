//! The publisher as its user has it, with workers on real sockets of the loopback.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::io::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::{channel, Receiver};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use weightbus::{
    Dtype, Encoding, Error, Outcome, PublishOptions, Publisher, Receipt, Require, TensorView, Timing, Update,
    Wait, Worker, WorkerEventKind, WorkerState,
};

const MODEL: &str = "policy";
const LONG: Duration = Duration::from_secs(20); // for what takes milliseconds
const PING: Duration = Duration::from_millis(100);

fn publisher() -> Publisher {
    let builder = Publisher::builder("tcp://127.0.0.1:0").timing(PING, 20 * PING);
    builder.chunk_bytes(10_000).bind().unwrap()
}

fn worker(publisher: &Publisher, name: &str) -> Worker {
    worker_at(publisher.address(), name)
}

fn worker_at(address: &str, name: &str) -> Worker {
    let timing = Timing { ping: PING, ..Timing::default() };
    Worker::builder(address).name(name).snapshots(MODEL).timing(timing).connect().unwrap()
}

/// Waits until what is published reaches a worker.
fn pushed(publisher: &Publisher, names: &[&str]) {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let there = publisher
        .wait_until(LONG, move |all| names.iter().all(|n| all.get(n).map_or(false, |its| its.pushed)));
    assert!(there.unwrap());
}

fn publish(publisher: &Publisher, bytes: &[u8], options: &PublishOptions) -> Result<Receipt, Error> {
    let shape = [bytes.len() as u64];
    publisher.publish(MODEL, &[TensorView { name: "w", dtype: Dtype::U8, shape: &shape, bytes }], options)
}

/// Publishes while the workers apply what comes.
fn published(
    publisher: &Publisher,
    workers: &[&Worker],
    bytes: &[u8],
    options: &PublishOptions,
) -> (Result<Receipt, Error>, Vec<Update>) {
    let shape = [bytes.len() as u64];
    let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &shape, bytes };
    let publishing = publisher.publish_later(MODEL, &[tensor], options).unwrap();
    let updates: Vec<Update> = workers.iter().map(|worker| worker.receive(LONG).unwrap().unwrap()).collect();
    for update in &updates {
        assert_eq!(update.snapshot.as_ref().unwrap().bytes("w").unwrap(), bytes);
    }
    (publishing.wait(), updates)
}

#[test]
fn versions_of_all_sizes_reach_all_workers() {
    let publisher = publisher();
    let (a, b) = (worker(&publisher, "a"), worker(&publisher, "b"));
    assert!(publisher.wait_for_workers(2, MODEL, LONG).unwrap());
    pushed(&publisher, &["a", "b"]);
    for (number, nbytes) in (1u64..).zip([2_000_000, 3_000, 3_000, 0, 700_000]) {
        let bytes: Vec<u8> = (0..nbytes).map(|at: u32| (at % 251) as u8 ^ number as u8).collect();
        let (receipt, updates) = published(&publisher, &[&a, &b], &bytes, &PublishOptions::default());
        let receipt = receipt.unwrap();
        assert_eq!((receipt.epoch, receipt.version), (publisher.epoch(), number));
        assert_eq!(receipt.those(Outcome::Applied), ["a", "b"]);
        assert!(updates.iter().all(|update| update.digest == receipt.digest && update.version == number));
    }
    let workers = publisher.workers().unwrap();
    assert_eq!(workers["a"].models[MODEL], Some((publisher.epoch(), 5)));
    assert_eq!(workers["a"].state, WorkerState::Live);
}

#[test]
fn what_has_changed_is_all_that_is_sent_where_that_is_asked_for() {
    let publisher = publisher();
    let worker = worker(&publisher, "w");
    pushed(&publisher, &["w"]);
    let mut bytes = vec![3; 600_000];
    let ways = [Encoding::Delta, Encoding::Delta, Encoding::DeltaFlat, Encoding::Raw, Encoding::Delta];
    for (number, (encoding, patched)) in ways.into_iter().zip([false, true, true, false, false]).enumerate() {
        bytes[1000 * number] = 200;
        let options = PublishOptions { encoding, ..PublishOptions::default() };
        let (receipt, updates) = published(&publisher, &[&worker], &bytes, &options);
        let (receipt, way) = (receipt.unwrap(), if patched { "delta-1" } else { "raw" });
        let its = &receipt.workers["w"];
        assert_eq!((its.encoding, updates[0].encoding, its.patched()), (way, way, patched), "{}", receipt);
        assert_eq!(its.nbytes < 1000, patched, "{}", receipt);
        assert_eq!(receipt.to_string().contains(" by delta-1 ("), patched);
    }
    let builder = Publisher::builder("tcp://127.0.0.1:0").bases(9, 1);
    assert!(matches!(builder.bind(), Err(Error::Setup(text)) if text.contains("1 to 8")));
}

#[test]
fn a_late_worker_gets_the_latest_and_one_that_leaves_is_not_waited_for() {
    let (sender, events) = channel();
    let builder = Publisher::builder("tcp://127.0.0.1:0").timing(PING, 20 * PING);
    let publisher = builder.on_worker(move |event| drop(sender.send(event.clone()))).bind().unwrap();
    assert!(publish(&publisher, b"one", &PublishOptions::default()).unwrap().workers.is_empty());
    publish(&publisher, b"two", &PublishOptions::default()).unwrap();
    let late = worker(&publisher, "late");
    assert_eq!(late.receive(LONG).unwrap().unwrap().version, 2);
    late.close();
    let left = |name: &str| {
        let end = Instant::now() + LONG;
        loop {
            let event = events.recv_timeout(end - Instant::now()).unwrap();
            if event.kind == WorkerEventKind::Left && event.worker == name {
                return;
            }
        }
    };
    left("late");
    assert!(publish(&publisher, b"three", &PublishOptions::default()).unwrap().workers.is_empty());
}

#[test]
fn together_is_applied_by_all_or_by_none() {
    let publisher = publisher();
    let (a, b) = (worker(&publisher, "a"), worker(&publisher, "b"));
    assert!(publisher.wait_for_workers(2, MODEL, LONG).unwrap());
    let together = PublishOptions { together: true, ..PublishOptions::default() };
    let (receipt, _) = published(&publisher, &[&a, &b], &[7; 50_000], &together);
    assert_eq!(receipt.unwrap().those(Outcome::Applied), ["a", "b"]);
    let three =
        PublishOptions { require: Require::AtLeast(3), timeout: Duration::from_millis(300), ..together };
    match publish(&publisher, &[8; 50_000], &three) {
        Err(Error::Publish { receipt, .. }) => assert_eq!(receipt.version, 2),
        other => panic!("{:?}", other),
    }
    let (receipt, updates) = published(&publisher, &[&a, &b], &[9; 50_000], &PublishOptions::default());
    assert_eq!(receipt.unwrap().version, 3);
    assert!(updates.iter().all(|update| update.version == 3));
}

#[test]
fn some_by_name_and_staged() {
    let publisher = publisher();
    let (a, b) = (worker(&publisher, "a"), worker(&publisher, "b"));
    assert!(publisher.wait_for_workers(2, MODEL, LONG).unwrap());
    let for_a = PublishOptions { workers: Some(vec!["a".to_owned()]), ..PublishOptions::default() };
    let (receipt, _) = published(&publisher, &[&a], &[1; 20_000], &for_a);
    assert_eq!(receipt.unwrap().workers.len(), 1);
    let staged = PublishOptions { wait: Wait::Staged, ..PublishOptions::default() };
    let receipt = publish(&publisher, &[2; 20_000], &staged).unwrap(); // nobody applies it yet
    assert_eq!(receipt.those(Outcome::Staged), ["a", "b"]);
    assert_eq!(b.receive(LONG).unwrap().unwrap().version, 2);
    let nobody = PublishOptions { workers: Some(vec!["c".to_owned()]), ..PublishOptions::default() };
    let error = publish(&publisher, &[3; 10], &nobody).unwrap_err();
    assert!(matches!(&error, Error::UnknownWorker(text) if text.contains("known are a, b")), "{}", error);
    assert_eq!(a.receive(LONG).unwrap().unwrap().version, 2);
    b.close(); // it may leave between a look at the workers and the publish
    let until = Instant::now() + LONG;
    while publisher.workers().unwrap().contains_key("b") {
        assert!(Instant::now() < until, "b has not left");
    }
    let both =
        PublishOptions { workers: Some(vec!["a".to_owned(), "b".to_owned()]), ..PublishOptions::default() };
    let (receipt, _) = published(&publisher, &[&a], &[4; 20_000], &both);
    let receipt = receipt.unwrap();
    assert_eq!((receipt.those(Outcome::Applied), receipt.those(Outcome::Left)), (vec!["a"], vec!["b"]));
}

#[test]
fn a_worker_that_applies_nothing_keeps_few_publishes_open() {
    let publisher = publisher();
    let _idle = worker(&publisher, "idle");
    assert!(publisher.wait_for_workers(1, MODEL, LONG).unwrap());
    let options = PublishOptions { timeout: LONG, ..PublishOptions::default() };
    let began = Instant::now();
    let later = |n| {
        publisher
            .publish_later(
                MODEL,
                &[TensorView { name: "w", dtype: Dtype::U8, shape: &[16], bytes: &[n; 16] }],
                &options,
            )
            .unwrap()
    };
    let first = later(0);
    let rest: Vec<_> = (0..256).map(|n| later(n as u8)).collect();
    match first.wait() {
        Err(Error::Publish { receipt, .. }) => assert_eq!(receipt.those(Outcome::Behind), ["idle"]),
        other => panic!("{:?}", other),
    }
    assert!(began.elapsed() < LONG, "it waited for its whole time");
    drop(rest);
}

/// A worker that takes nothing, on a connection of its own that ends without a goodbye once this is dropped.
fn bare(publisher: &Publisher, name: &str) -> zmq::Socket {
    let socket = zmq::Context::new().socket(zmq::DEALER).unwrap();
    socket.set_linger(0).unwrap();
    socket.connect(publisher.address()).unwrap();
    let (instance, models) = ("0".repeat(32), format!("{{\"{}\":null}}", MODEL));
    let hello = format!(
        "{{\"wbp\":1,\"type\":\"hello\",\"name\":\"{}\",\"instance\":\"{}\",\"models\":{}}}",
        name, instance, models
    );
    socket.send(&hello, 0).unwrap();
    socket
}

#[test]
fn whose_connection_ends_is_lost_long_before_it_would_be_of_silence() {
    let publisher = Publisher::builder("tcp://127.0.0.1:0").timing(PING, 1000 * PING).bind().unwrap();
    let living = worker(&publisher, "living");
    let dying = bare(&publisher, "dying");
    assert!(publisher.wait_for_workers(2, MODEL, LONG).unwrap());
    let later = publisher
        .publish_later(
            MODEL,
            &[TensorView { name: "w", dtype: Dtype::U8, shape: &[3], bytes: &[1; 3] }],
            &PublishOptions::default(),
        )
        .unwrap();
    assert_eq!(living.receive(LONG).unwrap().unwrap().version, 1);
    drop(dying);
    let error = later.wait().unwrap_err().to_string();
    assert!(error.contains("dying lost") && error.contains("its connection is closed"), "{}", error);
    let options = PublishOptions { expect: Some(2), timeout: PING, ..PublishOptions::default() };
    let error = publish(&publisher, &[2; 3], &options).unwrap_err().to_string();
    assert!(error.contains("1 of 2 workers are missing (worker dying is lost: its"), "{}", error);
}

#[test]
fn who_dials_again_is_not_lost() {
    let (sender, events) = channel();
    let builder = Publisher::builder("tcp://127.0.0.1:0").timing(5 * PING, 1000 * PING);
    let publisher = builder.on_worker(move |event| drop(sender.send(event.clone()))).bind().unwrap();
    let first = bare(&publisher, "again");
    assert!(publisher.wait_for_workers(1, MODEL, LONG).unwrap());
    drop(first);
    let again = bare(&publisher, "again"); // of the same instance, as it says
    assert!(again.poll(zmq::POLLIN, LONG.as_millis() as i64).unwrap() > 0, "it is welcome");
    let end = Instant::now() + 15 * PING; // longer than it has to dial again
    while Instant::now() < end {
        again.send("{\"wbp\":1,\"type\":\"pong\"}", 0).unwrap();
        thread::sleep(PING);
    }
    assert_eq!(events.try_iter().map(|event| event.kind).collect::<Vec<_>>(), [WorkerEventKind::Joined]);
}

#[test]
fn who_is_missing_is_named_in_time() {
    let publisher = publisher();
    let asleep = worker(&publisher, "asleep");
    assert!(publisher.wait_for_workers(1, MODEL, LONG).unwrap());
    let options = PublishOptions { expect: Some(2), timeout: 3 * PING, ..PublishOptions::default() };
    let error = publish(&publisher, &[1; 100_000], &options).unwrap_err().to_string();
    assert!(error.contains("1 of 2 workers never came") && error.contains("asleep behind"), "{}", error);
    drop(asleep);
    assert!(!publisher.wait_for_workers(5, MODEL, PING).unwrap());
}

#[test]
fn what_makes_no_sense_is_said() {
    let text = |result: Result<Receipt, Error>| result.unwrap_err().to_string();
    let publisher = publisher();
    assert!(text(publisher.publish("a b", &[], &PublishOptions::default())).contains("cannot name a model"));
    let hasty = PublishOptions { timeout: Duration::ZERO, ..PublishOptions::default() };
    assert!(text(publisher.publish("m", &[], &hasty)).contains("timeout"));
    let wrong = TensorView { name: "w", dtype: Dtype::F32, shape: &[2], bytes: &[0; 7] };
    assert!(text(publisher.publish("m", &[wrong], &PublishOptions::default())).contains("\"w\""));
    let taken = Publisher::bind(publisher.address()).unwrap_err().to_string();
    assert!(taken.contains("another process listens there"), "{}", taken);
    let open = Publisher::bind("tcp://0.0.0.0:0").unwrap_err().to_string();
    assert!(open.contains("insecure"), "{}", open);
    assert!(Publisher::builder("tcp://*:0").insecure().bind().is_ok());
    publisher.close();
    let error = text(publisher.publish("m", &[], &PublishOptions::default()));
    assert!(error.contains("close() was called"), "{}", error);
}

#[test]
fn closing_answers_whoever_waits() {
    let publisher = publisher();
    let _asleep = worker(&publisher, "asleep");
    assert!(publisher.wait_for_workers(1, MODEL, LONG).unwrap());
    let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[4], bytes: &[1; 4] };
    let waiting = publisher.publish_later(MODEL, &[tensor], &PublishOptions::default()).unwrap();
    publisher.close();
    assert!(matches!(waiting.wait(), Err(Error::Publish { .. })));
}

#[test]
fn a_successor_comes_after_what_the_folder_has_seen() {
    let folder = std::env::temp_dir().join(format!("weightbus-publisher-{}", std::process::id()));
    let address = format!("ipc://{}/bus", folder.display());
    let ahead = 1 << 42; // a clock that is far ahead
    let first = Publisher::builder(&address).state(&folder).epoch(ahead).bind().unwrap();
    assert!(Publisher::bind(&address).is_err(), "somebody listens there");
    let worker = worker_at(&address, "w");
    assert!(first.wait_for_workers(1, MODEL, LONG).unwrap());
    let (receipt, _) = published(&first, &[&worker], b"first", &PublishOptions::default());
    assert_eq!(receipt.unwrap().epoch, ahead);
    drop(first);
    let second = Publisher::builder(&address).state(&folder).timing(PING, 20 * PING).bind().unwrap();
    assert_eq!(second.epoch(), ahead + 1);
    assert!(second.wait_for_workers(1, MODEL, LONG).unwrap());
    let (receipt, updates) = published(&second, &[&worker], b"second", &PublishOptions::default());
    assert_eq!((updates[0].epoch, receipt.unwrap().version), (ahead + 1, 2));
    drop((second, worker));
    std::fs::remove_dir_all(folder).unwrap();
}

/// A folder of a test's own, empty.
fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("weightbus-{}-{}", name, std::process::id()));
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

#[test]
fn what_is_no_socket_stays_where_it_is() {
    let folder = folder("files");
    let (file, link, free) = (folder.join("file"), folder.join("link"), folder.join("free"));
    fs::write(&file, "notes").unwrap();
    symlink(&file, &link).unwrap();
    for path in [&file, &link, &folder] {
        let address = format!("ipc://{}", path.display());
        let as_data = Publisher::builder(&format!("ipc://{}", free.display())).data(&address).bind();
        for result in [Publisher::bind(&address), as_data] {
            let text = result.unwrap_err().to_string();
            assert!(text.contains(&address) && text.contains("that is not a socket"), "{}", text);
        }
    }
    assert_eq!(fs::read_to_string(&link).unwrap(), "notes");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_socket_that_was_left_behind_is_replaced() {
    let folder = folder("left");
    let path = folder.join("bus");
    for left in ["bus", "bus.data"] {
        drop(UnixListener::bind(folder.join(left)).unwrap());
    }
    let publisher = Publisher::bind(&format!("ipc://{}", path.display())).unwrap();
    let worker = worker(&publisher, "w");
    assert!(publisher.wait_for_workers(1, MODEL, LONG).unwrap());
    drop((publisher, worker));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_listener_that_takes_nobody_is_not_waited_for() {
    let folder = folder("full");
    let path = folder.join("bus");
    let listener = UnixListener::bind(&path).unwrap();
    // SAFETY: the socket is open; this makes its queue as short as can be.
    assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
    let _waiting = UnixStream::connect(&path).unwrap(); // and full
    let (sender, bound) = channel();
    let address = format!("ipc://{}", path.display());
    thread::spawn(move || sender.send(Publisher::bind(&address).map(drop)));
    let text = bound.recv_timeout(LONG).expect("it waits").unwrap_err().to_string();
    assert!(text.contains("another process listens there"), "{}", text);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_listener_may_close_its_publisher() {
    let (sender, closed) = channel();
    let place = Arc::new(Mutex::new(None::<Arc<Publisher>>));
    let its = place.clone();
    let builder = Publisher::builder("tcp://127.0.0.1:0").on_worker(move |_| {
        its.lock().unwrap().as_ref().unwrap().close();
        let _ = sender.send(());
    });
    let mut there = place.lock().unwrap();
    let publisher = Arc::new(builder.bind().unwrap());
    *there = Some(publisher.clone());
    drop(there);
    let _worker = worker(&publisher, "w");
    closed.recv_timeout(LONG).expect("it waits for itself");
    publisher.close(); // which waits for the thread
    assert!(closed.recv().is_err(), "the listener is gone with it");
}

#[test]
fn a_listener_may_close_its_worker() {
    let publisher = publisher();
    let (sender, closed) = channel();
    let place = Arc::new(Mutex::new(None::<Arc<Worker>>));
    let its = place.clone();
    let builder = Worker::builder(publisher.address()).snapshots(MODEL).on_event(move |_| {
        its.lock().unwrap().as_ref().unwrap().close();
        let _ = sender.send(());
    });
    let mut there = place.lock().unwrap();
    let worker = Arc::new(builder.connect().unwrap());
    *there = Some(worker.clone());
    drop(there);
    closed.recv_timeout(LONG).expect("it waits for itself");
    worker.close();
    assert!(closed.recv().is_err(), "the listener is gone with it");
}

#[test]
fn an_epoch_is_not_spent_on_an_address_that_is_taken() {
    let folder = folder("spent");
    let other = publisher();
    let builder = |address: &str| Publisher::builder(address).state(&folder).epoch(1 << 42);
    assert!(builder(other.address()).bind().is_err());
    assert!(builder("tcp://127.0.0.1:0").data(other.data_address()).bind().is_err());
    assert_eq!(builder("tcp://127.0.0.1:0").bind().unwrap().epoch(), 1 << 42);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_trainer_of_the_examples_is_followed() {
    let program = std::env::current_exe().unwrap().parent().unwrap().with_file_name("examples/trainer");
    let folder = std::env::temp_dir().join(format!("weightbus-trainer-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let address = format!("ipc://{}/bus", folder.display());
    let worker = Worker::builder(&address).snapshots("line").connect().unwrap();
    let trainer = std::process::Command::new(&program)
        .arg(&address)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {}; cargo build --example trainer", program.display(), error));
    let mut last = worker.receive(LONG).unwrap().unwrap();
    while last.version < 3 {
        last = worker.receive(LONG).unwrap().unwrap();
    }
    assert!(last.snapshot.unwrap().get::<f32>("offset").unwrap()[0] > 0.5, "it learns");
    assert_eq!(unsafe { libc::kill(trainer.id() as libc::pid_t, libc::SIGTERM) }, 0);
    let done = trainer.wait_with_output().unwrap();
    assert!(done.status.success(), "it says goodbye: {}", done.status);
    let told = String::from_utf8(done.stdout).unwrap();
    let rows: Vec<serde_json::Value> = told.lines().map(|row| serde_json::from_str(row).unwrap()).collect();
    let row = &rows[2];
    assert_eq!((&row["version"], &row["digest"]), (&3.into(), &last.digest.into()));
    assert_eq!(row["workers"].as_object().unwrap().values().collect::<Vec<_>>(), ["applied"]);
    assert_eq!((&row["epoch"], &row["lost"]), (&last.epoch.into(), &serde_json::json!([])));
    assert!(row["loss"].as_f64() < rows[0]["loss"].as_f64(), "{}", told);
    std::fs::remove_dir_all(folder).unwrap();
}

/// What a publisher says of itself and its workers, and so of what somebody has overlooked.
fn noticing() -> (Publisher, Receiver<String>) {
    let (heard, notices) = channel();
    let builder = Publisher::builder("tcp://127.0.0.1:0").timing(PING, 5 * PING).on_worker(move |event| {
        if event.kind == WorkerEventKind::Notice {
            let _ = heard.send(event.text.clone());
        }
    });
    (builder.bind().unwrap(), notices)
}

#[test]
fn what_newcomers_overlook_is_said_in_a_line_and_once() {
    let nobody = PublishOptions { wait: Wait::Nobody, ..PublishOptions::default() };
    let (publisher, notices) = noticing();
    let receipt = publish(&publisher, b"one", &PublishOptions::default()).unwrap();
    assert!(receipt.to_string().ends_with("no worker is connected: it waits for workers"), "{}", receipt);
    let alone = notices.recv_timeout(LONG).unwrap();
    let begins =
        "version 1 of policy was published to no worker: no worker has joined. It waits for those that join; ";
    assert!(alone.starts_with(begins) && alone.ends_with(publisher.address()), "{}", alone);

    // A worker that is never asked to apply, and one whose model is misspelt.
    let idle = worker(&publisher, "idle");
    assert!(publisher.wait_until(LONG, |all| all.contains_key("idle")).unwrap());
    let (said, worker_notices) = channel();
    let timing = Timing { ping: PING, ..Timing::default() };
    let typo = Worker::builder(publisher.address()).name("typo").snapshots("polcy").timing(timing);
    let typo = typo.on_event(move |event| {
        if let weightbus::Event::Notice { text, .. } = event {
            let _ = said.send(text.clone());
        }
    });
    let typo = typo.connect().unwrap();
    assert!(publisher.wait_until(LONG, |all| all.len() == 2).unwrap());
    publish(&publisher, b"two", &nobody).unwrap();
    let mut two = [notices.recv_timeout(LONG).unwrap(), notices.recv_timeout(LONG).unwrap()];
    two.sort();
    assert!(
        two[0].starts_with("worker idle has version 2 of policy, and nothing there applies it: is start()")
    );
    assert_eq!(two[1], "worker typo wants 'polcy', of which nothing is published: is 'policy' meant?");
    assert_eq!(worker_notices.recv_timeout(LONG).unwrap(), two[1], "there, too");

    // The other way round: the trainer misspells.
    typo.close();
    assert!(publisher.wait_until(LONG, |all| !all.contains_key("typo")).unwrap());
    let name = TensorView { name: "w", dtype: Dtype::U8, shape: &[1], bytes: b"x" };
    publisher.publish("polcy_", &[name], &PublishOptions::default()).unwrap();
    let text = notices.recv_timeout(LONG).unwrap();
    assert!(text
        .contains("no worker wants 'polcy_', and those that are there want 'policy' (is 'policy' meant?)"));
    idle.receive(LONG).unwrap();
}
