//! The queue of ready versions, from the worker's thread to the user's threads.
//!
//! At most one version of each model waits here: a newer version replaces an older one. Versions
//! that were published as one form a *group*: they enter and leave the queue together. If a newer
//! version replaces a member of a group, the other members are taken together with the newer version
//! and its group, so that no model of a group lags behind another.

use crate::error::Error;
use crate::limits::MODELS_MAX;
use crate::staging::StagedVersion;
use crate::waker::Waker;
use crate::worker::Update;
use std::collections::VecDeque;
use std::io;
use std::os::unix::io::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

#[derive(Default)]
struct State {
    ready: VecDeque<Group>,
    applied: VecDeque<Update>, // applied in one group with a version that `receive` has returned
    rejected: VecDeque<Error>,
    refused: Option<Error>,
    closed: Option<String>,
    joined_epoch: Option<u64>,
}

/// Versions of different models that must be applied at once.
pub type Group = Vec<StagedVersion>;

/// Result of `ReadyQueue::take`.
pub enum Next {
    Versions(Group),
    Applied(Update),
    Nothing,
}

impl State {
    /// True if `take` would not wait.
    fn is_ready(&self) -> bool {
        let versions = !self.ready.is_empty() || !self.applied.is_empty();
        versions || !self.rejected.is_empty() || self.refused.is_some() || self.closed.is_some()
    }

    /// Removes the groups that have a version of one of these models.
    fn remove(&mut self, models: &Group) -> Vec<StagedVersion> {
        let (of_these, others): (Vec<Group>, Vec<Group>) =
            self.ready.drain(..).partition(|group| group.iter().any(|staged| has_model_of(models, staged)));
        self.ready = others.into();
        of_these.into_iter().flatten().collect()
    }
}

/// True if a group has a version of the same model.
fn has_model_of(group: &Group, staged: &StagedVersion) -> bool {
    group.iter().any(|other| other.model == staged.model)
}

/// The queue between the worker's thread and the user's threads.
pub struct ReadyQueue {
    state: Mutex<State>,
    changed: Condvar,
    waker: Waker, // once `polled`, readable while `take` would not wait
    /// True once `descriptor` was called: before, nothing polls the waker.
    polled: AtomicBool,
}

impl ReadyQueue {
    pub fn new() -> io::Result<ReadyQueue> {
        let (state, changed) = Default::default();
        Ok(ReadyQueue { state, changed, waker: Waker::new()?, polled: AtomicBool::new(false) })
    }

    /// Returns a descriptor that is readable while `take` would not wait.
    pub fn descriptor(&self) -> RawFd {
        self.polled.store(true, Ordering::Relaxed);
        self.wake(&self.lock());
        self.waker.as_raw_fd()
    }

    /// Returns the same descriptor as `descriptor`, without taking the lock.
    pub fn waker(&self) -> RawFd {
        self.waker.as_raw_fd()
    }

    /// Makes the descriptor readable if `take` would not wait.
    fn wake(&self, state: &State) {
        if self.polled.load(Ordering::Relaxed) {
            self.waker.drain(); // at most one byte is pending
            if state.is_ready() {
                self.waker.wake();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner) // no change here panics half-way
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        self.wake(&state);
        drop(state);
        self.changed.notify_all();
    }

    // For the worker's thread.

    /// Adds versions. Returns the older ones that they replace.
    pub fn put(&self, mut group: Group) -> Vec<StagedVersion> {
        let mut older = Vec::new();
        self.change(|state| {
            let (replaced, left) =
                state.remove(&group).into_iter().partition(|staged| has_model_of(&group, staged));
            older = replaced;
            group.extend::<Group>(left);
            state.ready.push_back(group);
        });
        older
    }

    /// Puts taken versions back into the queue. Returns those for whose model a newer version has
    /// arrived, or all if the queue is closed.
    pub fn put_back(&self, group: Group) -> Vec<StagedVersion> {
        let mut unwanted = Vec::new();
        self.change(|state| {
            if state.closed.is_some() {
                unwanted = group;
                return;
            }
            let mut newer = state.remove(&group);
            let (outdated, left) = group.into_iter().partition(|staged| has_model_of(&newer, staged));
            unwanted = outdated;
            newer.extend::<Group>(left);
            state.ready.push_back(newer); // last, so that other models come first
        });
        unwanted
    }

    /// Adds an applied version, which `take` returns.
    pub fn add_applied(&self, update: Update) {
        self.change(|state| {
            state.applied.retain(|older| older.model != update.model);
            state.applied.push_back(update);
        });
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

    pub fn is_closed(&self) -> bool {
        self.lock().closed.is_some()
    }

    /// Returns an applied version, or else the group of ready versions that has waited longest. If
    /// there is neither, returns the error of a rejected version or of a refusal; each error is
    /// returned once. If there is no error either, waits until the deadline.
    pub fn take(&self, worker: &str, deadline: Instant) -> Result<Next, Error> {
        let next = self.wait(worker, deadline, |state| {
            let applied = state.applied.pop_front().map(Next::Applied);
            let next = applied.or_else(|| state.ready.pop_front().map(Next::Versions));
            next.map(Ok).or_else(|| state.rejected.pop_front().map(Err))
        });
        next.map(|next| next.unwrap_or(Next::Nothing))
    }

    /// Waits until the publisher admits this worker. Returns the epoch, or `None` at the deadline.
    pub fn wait_joined(&self, worker: &str, deadline: Instant) -> Result<Option<u64>, Error> {
        self.wait(worker, deadline, |state| state.joined_epoch.map(Ok))
    }

    /// Waits until `find` returns a result, the publisher refuses this worker, or the queue is
    /// closed. Returns `None` at the deadline.
    fn wait<T>(
        &self,
        worker: &str,
        deadline: Instant,
        find: impl Fn(&mut State) -> Option<Result<T, Error>>,
    ) -> Result<Option<T>, Error> {
        let mut state = self.lock();
        loop {
            if let Some(found) = find(&mut state).or_else(|| state.refused.take().map(Err)) {
                self.wake(&state);
                return found.map(Some);
            }
            if let Some(reason) = &state.closed {
                return Err(Error::Closed { worker: worker.to_owned(), reason: reason.clone() });
            }
            let time = deadline.saturating_duration_since(Instant::now());
            if time.is_zero() {
                return Ok(None);
            }
            state = self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::staging::Buffer;
    use crate::tests::{layout, staged};

    fn group(of: &[(&str, u64)]) -> Group {
        of.iter().map(|(model, version)| staged(model, *version, layout("{}"), Buffer::default())).collect()
    }

    fn named(group: &[StagedVersion]) -> Vec<(&str, u64)> {
        let mut named: Vec<_> = group.iter().map(|staged| (&staged.model[..], staged.key.1)).collect();
        named.sort_unstable();
        named
    }

    fn take(queue: &ReadyQueue) -> Group {
        match queue.take("w", Instant::now()).unwrap() {
            Next::Versions(group) => group,
            _ => panic!("nothing there"),
        }
    }

    #[test]
    fn a_model_that_is_in_use_keeps_no_other_waiting() {
        let queue = ReadyQueue::new().unwrap();
        assert!(queue.put(group(&[("busy", 1)])).is_empty() && queue.put(group(&[("free", 1)])).is_empty());
        let busy = take(&queue);
        assert_eq!(named(&busy), [("busy", 1)]);
        assert!(queue.put_back(busy).is_empty());
        assert_eq!((named(&take(&queue)), named(&take(&queue))), (vec![("free", 1)], vec![("busy", 1)]));
    }

    #[test]
    fn what_is_left_of_a_group_is_taken_with_the_newer_version() {
        let queue = ReadyQueue::new().unwrap();
        assert!(queue.put(group(&[("a", 1), ("b", 1)])).is_empty());
        assert!(queue.put(group(&[("c", 1)])).is_empty());
        assert_eq!(named(&queue.put(group(&[("b", 2)]))), [("b", 1)]);
        assert_eq!(named(&take(&queue)), [("c", 1)]);
        let both = take(&queue);
        assert_eq!(named(&both), [("a", 1), ("b", 2)]);
        assert!(queue.put(group(&[("b", 3)])).is_empty());
        assert_eq!(named(&queue.put_back(both)), [("b", 2)]);
        assert_eq!(named(&take(&queue)), [("a", 1), ("b", 3)]);
    }
}
