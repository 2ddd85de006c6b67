//! A thread that writes a publisher's latest versions to the state folder, without delaying publishes.
//!
//! `offer` queues a version and returns. If the disk is slow, a newer version of the model replaces the
//! queued one. Before each write, the thread waits for a limited time until no publish is in progress. The
//! queue has only a weak reference to a version's memory: a write alone holds the memory. After a write,
//! the thread pauses for a multiple of the time that the write took, because the system is still busy with
//! the data. If a write fails, the thread reports the error and goes on with the next version. Only two
//! calls wait for the disk: `record`, for at most a second, and `close`.

use super::content::Content;
use super::run::{Shared, Work};
use super::state::{StateFolder, Stored};
use crate::transfer::Key;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

// The pause after a write, as a multiple of the write's duration: the thread writes for a tenth of the time.
const PAUSE_FACTOR: u32 = 9;
// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(5);
const IDLE_WAIT_MAX: Duration = Duration::from_secs(1); // longest wait of a version until no publish is in progress
const RECORD_TIMEOUT: Duration = Duration::from_secs(1); // longest wait for an epoch; workers tolerate more silence
const WARNING_INTERVAL: Duration = Duration::from_secs(60); // between two warnings that the disk fails

/// A version that waits to be written.
struct QueuedVersion {
    key: Key,
    content: Weak<Content>,
    names: BTreeSet<Key>,
}

#[derive(Default)]
struct Queue {
    versions: BTreeMap<String, QueuedVersion>, // by model
    unwritten: BTreeMap<String, String>,       // by model, why its latest version is not on disk
    publishing: bool,                          // a publish is in progress
    epoch: u64,                                // must be recorded on disk
    recorded: u64,                             // last epoch that was recorded
    deadline: Option<Instant>,                 // when the thread must end, set by `close`
    ended: bool,
}

#[derive(Default)]
struct SharedQueue {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl SharedQueue {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner) // a panic leaves the content valid
    }

    fn change(&self, change: impl FnOnce(&mut Queue)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until `condition` returns true, or until `until`. Returns the locked queue.
    fn wait(&self, until: Instant, condition: impl Fn(&Queue) -> bool) -> MutexGuard<'_, Queue> {
        let left = until.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(self.lock(), left, |queue| !condition(queue));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// The handle of the thread that writes to a state folder, and that closes the folder at its end.
pub struct Keeper {
    queue: Arc<SharedQueue>,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
}

impl Keeper {
    /// Starts the thread.
    pub fn start(folder: StateFolder, shared: Arc<Shared>) -> io::Result<Keeper> {
        let queue = Arc::new(SharedQueue::default());
        let (epoch, path) = (folder.epoch(), folder.path().to_owned());
        queue.change(|queue| (queue.epoch, queue.recorded) = (epoch, epoch));
        let mut writer =
            Writer { folder, shared, queue: queue.clone(), idle_wait_end: None, warned_at: None };
        let thread = thread::Builder::new().name("weightbus-state".to_owned()).spawn(move || writer.run())?;
        Ok(Keeper { queue, thread: Some(thread), path })
    }

    /// Queues a version, which replaces a queued one of the same model. Does not wait for the disk.
    pub fn offer(&self, model: String, key: Key, content: &Arc<Content>, names: BTreeSet<Key>) {
        let queued = QueuedVersion { key, content: Arc::downgrade(content), names };
        self.queue.change(|queue| drop(queue.versions.insert(model, queued)));
    }

    /// Sets whether a publish is in progress. Writes wait while that is so.
    pub fn set_publishing(&self, publishing: bool) {
        if self.queue.lock().publishing != publishing {
            self.queue.change(|queued| queued.publishing = publishing);
        }
    }

    /// Waits until an epoch is on disk, at most `RECORD_TIMEOUT`. Returns a warning after the timeout.
    /// Must be called before workers learn the epoch.
    pub fn record(&self, epoch: u64) -> Option<String> {
        self.queue.change(|queue| queue.epoch = epoch);
        if self.queue.wait(Instant::now() + RECORD_TIMEOUT, |queue| queue.recorded >= epoch).recorded >= epoch
        {
            return None;
        }
        Some(format!(
            "epoch {} is not in {} yet: if this publisher dies now, and its clock is behind after the restart, workers \
             refuse it",
            epoch,
            self.path.display()
        ))
    }

    /// Makes the thread write the queued versions and end. Returns a warning about the latest versions
    /// that are not on disk after `timeout`.
    pub fn close(&mut self, timeout: Duration) -> Option<String> {
        let until = Instant::now() + timeout;
        self.queue.change(|queue| queue.deadline = Some(until));
        let mut queue = self.queue.wait(until, |queue| queue.ended);
        let mut unwritten = std::mem::take(&mut queue.unwritten);
        let ended = queue.ended;
        unwritten.extend(queue.versions.keys().map(|model| (model.clone(), "it was never begun".to_owned())));
        drop(queue);
        // Do not join a thread that still waits for the disk.
        let thread = self.thread.take().filter(|_| ended);
        let _ = thread.map(JoinHandle::join);
        let unwritten: Vec<String> =
            unwritten.iter().map(|(model, why)| format!("{} ({})", model, why)).collect();
        if unwritten.is_empty() {
            return None;
        }
        Some(format!(
            "closed without the latest version of {} in the state folder {}: after a restart, the version before it is \
             offered",
            unwritten.join("; "),
            self.path.display()
        ))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.queue.change(|queue| {
            // Without a call of `close`, the publisher has failed, and the thread ends at once.
            queue.deadline.get_or_insert_with(Instant::now);
        });
    }
}

/// The state of the thread.
struct Writer {
    folder: StateFolder,
    shared: Arc<Shared>,
    queue: Arc<SharedQueue>,
    idle_wait_end: Option<Instant>, // until when the present version waits for publishes to end
    warned_at: Option<Instant>,
}

/// When dropped, also after a panic, records that the thread has ended.
struct EndMarker(Arc<SharedQueue>);

impl Drop for EndMarker {
    fn drop(&mut self) {
        self.0.change(|queue| queue.ended = true);
    }
}

fn no_deadline() -> Instant {
    Instant::now() + Duration::from_secs(86_400)
}

impl Writer {
    fn run(&mut self) {
        let _end_marker = EndMarker(self.queue.clone());
        loop {
            let has_work = |queue: &Queue| {
                !queue.versions.is_empty() || queue.epoch > queue.recorded || queue.deadline.is_some()
            };
            let closing = self.queue.wait(no_deadline(), has_work).deadline.is_some();
            if !self.write_all() || closing {
                return;
            }
        }
    }

    /// Writes the queued epoch and versions. Returns false if the deadline passes first.
    fn write_all(&mut self) -> bool {
        self.write_epoch();
        let models: Vec<String> = self.queue.lock().versions.keys().cloned().collect();
        for model in models {
            self.idle_wait_end = Some(Instant::now() + IDLE_WAIT_MAX);
            self.write_epoch();
            if wait_for_idle(&self.queue, self.idle_wait_end).is_err() {
                return false;
            }
            let queued = self.queue.lock().versions.remove(&model);
            let started = Instant::now();
            if let Some(queued) = queued {
                self.queue.lock().unwritten.insert(model.clone(), "there was no time for it".to_owned());
                match self.write(&model, &queued) {
                    Ok(()) => drop(self.queue.lock().unwritten.remove(&model)),
                    Err(error) if error.kind() == io::ErrorKind::TimedOut => return false,
                    Err(error) => {
                        self.queue.lock().unwritten.insert(model.clone(), error.to_string());
                        self.warn(&format!("{} {:?}", model, queued.key), &error.to_string());
                    }
                }
            }
            self.pause(started);
        }
        true
    }

    fn write(&mut self, model: &str, queued: &QueuedVersion) -> io::Result<()> {
        let content = match queued.content.upgrade() {
            Some(content) => content,
            None => return Ok(()), // released: a newer version is queued
        };
        let stored = Stored::of(model, queued.key, &content, &queued.names);
        let (queue, idle_wait_end) = (&self.queue, self.idle_wait_end);
        self.folder.write(stored, &content, &mut || wait_for_idle(queue, idle_wait_end))
    }

    /// Pauses after a write that began at `started`. During the pause, writes only an epoch, for which
    /// a caller waits.
    fn pause(&mut self, started: Instant) {
        let until = Instant::now() + (started.elapsed() * PAUSE_FACTOR).min(PAUSE_MAX);
        while Instant::now() < until {
            let has_work = |queue: &Queue| queue.deadline.is_some() || queue.epoch > queue.recorded;
            if self.queue.wait(until, has_work).deadline.is_some() {
                return;
            }
            self.write_epoch();
        }
    }

    fn write_epoch(&mut self) {
        let (epoch, recorded) = {
            let queue = self.queue.lock();
            (queue.epoch, queue.recorded)
        };
        if epoch > recorded {
            if let Err(error) = self.folder.record_epoch(epoch, &[]) {
                self.warn(&format!("epoch {}", epoch), &error.to_string());
            }
            // Also if the write failed: the next version is written with a table that has the epoch.
            self.queue.change(|queue| queue.recorded = epoch);
        }
    }

    /// Notifies the user that `what` could not be written, at most once in `WARNING_INTERVAL`.
    fn warn(&mut self, what: &str, error: &str) {
        if self.warned_at.map_or(false, |at| at.elapsed() < WARNING_INTERVAL) {
            return;
        }
        self.warned_at = Some(Instant::now());
        let _ = self.shared.submit(Work::Notice(format!(
            "{} could not be written to the state folder {}: {}. What it held before is still there; the next version \
             is tried again",
            what,
            self.folder.path().display(),
            error
        ))); // fails only while the publisher closes, which reports it
    }
}

/// Waits until no publish is in progress, or the publisher closes, or until `by`. Fails if the deadline
/// of the closing publisher has passed.
fn wait_for_idle(queue: &SharedQueue, by: Option<Instant>) -> io::Result<()> {
    let idle = |queue: &Queue| !queue.publishing || queue.deadline.is_some();
    let queue = queue.wait(by.unwrap_or_else(Instant::now), idle);
    match queue.deadline.filter(|&deadline| Instant::now() >= deadline) {
        Some(_) => Err(io::ErrorKind::TimedOut.into()),
        None => Ok(()),
    }
}
