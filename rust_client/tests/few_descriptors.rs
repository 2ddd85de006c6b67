//! A process with hardly any descriptors left: an error says so, and libzmq ends nothing. (A process of its own: the limit
//! is one for all of its tests.)

use std::fs::File;
use std::time::{Duration, Instant};
use weightbus::{Publisher, Worker};

const MOST: libc::rlim_t = 128;
const NEEDED: usize = 24;

/// Takes all descriptors that are left, but for so many.
fn leave(count: usize, held: &mut Vec<File>) {
    while let Ok(file) = File::open("/dev/null") {
        held.push(file);
    }
    held.truncate(held.len() - count);
}

/// Waits until so many descriptors are left: a thread of libzmq closes those of a worker that was dropped.
fn until_left(count: usize) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while (0..count).map_while(|_| File::open("/dev/null").ok()).collect::<Vec<_>>().len() < count {
        assert!(Instant::now() < deadline, "the dropped worker still has descriptors");
        std::thread::yield_now();
    }
}

#[test]
fn what_lacks_descriptors_is_not_made_and_says_so() {
    // SAFETY: both take one rlimit.
    unsafe {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        limit.rlim_cur = MOST;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
    let mut held = Vec::new();
    for left in 0..NEEDED {
        leave(left, &mut held);
        let worker = Worker::builder("tcp://127.0.0.1:9").snapshots("m").connect().map(drop);
        let publisher = Publisher::bind("tcp://127.0.0.1:0").map(drop);
        for made in [worker, publisher] {
            let said = made.unwrap_err().to_string();
            let counted = format!("{} descriptors are left, and its sockets need {}", left, NEEDED);
            assert!(said.contains(&counted) && said.contains("`ulimit -n`"), "{}", said);
        }
    }
    leave(NEEDED, &mut held);
    drop(Worker::builder("tcp://127.0.0.1:9").snapshots("m").connect().unwrap());
    until_left(NEEDED);
    drop(Publisher::bind("tcp://127.0.0.1:0").unwrap());
}
