//! Checks a publisher's key folder for changes in a separate thread, because a disk may be slow. A change
//! takes effect within a ping interval (K2).

use super::keys::{Allowed, Stamp};
use super::run::{Shared, Work};
use std::collections::BTreeSet;
use std::io;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, Sender};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

const CHECK_INTERVAL_MIN: Duration = Duration::from_millis(20);
const CHECK_INTERVAL_MAX: Duration = Duration::from_secs(1);
const JOIN_TIMEOUT: Duration = Duration::from_secs(1); // how long `drop` waits for the thread, since a disk may be slow

/// The handle of the thread that checks the folder. The thread ends when this is dropped.
pub struct Watch {
    stop: Option<Sender<()>>,
    ended: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Starts the thread.
    pub fn start(allowed: Allowed, ping: Duration, shared: Arc<Shared>) -> io::Result<Watch> {
        let (stop, stopped) = channel();
        let (ending, ended) = channel();
        let (mut check, every) =
            (FolderCheck::new(allowed, shared), (ping / 2).clamp(CHECK_INTERVAL_MIN, CHECK_INTERVAL_MAX));
        let run = move || {
            let _ending = ending; // dropped when the thread ends, for which `Watch::drop` waits
            while stopped.recv_timeout(every) == Err(RecvTimeoutError::Timeout) && check.run() {}
        };
        let thread = thread::Builder::new().name("weightbus-keys".to_owned()).spawn(run)?;
        Ok(Watch { stop: Some(stop), ended, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if self.ended.recv_timeout(JOIN_TIMEOUT) == Err(RecvTimeoutError::Disconnected) {
            let _ = self.thread.take().map(JoinHandle::join);
        }
    }
}

/// The state of the thread.
struct FolderCheck {
    allowed: Allowed,
    shared: Arc<Shared>,
    last_stamp: Option<Stamp>, // `None`: the next check reads the files
    errors: BTreeSet<String>,  // errors of the previous check
}

impl FolderCheck {
    fn new(allowed: Allowed, shared: Arc<Shared>) -> FolderCheck {
        // The files may have changed since the start, so the first check reads them in any case.
        FolderCheck { allowed, shared, last_stamp: None, errors: BTreeSet::new() }
    }

    /// Checks the folder once. Returns false if the publisher is closed.
    fn run(&mut self) -> bool {
        let mut errors = BTreeSet::new();
        let result = self.allowed.stamp().and_then(|stamp| {
            if self.last_stamp.as_ref() == Some(&stamp) {
                errors = self.errors.clone();
                return Ok(None);
            }
            let by_key = self.allowed.read(&mut |error| errors.extend(Some(error.to_string())))?;
            self.last_stamp = Some(stamp).filter(|_| self.allowed.complete);
            Ok(Some(by_key))
        });
        let granted = match result {
            Ok(Some(by_key)) => self.shared.submit(Work::Grant(by_key)),
            Ok(None) => Ok(()),
            Err(error) => {
                errors.insert(error.to_string()); // permissions stay until the folder can be read
                Ok(())
            }
        };
        let new_errors: Vec<String> = errors.difference(&self.errors).cloned().collect();
        self.errors = errors;
        let report = |text| self.shared.submit(Work::Notice(format!("what keys may do: {}", text)));
        granted.is_ok() && new_errors.into_iter().all(|text| report(text).is_ok())
    }
}
