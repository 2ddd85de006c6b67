//! What a child keeps that was forked while a publisher and a worker were open: nothing that its parent needs.
#![cfg(all(feature = "keys", target_os = "linux"))]

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::io::AsRawFd;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use weightbus::{Dtype, Error, PublishOptions, Publisher, PublisherBuilder, TensorView, Worker};

const LONG: Duration = Duration::from_secs(20); // for what takes milliseconds
const TRAINER: &str = "WEIGHTBUS_TEST_TRAINER"; // where it binds, and keeps its state

/// What is open here, by number.
fn descriptors() -> BTreeMap<i32, PathBuf> {
    let numbers = fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let numbers: Vec<i32> = numbers.collect();
    numbers
        .into_iter()
        .filter_map(|n| Some((n, fs::read_link(format!("/proc/self/fd/{}", n)).ok()?)))
        .collect()
}

fn publish(publisher: &Publisher, worker: &Worker, byte: u8) {
    let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[3], bytes: &[byte; 3] };
    let publishing = publisher.publish_later("m", &[tensor], &PublishOptions::default()).unwrap();
    let update = worker.receive(LONG).unwrap().unwrap();
    assert_eq!(update.snapshot.unwrap().bytes("w").unwrap(), [byte; 3]);
    publishing.wait().unwrap();
}

fn builder(address: &str, state: &Path) -> PublisherBuilder {
    Publisher::builder(address).state(state)
}

/// A program that forks while it publishes; the child lives until its input ends.
#[test]
#[ignore = "the others run it, in a process of its own"]
fn a_trainer() {
    let asked = env::var(TRAINER).expect("where to bind");
    let (address, state) = asked.split_once(' ').unwrap();
    let before = descriptors();
    let publisher = builder(address, Path::new(state)).bind().unwrap();
    let worker = Worker::builder(publisher.address()).name("w").snapshots("m").connect().unwrap();
    assert!(publisher.wait_for_workers(1, "m", LONG).unwrap());
    assert!(publisher.wait_until(LONG, |all| all["w"].pushed).unwrap());
    publish(&publisher, &worker, 1);
    let keyed =
        builder("tcp://127.0.0.1:0", &Path::new(state).join("keyed")).keys(keys(state)).bind().unwrap();
    // libzmq's thread has taken over what was bound once it answers; a moment before, nobody knows whose that is.
    let mut caller = TcpStream::connect(keyed.address().trim_start_matches("tcp://")).unwrap();
    caller.set_read_timeout(Some(LONG)).unwrap();
    caller.read_exact(&mut [0]).unwrap();
    let mut pipe = [0; 2];
    // SAFETY: the kernel writes two numbers.
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    let own = [pipe[0], pipe[1], caller.as_raw_fd()];
    // SAFETY: the child goes on with this thread alone, and what it does here needs no other.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: whoever reads what the parent says is to see its end.
        unsafe { libc::close(1) };
        let well =
            catch_unwind(AssertUnwindSafe(|| in_child(&before, &own, publisher, keyed, worker))).is_ok();
        // SAFETY: it reads one byte of a static, and waits for the end of its input.
        unsafe {
            libc::write(pipe[1], if well { b"+".as_ptr() } else { b"-".as_ptr() }.cast(), 1);
            libc::read(0, [0u8; 1].as_mut_ptr().cast(), 1);
            libc::_exit(0);
        }
    }
    assert!(child > 0);
    // SAFETY: if the child fails, that is the end of what is read.
    unsafe { libc::close(pipe[1]) };
    let mut said = [0u8; 1];
    // SAFETY: the kernel writes one byte.
    assert_eq!(unsafe { libc::read(pipe[0], said.as_mut_ptr().cast(), 1) }, 1);
    assert_eq!(said, *b"+", "what the child found is above");
    publish(&publisher, &worker, 2); // the parent notices nothing
    println!("\nat {} {} {}", publisher.address(), publisher.data_address(), child);
    loop {
        // SAFETY: it waits for a signal, of which one ends it.
        unsafe { libc::pause() };
    }
}

fn in_child(
    before: &BTreeMap<i32, PathBuf>,
    own: &[i32],
    publisher: Publisher,
    keyed: Publisher,
    worker: Worker,
) {
    let kept = |&(number, what): &(&i32, &PathBuf)| {
        !before.contains_key(number) && !own.contains(number) && what != Path::new("/dev/null")
    };
    let inherited = descriptors();
    let kept: Vec<_> = inherited
        .iter()
        .filter(kept)
        .filter(|(_, what)| !what.starts_with("/proc") && !what.ends_with("urandom"))
        .collect();
    assert!(kept.is_empty(), "{:?}", kept);
    let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[1], bytes: &[0] };
    let published = publisher.publish("m", &[tensor], &PublishOptions::default());
    assert!(matches!(published, Err(Error::PublisherClosed { .. })), "{:?}", published);
    assert!(matches!(worker.receive(LONG), Err(Error::Closed { .. })));
    publisher.close();
    drop((publisher, worker, keyed));
    assert!(inherited.len() >= descriptors().len());
    let own = Publisher::bind("tcp://127.0.0.1:0").unwrap(); // it can have what its parent has
    let worker = Worker::builder(own.address()).snapshots("m").connect().unwrap();
    assert!(own.wait_for_workers(1, "m", LONG).unwrap());
    publish(&own, &worker, 3);
}

/// A folder of keys that lets nobody in.
fn keys(state: &str) -> PathBuf {
    let folder = Path::new(state).join("keys");
    fs::create_dir_all(folder.join("allowed")).unwrap();
    let pair = zmq::CurveKeyPair::new().unwrap();
    let (public, secret) =
        (zmq::z85_encode(&pair.public_key).unwrap(), zmq::z85_encode(&pair.secret_key).unwrap());
    let file = folder.join("publisher.json");
    fs::write(&file, format!(r#"{{"public": {:?}, "secret": {:?}}}"#, public, secret)).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    folder
}

struct Trainer(Child, i32);

impl Drop for Trainer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        drop(self.0.stdin.take()); // its child ends
    }
}

fn outlived(address: &str, state: &Path) {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "a_trainer", "--ignored", "--nocapture"]).env("WEIGHTBUS_KEYS", "");
    command
        .env(TRAINER, format!("{} {}", address, state.display()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut trainer = Trainer(command.spawn().unwrap(), 0);
    let lines = BufReader::new(trainer.0.stdout.take().unwrap()).lines();
    let said =
        lines.map(Result::unwrap).find(|line| line.starts_with("at ")).expect("the trainer has failed");
    let words: Vec<&str> = said.split(' ').collect();
    trainer.1 = words[3].parse().unwrap();
    trainer.0.kill().unwrap();
    trainer.0.wait().unwrap();
    // SAFETY: it sends nothing.
    assert_eq!(unsafe { libc::kill(trainer.1, 0) }, 0, "the child lives on");
    let again = builder(words[1], state).data(words[2]).bind().unwrap();
    assert_eq!((again.address(), again.data_address()), (words[1], words[2]));
}

fn folder(name: &str) -> PathBuf {
    let folder = env::temp_dir().join(format!("weightbus-forks-{}-{}", name, std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn a_trainer_can_begin_again_while_its_child_lives() {
    let folder = folder("tcp");
    outlived("tcp://127.0.0.1:0", &folder.join("state"));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_trainer_can_begin_again_at_a_path_while_its_child_lives() {
    let folder = folder("ipc");
    outlived(&format!("ipc://{}/bus", folder.display()), &folder.join("state"));
    fs::remove_dir_all(folder).unwrap();
}
