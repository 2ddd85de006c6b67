//! The queue of ready versions, from the worker's thread to the user's threads.
//!
//! At most one version of each model waits here: a newer version replaces it.

use crate::error::Error;
use crate::limits::MODELS_MAX;
use crate::staging::StagedVersion;
use crate::waker::Waker;
use std::collections::VecDeque;
use std::io;
use std::os::unix::io::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

#[derive(Default)]
struct State {
    ready: VecDeque<StagedVersion>,
    rejected: VecDeque<Error>,
    refused: Option<Error>,
    closed: Option<String>,
    joined_epoch: Option<u64>,
}

/// Result of `ReadyQueue::take`.
pub enum Next {
    Version(StagedVersion),
    Nothing,
}

impl State {
    /// True if `take` would not wait.
    fn any(&self) -> bool {
        !self.ready.is_empty() || !self.rejected.is_empty() || self.refused.is_some() || self.closed.is_some()
    }
}

/// The queue between the worker's thread and the user's threads.
pub struct ReadyQueue {
    state: Mutex<State>,
    changed: Condvar,
    waker: Waker, // once `heard`, readable while `take` would not wait
    /// True once `descriptor` was called: before, nothing polls the waker.
    heard: AtomicBool,
}

impl ReadyQueue {
    pub fn new() -> io::Result<ReadyQueue> {
        let (state, changed) = Default::default();
        Ok(ReadyQueue { state, changed, waker: Waker::new()?, heard: AtomicBool::new(false) })
    }

    /// Returns a descriptor that is readable while `take` would not wait.
    pub fn descriptor(&self) -> RawFd {
        self.heard.store(true, Ordering::Relaxed);
        self.wake(&self.open());
        self.waker.as_raw_fd()
    }

    /// Returns the same descriptor as `descriptor`, without taking the lock.
    pub fn waker(&self) -> RawFd {
        self.waker.as_raw_fd()
    }

    /// Makes the descriptor readable if `take` would not wait.
    fn wake(&self, state: &State) {
        if self.heard.load(Ordering::Relaxed) {
            self.waker.drain(); // at most one byte is pending
            if state.any() {
                self.waker.wake();
            }
        }
    }

    fn open(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner) // no change here panics half-way
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.open();
        change(&mut state);
        self.wake(&state);
        drop(state);
        self.changed.notify_all();
    }

    // For the worker's thread.

    /// Adds a version. Returns the older one that it replaces, if any.
    pub fn put(&self, staged: StagedVersion) -> Option<StagedVersion> {
        let mut older = None;
        self.change(|state| {
            let at = state.ready.iter().position(|waiting| waiting.model == staged.model);
            older = at.and_then(|at| state.ready.remove(at));
            state.ready.push_back(staged);
        });
        older
    }

    /// Puts a taken version back into the queue. Returns the version if a newer one has arrived, or
    /// if the queue is closed.
    pub fn put_back(&self, staged: StagedVersion) -> Option<StagedVersion> {
        let mut unwanted = None;
        self.change(|state| {
            if state.closed.is_some() || state.ready.iter().any(|waiting| waiting.model == staged.model) {
                unwanted = Some(staged);
            } else {
                state.ready.push_back(staged); // last, so that other models come first
            }
        });
        unwanted
    }

    /// Adds the error of a rejected version.
    pub fn reject(&self, error: Error) {
        self.change(|state| {
            if state.rejected.len() >= MODELS_MAX {
                state.rejected.pop_front();
            }
            state.rejected.push_back(error);
        });
    }

    /// Records that the publisher refuses this worker.
    pub fn refuse(&self, error: Error) {
        self.change(|state| state.refused = Some(error));
    }

    /// Records that the publisher has admitted this worker.
    pub fn join(&self, epoch: u64) {
        self.change(|state| {
            state.refused = None;
            state.joined_epoch = Some(epoch);
        });
    }

    /// Closes the queue and drops the versions in it.
    pub fn close(&self, reason: &str) {
        self.change(|state| {
            state.ready.clear();
            state.closed.get_or_insert_with(|| reason.to_owned());
        });
    }

    // For the user's threads.

    /// True if the queue is closed.
    pub fn is_closed(&self) -> bool {
        self.open().closed.is_some()
    }

    /// Returns the version that has waited longest. If no version waits, returns the error of a
    /// rejected version or of a refusal; each error is returned once. If there is no error either,
    /// waits until the deadline.
    pub fn take(&self, worker: &str, deadline: Instant) -> Result<Next, Error> {
        let mut state = self.open();
        loop {
            if let Some(staged) = state.ready.pop_front() {
                self.wake(&state);
                return Ok(Next::Version(staged));
            }
            if let Some(error) = state.rejected.pop_front().or_else(|| state.refused.take()) {
                self.wake(&state);
                return Err(error);
            }
            if let Some(reason) = &state.closed {
                return Err(Error::Closed { worker: worker.to_owned(), reason: reason.clone() });
            }
            state = match self.wait(state, deadline) {
                Some(state) => state,
                None => return Ok(Next::Nothing),
            };
        }
    }

    /// Waits until the publisher admits this worker. Returns the epoch, or `None` at the deadline.
    pub fn wait_joined(&self, worker: &str, deadline: Instant) -> Result<Option<u64>, Error> {
        let mut state = self.open();
        loop {
            if state.joined_epoch.is_some() {
                return Ok(state.joined_epoch);
            }
            if let Some(error) = state.refused.take() {
                self.wake(&state);
                return Err(error);
            }
            if let Some(reason) = &state.closed {
                return Err(Error::Closed { worker: worker.to_owned(), reason: reason.clone() });
            }
            state = match self.wait(state, deadline) {
                Some(state) => state,
                None => return Ok(None),
            };
        }
    }

    /// Waits for a change. Returns the lock, or `None` at the deadline.
    fn wait<'a>(&'a self, state: MutexGuard<'a, State>, deadline: Instant) -> Option<MutexGuard<'a, State>> {
        let time = deadline.checked_duration_since(Instant::now()).filter(|time| !time.is_zero())?;
        let (state, _) = self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner);
        Some(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::staging::Buffer;
    use crate::tests::{layout, staged};

    #[test]
    fn a_model_that_is_in_use_keeps_no_other_waiting() {
        let ready_queue = ReadyQueue::new().unwrap();
        let staged = |model| staged(model, 1, layout("{}"), Buffer::default());
        assert!(ready_queue.put(staged("busy")).is_none() && ready_queue.put(staged("free")).is_none());
        let take = || match ready_queue.take("w", Instant::now()).unwrap() {
            Next::Version(staged) => staged,
            Next::Nothing => panic!("nothing there"),
        };
        let busy = take();
        assert_eq!(busy.model, "busy");
        assert!(ready_queue.put_back(busy).is_none());
        assert_eq!((take().model, take().model), ("free".to_owned(), "busy".to_owned()));
    }
}
