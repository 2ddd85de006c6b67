//! A publisher's state folder: what it has published is offered by the next, and the disk keeps nobody waiting.

use std::collections::BTreeMap;
use std::env;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};
use weightbus::{
    Dtype, Model, PublishOptions, Publisher, PublisherBuilder, Receipt, Tensor, TensorView, Timing, Update,
    Wait, Worker,
};

const MODEL: &str = "policy";
const LONG: Duration = Duration::from_secs(20); // for what takes milliseconds
const PING: Duration = Duration::from_millis(50);
const NBYTES: usize = 500_000;
const TRAINER: &str = "WEIGHTBUS_TEST_STATE"; // the folder

/// A folder that is removed.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = env::temp_dir().join(format!("weightbus-state-{}-{}", name, std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn builder(&self, address: &str) -> PublisherBuilder {
        Publisher::builder(address).state(&self.0).timing(PING, 4 * PING).chunk_bytes(10_000).keys("")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn worker(publisher: &Publisher) -> Worker {
    let timing = Timing { ping: PING, ..Timing::default() };
    let builder = Worker::builder(publisher.address()).name("w").snapshots(MODEL).timing(timing).keys("");
    builder.connect().unwrap()
}

fn publish(publisher: &Publisher, byte: u8, wait: Wait) -> Receipt {
    let bytes = vec![byte; NBYTES];
    let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[NBYTES as u64], bytes: &bytes };
    publisher.publish(MODEL, &[tensor], &PublishOptions { wait, ..PublishOptions::default() }).unwrap()
}

fn bytes_of(update: &Update) -> Vec<u8> {
    update.snapshot.as_ref().unwrap().bytes("w").unwrap().to_vec()
}

#[test]
fn what_was_published_is_offered_by_the_next_and_whoever_runs_it_takes_its_new_name() {
    let folder = Folder::new("next");
    let first = folder.builder("tcp://127.0.0.1:0").bind().unwrap();
    let runs = worker(&first);
    assert!(first.wait_for_workers(1, MODEL, LONG).unwrap());
    let receipt = publish(&first, 1, Wait::Nobody);
    assert_eq!(bytes_of(&runs.receive(LONG).unwrap().unwrap()), vec![1; NBYTES]);
    assert!(first.wait_until(LONG, |all| all["w"].models[MODEL].is_some()).unwrap());
    let (address, data) = (first.address().to_owned(), first.data_address().to_owned());
    drop(first);
    let second = folder.builder(&address).data(&data).chunk_bytes(7).bind().unwrap();
    assert!(second.epoch() > receipt.epoch);
    let now = Some((second.epoch(), 1));
    assert!(second
        .wait_until(LONG, move |all| all.get("w").map_or(false, |w| w.models[MODEL] == now))
        .unwrap());
    assert!(runs.receive(Duration::ZERO).unwrap().is_none(), "it has it already");
    drop(runs);
    let late = worker(&second);
    let update = late.receive(LONG).unwrap().unwrap();
    assert_eq!((update.epoch, update.version, &update.digest), (second.epoch(), 1, &receipt.digest));
    assert_eq!(bytes_of(&update), vec![1; NBYTES]);
    assert_eq!(publish(&second, 2, Wait::Nobody).version, 2);
}

#[test]
fn what_runs_by_another_name_has_the_words_of_that() {
    let folder = Folder::new("words");
    let first = folder.builder("tcp://127.0.0.1:0").bind().unwrap();
    let mine = Model::new([Tensor::new("w", &[2], vec![0u8; 2])]).unwrap();
    let timing = Timing { ping: PING, ..Timing::default() };
    let builder = Worker::builder(first.address()).name("w").snapshots(MODEL).model("mine", &mine);
    let worker = builder.timing(timing).keys("").connect().unwrap();
    assert!(first.wait_for_workers(1, MODEL, LONG).unwrap());
    let said = |step: &str| BTreeMap::from([("step".to_owned(), step.to_owned())]);
    let state = |model: &str| {
        let its = worker.state().models[model].clone();
        (its.running, its.metadata)
    };
    for model in [MODEL, "mine"] {
        for (step, workers) in [("for all", None), ("for some, and so not kept", Some(vec!["w".to_owned()]))]
        {
            let options = PublishOptions {
                workers,
                wait: Wait::Nobody,
                metadata: said(step),
                ..PublishOptions::default()
            };
            let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[2], bytes: &[1, 2] };
            let receipt = first.publish(model, &[tensor], &options).unwrap();
            assert_eq!(worker.receive(LONG).unwrap().unwrap().metadata, said(step));
            assert_eq!(state(model), (Some((receipt.epoch, receipt.version)), said(step)));
        }
    }
    let (address, data) = (first.address().to_owned(), first.data_address().to_owned());
    drop(first);
    let second = folder.builder(&address).data(&data).bind().unwrap();
    let now = Some((second.epoch(), 1));
    let renamed = move |model: &Option<(u64, u64)>| *model == now;
    assert!(second
        .wait_until(LONG, move |all| all.get("w").map_or(false, |w| w.models.values().all(renamed)))
        .unwrap());
    for model in [MODEL, "mine"] {
        assert_eq!(state(model), (now, said("for all")));
    }
    assert_eq!(worker.snapshot(MODEL).unwrap().metadata, said("for all"));
    assert_eq!((mine.read().version(), mine.read().metadata()), (now, said("for all")));
}

#[test]
fn only_what_is_meant_for_all_is_kept() {
    let folder = Folder::new("all");
    let publisher = folder.builder("tcp://127.0.0.1:0").bind().unwrap();
    let _worker = worker(&publisher);
    assert!(publisher.wait_for_workers(1, MODEL, LONG).unwrap());
    publish(&publisher, 1, Wait::Nobody);
    let options = PublishOptions {
        workers: Some(vec!["w".to_owned()]),
        wait: Wait::Nobody,
        ..PublishOptions::default()
    };
    let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[1], bytes: &[2] };
    publisher.publish(MODEL, &[tensor], &options).unwrap();
    let together =
        PublishOptions { together: true, expect: Some(2), timeout: PING, ..PublishOptions::default() }; // who never come
    publisher.publish(MODEL, &[tensor], &together).unwrap_err();
    drop(publisher);
    let again = folder.builder("tcp://127.0.0.1:0").bind().unwrap();
    assert_eq!(bytes_of(&worker(&again).receive(LONG).unwrap().unwrap()), vec![1; NBYTES]);
}

#[test]
fn a_slow_disk_keeps_nobody_waiting_and_one_that_fails_is_told() {
    let folder = Folder::new("slow");
    let (sender, notices) = channel();
    let builder = folder.builder("tcp://127.0.0.1:0").epoch(5);
    let publisher = builder.on_worker(move |event| drop(sender.send(event.clone()))).bind().unwrap();
    let slow = folder.0.join(format!("{}@5-1.safetensors.partial", MODEL)); // to open it takes until somebody reads
    let path = CString::new(slow.as_os_str().as_bytes()).unwrap();
    // SAFETY: the path ends with a zero.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    let worker = worker(&publisher);
    assert!(publisher.wait_for_workers(1, MODEL, LONG).unwrap());
    publish(&publisher, 1, Wait::Nobody);
    assert!(worker.receive(LONG).unwrap().is_some());
    let begun = Instant::now();
    let mut versions = 1;
    while begun.elapsed() < 8 * PING {
        // twice as long as a worker lives without a sign
        versions += 1;
        let publishing = publish(&publisher, versions, Wait::Nobody);
        assert_eq!(worker.receive(LONG).unwrap().unwrap().version, publishing.version);
    }
    let mut found = Vec::new();
    File::open(&slow).unwrap().read_to_end(&mut found).unwrap(); // the disk moves again; a pipe cannot be synced
    assert!(found.len() > NBYTES);
    let lost = |event: &weightbus::WorkerEvent| event.kind.as_str() == "lost";
    let failed = loop {
        let event = notices.recv_timeout(LONG).unwrap();
        assert!(!lost(&event), "{:?}", event);
        if event.kind.as_str() == "notice" {
            break event.text;
        }
    };
    assert!(failed.contains("could not be written to the state folder"), "{}", failed);
    drop((publisher, worker));
    let again = folder.builder("tcp://127.0.0.1:0").bind().unwrap();
    let update = self::worker(&again).receive(LONG).unwrap().unwrap();
    assert_eq!(bytes_of(&update), vec![versions; NBYTES], "the last is there");
}

/// A program that publishes until it is killed.
#[test]
#[ignore = "the next one runs it, in a process of its own"]
fn a_trainer() {
    let folder = Folder(env::var(TRAINER).expect("a folder").into());
    let publisher = folder.builder("tcp://127.0.0.1:0").bind().unwrap();
    let until = Instant::now() + 3 * LONG;
    for byte in 1.. {
        let name = format!("-{}.safetensors", publish(&publisher, byte, Wait::Nobody).version);
        println!("\npublished {}", byte);
        while !names(&folder.0).iter().any(|file| file.ends_with(&name)) {
            assert!(Instant::now() < until, "the disk is too slow, or nobody kills this");
            thread::yield_now();
        }
    }
}

fn names(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn whoever_is_killed_while_it_writes_leaves_a_whole_version() {
    let folder = Folder::new("killed");
    for round in 1..=8u32 {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "a_trainer", "--ignored", "--nocapture"]).env(TRAINER, &folder.0);
        let mut trainer = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(trainer.stdout.take().unwrap()).lines();
        let mut published = lines.map(Result::unwrap).filter(|line| line.starts_with("published "));
        let last = published.nth(2).expect("it publishes"); // two are on disk, at least by their names
        thread::sleep(Duration::from_micros(u64::from(round * round) * 40)); // the third at some stage
        trainer.kill().unwrap();
        trainer.wait().unwrap();
        let known: u8 = last["published ".len()..].parse().unwrap();
        let publisher = folder.builder("tcp://127.0.0.1:0").bind().unwrap();
        let found = bytes_of(&worker(&publisher).receive(LONG).unwrap().unwrap());
        assert!(found.iter().all(|&byte| byte == found[0]));
        assert!((known - 2..=known + 1).contains(&found[0]), "{} of {}", found[0], known);
        assert!(!names(&folder.0).iter().any(|name| name.contains('@') && name.ends_with(".partial")));
        let versions = names(&folder.0).iter().filter(|name| name.contains('@')).count();
        assert_eq!(versions, 1, "{:?}", names(&folder.0));
    }
}
