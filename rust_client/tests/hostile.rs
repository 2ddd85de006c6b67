//! A worker without keys, and publishers that mean it no good: what they make it take, where they send it, what they
//! have people read.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{channel, Receiver};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use weightbus::layout::Layout;
use weightbus::messages::{encode, from_worker, FromPublisher, FromWorker, Refuse};
use weightbus::{Builder, Code, Error, Event, Worker};

const MODEL: &str = "policy";
const LONG: Duration = Duration::from_secs(20); // for what takes milliseconds
const MORE: u8 = 1;
const LARGE: u8 = 2;
const COMMAND: u8 = 4;
const MIB: usize = 1 << 20;

fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    (listener, address)
}

/// A connection that a worker has made, after the handshake.
struct Line(TcpStream);

impl Line {
    fn accept(listener: &TcpListener, kind: &[u8]) -> Line {
        let mut line = Line(listener.accept().unwrap().0);
        line.0.set_read_timeout(Some(LONG)).unwrap();
        line.0.set_write_timeout(Some(LONG)).unwrap();
        let mut greeting = [0; 64];
        greeting[..16].copy_from_slice(b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL");
        line.0.write_all(&greeting).unwrap();
        let size = [0, 0, 0, kind.len() as u8];
        line.frame(COMMAND, &[b"\x05READY\x0bSocket-Type", &size[..], kind].concat()).unwrap();
        line.0.read_exact(&mut greeting).unwrap();
        assert!(line.next().1.starts_with(b"\x05READY"));
        line
    }

    fn frame(&mut self, flags: u8, body: &[u8]) -> std::io::Result<()> {
        let mut head = vec![flags | LARGE];
        head.extend_from_slice(&(body.len() as u64).to_be_bytes());
        self.0.write_all(&head)?;
        self.0.write_all(body)
    }

    fn next(&mut self) -> (u8, Vec<u8>) {
        let mut head = [0; 2];
        self.0.read_exact(&mut head).unwrap();
        let mut size = usize::from(head[1]);
        if head[0] & LARGE != 0 {
            let mut rest = [0; 7];
            self.0.read_exact(&mut rest).unwrap();
            size = rest.iter().fold(size, |size, &byte| size << 8 | usize::from(byte));
        }
        let mut body = vec![0; size];
        self.0.read_exact(&mut body).unwrap();
        (head[0], body)
    }

    /// Waits until the worker says something.
    fn until<T>(&mut self, wanted: impl Fn(FromWorker) -> Option<T>) -> T {
        let end = Instant::now() + LONG;
        loop {
            assert!(Instant::now() < end, "it is never said");
            let (flags, body) = self.next();
            if flags & COMMAND == 0 {
                if let Some(found) = from_worker(&body, 0).ok().and_then(&wanted) {
                    return found;
                }
            }
        }
    }

    fn hello(&mut self) {
        self.until(|said| matches!(said, FromWorker::Hello(_)).then_some(()));
    }

    fn say(&mut self, message: &FromPublisher) {
        self.frame(0, &encode(message)).unwrap();
    }

    fn welcome(&mut self, data: &str) {
        self.hello();
        let welcome = format!(
            r#"{{"wbp":1,"type":"welcome","epoch":7,"data":{:?},"ping_ms":1000,"lost_ms":5000,"models":{{}}}}"#,
            data
        );
        self.frame(0, welcome.as_bytes()).unwrap();
    }

    /// Sends the same again and again until the worker has hung up; returns how much that was.
    fn flood(&mut self, bytes: &[u8], most: usize) -> usize {
        let mut sent = 0;
        while let Ok(()) = self.0.write_all(bytes).map_err(|error| {
            assert_ne!(error.kind(), ErrorKind::WouldBlock, "neither read nor closed");
        }) {
            sent += bytes.len();
            assert!(sent < most, "all of that is taken");
        }
        sent
    }
}

/// Held by those tests that look at the memory of this process, which is one for all of them.
static MEMORY: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory of this process that is in use.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn worker(address: &str, build: impl FnOnce(Builder) -> Builder) -> (Worker, Receiver<Event>) {
    let (sender, events) = channel();
    let builder = Worker::builder(address).name("w").keys("").snapshots(MODEL);
    let builder = builder.on_event(move |event| drop(sender.send(event.clone())));
    (build(builder).connect().unwrap(), events)
}

#[test]
fn a_message_that_never_ends_is_not_collected() {
    let _alone = alone();
    let (listener, address) = listener();
    let (_worker, _events) = worker(&address, |builder| builder.bytes_max(1_000_000));
    let mut frame = vec![MORE | LARGE, 0, 0, 0, 0, 0, 0x0f, 0, 0];
    frame.resize(9 + 0x0f_0000, 7);
    let before = resident();
    for flood in [frame, [&[MORE, 255][..], &[7; 255]].concat().repeat(100), [MORE, 0].repeat(10_000)] {
        let mut line = Line::accept(&listener, b"ROUTER");
        line.hello();
        line.flood(&flood, 64 * MIB);
    }
    let taken = resident().saturating_sub(before);
    assert!(taken < 32 * MIB, "{} bytes are taken", taken);
}

#[test]
fn payloads_that_are_larger_than_any_of_use_take_no_memory() {
    let _alone = alone();
    let (listener, address) = listener();
    let (_worker, _events) = worker(&address, |builder| builder.bytes_max(1_000_000));
    let mut line = Line::accept(&listener, b"ROUTER");
    line.welcome("tcp://*:9");
    let before = resident();
    let payload = vec![b' '; 50 * MIB];
    let mut most = 0;
    for _ in 0..4 {
        line.frame(
            MORE,
            br#"{"wbp":1,"type":"chunk","model":"policy","epoch":7,"version":1,"index":0,"crc":1}"#,
        )
        .unwrap();
        line.frame(0, &payload).unwrap();
        most = most.max(resident().saturating_sub(before));
    }
    line.frame(0, br#"{"wbp":1,"type":"ping","token":5}"#).unwrap();
    line.until(|said| matches!(said, FromWorker::Pong(_)).then_some(()));
    assert!(most < 32 * MIB + payload.len(), "{} bytes are taken", most); // with the payload itself
}

/// The announcement of a version without bytes.
fn announce(layout: &[u8], id: &str) -> Vec<u8> {
    let header = format!(
        r#"{{"wbp":1,"type":"announce","model":"{}","epoch":7,"version":1,"layout":"{}","layout_bytes":{},"nbytes":0,"chunk_bytes":1,"commit":"auto","acknowledge":"applied","encoding":"raw"}}"#,
        MODEL,
        id,
        layout.len()
    );
    header.into_bytes()
}

/// The end of it: what no chunks hash to is what the digest of nothing is over.
fn end(id: &str) -> Vec<u8> {
    let digest = weightbus::digest::digest(id, 1, &[]);
    format!(r#"{{"wbp":1,"type":"end","model":"{}","epoch":7,"version":1,"digest":"{}"}}"#, MODEL, digest)
        .into_bytes()
}

/// A layout of so many tensors without elements.
fn layout(tensors: usize) -> (Vec<u8>, String) {
    let entries: Vec<String> = (0..tensors)
        .map(|number| format!(r#""t{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#, number))
        .collect();
    let json = format!("{{{}}}", entries.join(","));
    let header = [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat();
    let id = Layout::parse(&header).unwrap().id;
    (header, id)
}

#[test]
fn a_layout_out_of_proportion_to_its_data_is_too_large_and_not_asked_for_again() {
    let _alone = alone();
    let (listener, address) = listener();
    for (tensors, bytes_max) in [(30_000, 1 << 36), (100, 1_000), (30_000, 1_000)] {
        let (header, id) = layout(tensors);
        let (worker, _events) = worker(&address, |builder| builder.bytes_max(bytes_max));
        let mut line = Line::accept(&listener, b"ROUTER");
        line.welcome("tcp://*:9");
        line.frame(MORE, &announce(&header, &id)).unwrap();
        line.frame(0, &header).unwrap();
        if tensors == 100 {
            line.frame(0, &end(&id)).unwrap();
            assert_eq!(worker.receive(LONG).unwrap().unwrap().version, 1, "a small one is free");
            continue;
        }
        let (code, text) = line.until(|said| match said {
            FromWorker::Failed(failed) => Some((failed.code, failed.text)),
            FromWorker::Fetch(fetch) => panic!("{:?} is asked for", fetch),
            _ => None,
        });
        assert_eq!(code, "too-large", "{}", text);
        assert!(matches!(worker.receive(LONG), Err(Error::Rejected { code: Code::TooLarge, .. })));
        line.frame(0, &announce(&header, &id)).unwrap();
        line.frame(0, br#"{"wbp":1,"type":"ping","token":5}"#).unwrap();
        line.until(|said| match said {
            FromWorker::Pong(_) => Some(()),
            FromWorker::Fetch(fetch) => panic!("{:?} is asked for", fetch),
            _ => None,
        });
    }
}

#[test]
fn a_welcome_sends_a_worker_nowhere_but_where_its_user_does() {
    let path = std::env::temp_dir().join(format!("weightbus-elsewhere-{}", std::process::id()));
    let elsewhere = UnixListener::bind(&path).unwrap();
    elsewhere.set_nonblocking(true).unwrap();
    let (listener, address) = listener();
    let told = format!("ipc://{}", path.display());
    let (first, events) = worker(&address, |builder| builder);
    Line::accept(&listener, b"ROUTER").welcome(&told);
    let said = |event: Event| match event {
        Event::Notice { code, text } => Some((code.as_str().to_owned(), text)),
        _ => None,
    };
    let (code, text) = loop {
        if let Some(found) = said(events.recv_timeout(LONG).unwrap()) {
            break found;
        }
    };
    assert_eq!(code, "data-address");
    assert!(text.contains("any_data_host") && text.contains("all is fetched"), "{}", text);
    assert_eq!(elsewhere.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    drop(first);
    let (_second, _events) = worker(&address, |builder| builder.any_data_host(true));
    Line::accept(&listener, b"ROUTER").welcome(&told);
    elsewhere.set_nonblocking(false).unwrap();
    elsewhere.accept().unwrap();
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn pings_whose_answers_nobody_reads_end_either_connection() {
    let _alone = alone();
    let ping = [&[COMMAND, 9][..], b"\x04PING\0\0xx"].concat();
    let (data, data_address) = listener();
    let (control, address) = listener();
    let (_worker, _events) = worker(&address, |builder| builder);
    let mut line = Line::accept(&control, b"ROUTER");
    line.welcome(&data_address.replace("127.0.0.1", "*"));
    let mut published = Line::accept(&data, b"XPUB");
    let before = resident();
    published.flood(&ping.repeat(1000), 64 * MIB);
    line.flood(&ping.repeat(1000), 64 * MIB);
    assert!(resident().saturating_sub(before) < 32 * MIB);
}

#[test]
fn words_of_a_publisher_move_no_cursor() {
    let (listener, address) = listener();
    let (worker, events) = worker(&address, |builder| builder);
    let mut line = Line::accept(&listener, b"ROUTER");
    line.hello();
    let text = "no\r\nFAKE LINE \u{1b}[31m\u{202e}kcab".to_owned();
    let refuse = |code: &str| Refuse { code: code.to_owned(), text: text.clone(), ..Default::default() };
    line.say(&FromPublisher::Refuse(refuse("odd")));
    line.say(&FromPublisher::Refuse(refuse("name-taken")));
    let error = worker.receive(LONG).unwrap_err().to_string();
    let shown = "no\\r\\nFAKE LINE \\u{1b}[31m\\u{202e}kcab";
    assert!(error.contains(shown) && !error.contains(char::is_control), "{:?}", error);
    for event in events.try_iter() {
        if let Event::Refused { text, .. } | Event::Notice { text, .. } = event {
            assert_eq!(text, shown);
        }
    }
}
