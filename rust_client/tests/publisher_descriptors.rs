//! What strangers leave of a publisher's descriptors. (A process of its own: the limit is one for all of its tests.)

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::os::unix::io::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use weightbus::{Dtype, PublishOptions, Publisher, TensorView, Worker};

const MODEL: &str = "policy";
const LONG: Duration = Duration::from_secs(20); // for what takes milliseconds
const SHORT: Duration = Duration::from_millis(50); // in which nothing else is there to be read
const ROOM: RawFd = 80; // descriptors that are left at first
const RESERVED: RawFd = 32;

fn dial(address: &str) -> File {
    let descriptor: OwnedFd = match address.strip_prefix("ipc://") {
        Some(path) => UnixStream::connect(path).unwrap().into(),
        None => TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap().into(),
    };
    descriptor.into()
}

/// Reads all that comes; whether that has an end in time.
fn ends(connection: &File, patience: Duration) -> bool {
    let as_tcp = TcpStream::from(OwnedFd::from(connection.try_clone().unwrap())); // the option is the same for both
    as_tcp.set_read_timeout(Some(patience)).unwrap();
    let mut connection = connection;
    loop {
        match connection.read(&mut [0; 4096]) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            Err(_) => return true,
        }
    }
}

fn limit_to(descriptors: RawFd) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both take one rlimit.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        limit.rlim_cur = descriptors as libc::rlim_t;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
}

#[test]
fn the_last_descriptors_are_kept_from_connections() {
    let folder = std::env::temp_dir().join(format!("weightbus-descriptors-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for address in ["tcp://127.0.0.1:0".to_owned(), format!("ipc://{}", folder.join("s").display())] {
        let publisher = Publisher::bind(&address).unwrap();
        let worker = Worker::builder(publisher.address()).name("w").snapshots(MODEL).connect().unwrap();
        let pushed = |all: &std::collections::BTreeMap<String, weightbus::WorkerStatus>| all["w"].pushed;
        assert!(
            publisher.wait_for_workers(1, MODEL, LONG).unwrap()
                && publisher.wait_until(LONG, pushed).unwrap()
        );
        let limit = File::open("/dev/null").unwrap().as_raw_fd() + ROOM;
        limit_to(limit);
        let mut first = dial(publisher.address());
        assert_eq!(first.read(&mut [0]).unwrap(), 1, "libzmq says something first");
        let mut others = vec![File::open("/dev/null").unwrap()];
        while others.last().unwrap().as_raw_fd() < limit - RESERVED - 1 {
            others.push(File::open("/dev/null").unwrap());
        }
        assert!(ends(&dial(publisher.address()), LONG), "libzmq keeps it");
        assert!(ends(&dial(publisher.data_address()), LONG), "the data socket keeps it");
        assert!(!ends(&first, SHORT), "who was there before is left alone");
        drop(File::open("/dev/null").unwrap()); // as a trainer opens its data
        let bytes = [7; 1000];
        let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[1000], bytes: &bytes };
        let publishing = publisher.publish_later(MODEL, &[tensor], &PublishOptions::default()).unwrap();
        let update = worker.receive(LONG).unwrap().unwrap();
        assert_eq!(update.snapshot.unwrap().bytes("w").unwrap(), bytes);
        publishing.wait().unwrap();
    }
    std::fs::remove_dir_all(folder).unwrap();
}
