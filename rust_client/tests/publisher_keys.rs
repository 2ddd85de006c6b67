//! A publisher with keys as its user has it, with workers and strangers on real sockets.
#![cfg(feature = "keys")]

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use weightbus::messages::{encode, from_publisher, token_of, FromPublisher, FromWorker, Hello};
use weightbus::{
    Code, Dtype, Error, Outcome, PublishOptions, Publisher, PublisherBuilder, Receipt, TensorView, Timing,
    Wait, Worker, WorkerEventKind, WorkerKeys,
};

const MODEL: &str = "policy";
const LONG: Duration = Duration::from_secs(20); // for what takes milliseconds
const PING: Duration = Duration::from_millis(100);
const PLAIN: &[u8] = b"weights that nobody else is to see";

/// A folder of keys, as `weightbus keygen` makes it.
struct Folder {
    path: PathBuf,
    publisher: String,
}

struct Pair {
    public: String,
    secret: String,
}

impl Pair {
    fn new() -> Pair {
        let pair = zmq::CurveKeyPair::new().unwrap();
        let text = |key: &[u8]| zmq::z85_encode(key).unwrap();
        Pair { public: text(&pair.public_key), secret: text(&pair.secret_key) }
    }
}

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("weightbus-keyed-{}-{}", name, std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(path.join("allowed")).unwrap();
        let Pair { public, secret } = Pair::new();
        let file = path.join("publisher.json");
        fs::write(&file, format!(r#"{{"public": {:?}, "secret": {:?}}}"#, public, secret)).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        Folder { path, publisher: public }
    }

    /// A new key that is allowed.
    fn key(&self, name: &str, role: &str) -> WorkerKeys {
        let pair = Pair::new();
        self.allow(name, role, &pair.public);
        self.keys_of(name, &pair)
    }

    fn allow(&self, name: &str, role: &str, public: &str) {
        let json = format!(r#"{{"name": {:?}, "public": {:?}, "role": {:?}}}"#, name, public, role);
        let file = self.path.join("allowed").join(name.replace('*', "+") + ".json");
        let part = self.path.join("part");
        fs::write(&part, json).unwrap();
        fs::rename(part, file).unwrap();
    }

    fn keys_of(&self, name: &str, Pair { public, secret }: &Pair) -> WorkerKeys {
        let json = format!(
            r#"{{"name": {:?}, "public": {:?}, "secret": {:?}, "publisher": {:?}}}"#,
            name, public, secret, self.publisher
        );
        WorkerKeys::from_json(&json).unwrap()
    }

    /// Writes the key file of a worker, and returns its path.
    fn file_of(&self, name: &str, Pair { public, secret }: &Pair) -> String {
        let file = self.path.join(format!("{}.json", name));
        let json = format!(
            r#"{{"name": {:?}, "public": {:?}, "secret": {:?}, "publisher": {:?}}}"#,
            name, public, secret, self.publisher
        );
        fs::write(&file, json).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        file.display().to_string()
    }

    fn revoke(&self, name: &str) {
        fs::remove_file(self.path.join("allowed").join(format!("{}.json", name))).unwrap();
    }

    fn builder(&self) -> PublisherBuilder {
        Publisher::builder("tcp://127.0.0.1:0").timing(PING, 20 * PING).chunk_bytes(10_000).keys(&self.path)
    }

    fn publisher(&self) -> Publisher {
        self.builder().bind().unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn worker(publisher: &Publisher, name: &str, keys: WorkerKeys) -> Worker {
    let timing = Timing { ping: PING, ..Timing::default() };
    let builder = Worker::builder(publisher.address()).name(name).snapshots(MODEL).timing(timing);
    builder.worker_keys(keys).connect().unwrap()
}

fn pushed(publisher: &Publisher, count: usize) {
    let all = publisher.wait_until(LONG, move |all| all.values().filter(|its| its.pushed).count() == count);
    assert!(all.unwrap());
}

/// Publishes while the workers apply what comes.
fn published(publisher: &Publisher, workers: &[&Worker], bytes: &[u8]) -> Receipt {
    let shape = [bytes.len() as u64];
    let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &shape, bytes };
    let publishing = publisher.publish_later(MODEL, &[tensor], &PublishOptions::default()).unwrap();
    for worker in workers {
        let update = worker.receive(LONG).unwrap().unwrap();
        assert_eq!(update.snapshot.unwrap().bytes("w").unwrap(), bytes);
    }
    publishing.wait().unwrap()
}

fn refused(worker: &Worker) -> Code {
    let end = Instant::now() + LONG;
    loop {
        match worker.receive(PING) {
            Err(Error::Refused { code, .. }) => return code,
            other => assert!(Instant::now() < end, "{:?}", other.map(drop)),
        }
    }
}

#[test]
fn versions_of_all_sizes_come_sealed_while_group_keys_change() {
    let folder = Folder::new("sizes");
    let (one, many) = (folder.key("a", "worker"), folder.key("gpu-*", "worker"));
    let publisher = folder.builder().rekey(2 * PING).bind().unwrap();
    let (a, b) = (worker(&publisher, "a", one), worker(&publisher, "gpu-7", many));
    pushed(&publisher, 2);
    let end = Instant::now() + 10 * PING;
    let mut number = 0;
    while Instant::now() < end {
        for nbytes in [200_000, 3_000, 3_000, 0, 70_000] {
            number += 1;
            let bytes: Vec<u8> = (0..nbytes).map(|at: u32| (at % 251) as u8 ^ number as u8).collect();
            let receipt = published(&publisher, &[&a, &b], &bytes);
            assert_eq!((receipt.version, receipt.those(Outcome::Applied).len()), (number, 2));
        }
    }
}

#[test]
fn who_is_not_allowed_comes_in_once_it_is() {
    let folder = Folder::new("later");
    let pair = Pair::new();
    let keys = folder.keys_of("w", &pair);
    let publisher = folder.publisher();
    let worker = worker(&publisher, "w", keys);
    assert_eq!(refused(&worker), Code::Keys);
    assert!(publisher.workers().unwrap().is_empty());
    folder.allow("w", "worker", &pair.public);
    assert!(publisher.wait_for_workers(1, MODEL, LONG).unwrap());
    published(&publisher, &[&worker], PLAIN);
}

#[test]
fn who_is_revoked_runs_on_gets_nothing_more_and_may_come_back() {
    let folder = Folder::new("revoked");
    let pair = Pair::new();
    folder.allow("w", "worker", &pair.public);
    let (keys, others) = (folder.keys_of("w", &pair), folder.key("other", "worker"));
    let publisher = folder.publisher();
    let (w, other) = (worker(&publisher, "w", keys), worker(&publisher, "other", others));
    pushed(&publisher, 2);
    published(&publisher, &[&w, &other], PLAIN);
    folder.revoke("w");
    assert_eq!(refused(&w), Code::Revoked);
    let receipt = published(&publisher, &[&other], b"what it must not see");
    assert_eq!(receipt.workers.len(), 1, "{}", receipt);
    folder.allow("w", "worker", &pair.public);
    let update = loop {
        match w.receive(LONG) {
            Ok(update) => break update.unwrap(),
            Err(Error::Refused { .. }) => {}
            Err(other) => panic!("{}", other),
        }
    };
    assert_eq!(update.version, 2);
    published(&publisher, &[&w, &other], b"and what all see");
}

#[test]
fn each_address_has_a_key_of_its_own() {
    let (one, two) = (Folder::new("first"), Folder::new("next"));
    let pairs = [Pair::new(), Pair::new()];
    // Otherwise both refuse the worker in its first round. The first one has a later epoch, as have
    // publishers that do not start in one millisecond.
    two.allow("w", "worker", &pairs[1].public);
    let second = two.builder().epoch(1).bind().unwrap();
    let first = one.builder().epoch(2).bind().unwrap();
    let list = format!("{},{}", first.address(), second.address());
    let builder = || Worker::builder(&list[..]).name("w").snapshots(MODEL);
    let files = [one.file_of("w", &pairs[0]), two.file_of("w", &pairs[1])];
    let worker = builder().keys(files.join(",")).connect().unwrap();
    assert!(second.wait_for_workers(1, MODEL, LONG).unwrap(), "the first one does not allow its key");
    assert_eq!(worker.address(), second.address());
    published(&second, &[&worker], PLAIN);
    one.allow("w", "worker", &pairs[0].public);
    drop(second);
    assert!(first.wait_for_workers(1, MODEL, LONG).unwrap());

    let three = builder().keys([&files[0][..]; 3].join(",")).connect();
    assert!(three.unwrap_err().to_string().contains("3 keys for 2 addresses"));
    let none = builder().worker_keys_of_each([]).connect();
    assert!(matches!(none, Err(Error::Keys(_))), "it never connects without keys instead");
}

#[test]
fn two_publishers_of_a_process_have_lists_of_their_own() {
    let (one, two) = (Folder::new("one"), Folder::new("two"));
    let pair = Pair::new();
    one.allow("w", "worker", &pair.public);
    let (first, second) = (one.publisher(), two.publisher());
    let there = worker(&first, "w", one.keys_of("w", &pair));
    let not_there = worker(&second, "w", two.keys_of("w", &pair));
    assert!(first.wait_for_workers(1, MODEL, LONG).unwrap());
    assert_eq!(refused(&not_there), Code::Keys);
    published(&first, &[&there], PLAIN);
    drop(first);
    two.allow("w", "worker", &pair.public);
    published(&second, &[], PLAIN);
    assert_eq!(not_there.receive(LONG).map(|update| update.unwrap().version).ok(), Some(1));
}

#[test]
fn one_without_keys_and_one_with_them_do_not_speak() {
    let folder = Folder::new("mixture");
    let keys = folder.key("w", "worker");
    let (keyed, bare) =
        (folder.publisher(), Publisher::builder("tcp://127.0.0.1:0").keys("").bind().unwrap());
    let with = worker(&bare, "w", keys);
    let without = Worker::builder(keyed.address()).keys("").snapshots(MODEL).connect().unwrap();
    assert_eq!((refused(&with), refused(&without)), (Code::Keys, Code::Keys));
    assert!(keyed.workers().unwrap().is_empty() && bare.workers().unwrap().is_empty());
}

#[test]
fn with_keys_other_hosts_may_connect_and_what_makes_no_sense_is_said() {
    let folder = Folder::new("open");
    assert!(Publisher::builder("tcp://0.0.0.0:0").keys(&folder.path).bind().is_ok());
    let error = |builder: PublisherBuilder| builder.bind().unwrap_err();
    assert!(matches!(error(Publisher::builder("tcp://0.0.0.0:0").keys("")), Error::Address { .. }));
    assert!(matches!(error(folder.builder().keys(folder.path.join("none"))), Error::Keys(_)));
    assert!(matches!(error(folder.builder().rekey(Duration::ZERO)), Error::Setup(_)));
    fs::write(folder.path.join("allowed/odd.json"), "{}").unwrap();
    assert!(matches!(error(folder.builder()), Error::Keys(text) if text.contains("odd.json")));
}

#[test]
fn a_folder_that_breaks_later_is_told_of_and_what_was_allowed_stays_so() {
    let folder = Folder::new("breaks");
    let keys = folder.key("w", "worker");
    let (sender, events) = std::sync::mpsc::channel();
    let publisher = folder.builder().on_worker(move |event| drop(sender.send(event.clone()))).bind().unwrap();
    let worker = worker(&publisher, "w", keys);
    pushed(&publisher, 1);
    fs::write(folder.path.join("allowed/odd.json"), "{}").unwrap();
    let told = |what: &str| {
        let end = Instant::now() + LONG;
        while !matches!(events.recv_timeout(end - Instant::now()).unwrap(),
            event if event.kind == WorkerEventKind::Notice && event.text.contains(what))
        {}
    };
    told("odd.json");
    fs::remove_dir_all(folder.path.join("allowed")).unwrap();
    told("cannot be read");
    published(&publisher, &[&worker], PLAIN);
}

// By hand.

const GREETING_BYTES: usize = 64;
const READY: &[u8] = b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x04XPUB\x08Identity\0\0\0\0";
const STRANGER: Duration = Duration::from_secs(2);

/// A connection to the control socket.
fn dealer(publisher: &Publisher, folder: &Folder, pair: &Pair) -> zmq::Socket {
    let socket = zmq::Context::new().socket(zmq::DEALER).unwrap();
    socket.set_linger(0).unwrap();
    socket.set_curve_publickey(pair.public.as_bytes()).unwrap();
    socket.set_curve_secretkey(pair.secret.as_bytes()).unwrap();
    socket.set_curve_serverkey(folder.publisher.as_bytes()).unwrap();
    socket.connect(publisher.address()).unwrap();
    socket
}

/// Says hello, and returns the answer.
fn hello(socket: &zmq::Socket, name: &str) -> FromPublisher {
    let hello = FromWorker::Hello(Hello {
        name: name.to_owned(),
        instance: "0".repeat(32),
        models: Some((MODEL.to_owned(), None)).into_iter().collect(),
        ..Default::default()
    });
    socket.send(encode(&hello), 0).unwrap();
    loop {
        assert_eq!(socket.poll(zmq::POLLIN, LONG.as_millis() as i64), Ok(1));
        let said = from_publisher(&socket.recv_bytes(0).unwrap(), 0).unwrap();
        if matches!(said, FromPublisher::Welcome(_) | FromPublisher::Refuse(_)) {
            return said; // what comes before is of a version, or a ping
        }
    }
}

fn ticket(socket: &zmq::Socket) -> String {
    match hello(socket, "w") {
        FromPublisher::Welcome(welcome) => token_of(&welcome.features, "ticket").to_owned(),
        other => panic!("{:?}", other),
    }
}

/// A data connection on which this was said after the handshake.
fn subscriber(publisher: &Publisher, frames: &[&[u8]]) -> TcpStream {
    let mut connection =
        TcpStream::connect(publisher.data_address().strip_prefix("tcp://").unwrap()).unwrap();
    let mut said = vec![0; GREETING_BYTES];
    (said[0], said[9], said[10]) = (0xff, 0x7f, 3);
    said[12..16].copy_from_slice(b"NULL");
    said.extend_from_slice(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB");
    for frame in frames {
        said.extend_from_slice(&[0, frame.len() as u8]);
        said.extend_from_slice(frame);
    }
    connection.write_all(&said).unwrap();
    connection
}

/// What comes until the publisher hangs up; nothing if it does not in time.
fn all_of(connection: &mut TcpStream) -> Option<Vec<u8>> {
    let (mut all, end) = (Vec::new(), Instant::now() + STRANGER);
    loop {
        let mut bytes = [0; 4096];
        connection.set_read_timeout(Some(end.checked_duration_since(Instant::now())?)).unwrap();
        match connection.read(&mut bytes) {
            Ok(0) => return Some(all),
            Ok(count) => all.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return Some(all),
            Err(_) => return None,
        }
    }
}

/// What comes until some bytes have.
fn until(connection: &mut TcpStream, wanted: &[u8]) -> Vec<u8> {
    connection.set_read_timeout(Some(LONG)).unwrap();
    let (mut all, mut bytes) = (Vec::new(), [0; 4096]);
    while !has(&all, wanted) {
        let count = connection.read(&mut bytes).unwrap();
        assert_ne!(count, 0, "the publisher has hung up");
        all.extend_from_slice(&bytes[..count]);
    }
    all
}

fn has(all: &[u8], wanted: &[u8]) -> bool {
    all.windows(wanted.len()).any(|bytes| bytes == wanted)
}

fn shows(ticket: &str) -> Vec<u8> {
    [b"\x03", ticket.as_bytes()].concat()
}

#[test]
fn a_key_is_for_its_name_and_an_observers_for_no_worker() {
    let folder = Folder::new("names");
    let (pair, eye) = (Pair::new(), Pair::new());
    folder.allow("w", "worker", &pair.public);
    folder.allow("eye", "observer", &eye.public);
    let publisher = folder.publisher();
    let code = |pair: &Pair, name| match hello(&dealer(&publisher, &folder, pair), name) {
        FromPublisher::Refuse(refuse) => refuse.code,
        FromPublisher::Welcome(welcome) => format!("{} key", welcome.keys.len()),
        other => panic!("{:?}", other),
    };
    assert_eq!(code(&eye, "eye"), "not-allowed");
    assert_eq!(code(&pair, "other"), "wrong-name");
    assert_eq!(code(&pair, "w"), "1 key");
    assert_eq!(publisher.workers().unwrap().keys().collect::<Vec<_>>(), ["w"]);
}

#[test]
fn a_stranger_gets_nothing_and_is_hung_up_on() {
    let folder = Folder::new("strangers");
    let pair = Pair::new();
    folder.allow("w", "worker", &pair.public);
    let publisher = folder.publisher();
    let socket = dealer(&publisher, &folder, &pair);
    let (old, good) = (ticket(&socket), ticket(&socket));
    let topic = b"\x01policy/ctl";
    let mut served = subscriber(&publisher, &[&shows(&good), topic]);
    let mut greeted = vec![0; GREETING_BYTES + READY.len()];
    served.read_exact(&mut greeted).unwrap();
    served.read_exact(&mut [0; 2]).unwrap(); // the beacon that is the answer: it is served
    let mut strangers = [
        subscriber(&publisher, &[]),
        subscriber(&publisher, &[topic]),
        subscriber(&publisher, &[&shows(&"0".repeat(32)), topic]),
        subscriber(&publisher, &[&shows(&good), topic]), // it was shown
        subscriber(&publisher, &[&shows(&old), topic]),  // there was another since
        subscriber(&publisher, &[&shows(&good[1..]), topic]),
    ];
    publisher
        .publish(MODEL, &[], &PublishOptions { wait: Wait::Nobody, ..PublishOptions::default() })
        .unwrap();
    for (at, stranger) in strangers.iter_mut().enumerate() {
        let all = all_of(stranger).unwrap_or_else(|| panic!("stranger {} is not hung up on", at));
        assert!([&greeted[..], &greeted[..GREETING_BYTES], &[]].contains(&&all[..]), "{}: {:?}", at, all);
    }
    let mut again = subscriber(&publisher, &[&shows(&ticket(&socket)), topic]);
    assert!(all_of(&mut served).is_some(), "the connection before is not hung up on");
    folder.revoke("w");
    assert!(all_of(&mut again).is_some(), "whose key is revoked is not hung up on");
}

#[test]
fn nobody_reads_along() {
    let folder = Folder::new("along");
    let pair = Pair::new();
    folder.allow("w", "worker", &pair.public);
    let publisher = folder.publisher();
    let socket = dealer(&publisher, &folder, &pair);
    let shown = shows(&ticket(&socket));
    let mut data = subscriber(&publisher, &[&shown, b"\x01policy/dat", b"\x01policy/ctl"]);
    let mut all = until(&mut data, b"sealed_message"); // a beacon: it is heard
    let before = all.len();
    socket.send(r#"{"wbp":1,"type":"ping","subscribed":true}"#, 0).unwrap();
    pushed(&publisher, 1);
    let hasty = PublishOptions { wait: Wait::Nobody, ..PublishOptions::default() };
    let tensor =
        TensorView { name: "secret-name", dtype: Dtype::U8, shape: &[PLAIN.len() as u64], bytes: PLAIN };
    for _ in 0..2 {
        publisher.publish(MODEL, &[tensor], &hasty).unwrap(); // with its layout, and then in one message
    }
    publisher.close();
    all.extend(all_of(&mut data).unwrap());
    assert!(has(&all[before..], b"sealed_message"), "nothing came");
    while socket.poll(zmq::POLLIN, 0) == Ok(1) {
        all.extend(socket.recv_bytes(0).unwrap());
    }
    for plain in [PLAIN, b"secret-name", b"\"announce\"", b"beacon"] {
        assert!(!has(&all, plain));
    }
}
