//! Watches a publisher's folder of keys in a separate thread, because a disk may be slow. A change
//! takes effect within a ping interval (K2).

use super::keys::{Allowed, Stamp};
use super::run::{Shared, Work};
use std::collections::BTreeSet;
use std::io;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, Sender};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

const LOOK_MIN: Duration = Duration::from_millis(20);
const LOOK_MAX: Duration = Duration::from_secs(1);
const END: Duration = Duration::from_secs(1); // how long `drop` waits for a check of a slow disk

/// The thread that checks the folder. The thread ends when this is dropped.
pub struct Watch {
    stop: Option<Sender<()>>,
    ended: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Starts the thread.
    pub fn begin(allowed: Allowed, ping: Duration, shared: Arc<Shared>) -> io::Result<Watch> {
        let (stop, stopped) = channel();
        let (ending, ended) = channel();
        let (mut look, every) = (Look::new(allowed, shared), (ping / 2).clamp(LOOK_MIN, LOOK_MAX));
        let run = move || {
            let _ending = ending; // dropped at the end, which `Watch::drop` waits for
            while stopped.recv_timeout(every) == Err(RecvTimeoutError::Timeout) && look.look() {}
        };
        let thread = thread::Builder::new().name("weightbus-keys".to_owned()).spawn(run)?;
        Ok(Watch { stop: Some(stop), ended, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if self.ended.recv_timeout(END) == Err(RecvTimeoutError::Disconnected) {
            let _ = self.thread.take().map(JoinHandle::join);
        }
    }
}

struct Look {
    allowed: Allowed,
    shared: Arc<Shared>,
    seen: Option<Stamp>,     // `None`: the next check reads the files
    wrong: BTreeSet<String>, // errors of the previous check
}

impl Look {
    fn new(allowed: Allowed, shared: Arc<Shared>) -> Look {
        // The files may have changed since the start, so the first check reads them in any case.
        Look { allowed, shared, seen: None, wrong: BTreeSet::new() }
    }

    /// Checks the folder once. Returns false if the publisher is closed.
    fn look(&mut self) -> bool {
        let mut wrong = BTreeSet::new();
        let result = self.allowed.stamp().and_then(|stamp| {
            if self.seen.as_ref() == Some(&stamp) {
                wrong = self.wrong.clone();
                return Ok(None);
            }
            let by_key = self.allowed.read(&mut |error| wrong.extend(Some(error.to_string())))?;
            self.seen = Some(stamp).filter(|_| self.allowed.whole);
            Ok(Some(by_key))
        });
        let granted = match result {
            Ok(Some(by_key)) => self.shared.submit(Work::Grant(by_key)),
            Ok(None) => Ok(()),
            Err(error) => {
                wrong.insert(error.to_string()); // permissions stay until it can be read
                Ok(())
            }
        };
        let news: Vec<String> = wrong.difference(&self.wrong).cloned().collect();
        self.wrong = wrong;
        let tell = |text| self.shared.submit(Work::Notice(format!("what keys may do: {}", text)));
        granted.is_ok() && news.into_iter().all(|text| tell(text).is_ok())
    }
}
