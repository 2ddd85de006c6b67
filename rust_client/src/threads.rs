//! Takes the handle of one of this crate's threads, so that the thread can be joined.

use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Takes the handle of a thread, so that the caller can join it. Returns `None` if the handle was
/// already taken, or if the caller runs in that thread, which cannot join itself.
pub fn join_handle(slot: &Mutex<Option<JoinHandle<()>>>) -> Option<JoinHandle<()>> {
    let mut handle = slot.lock().unwrap_or_else(PoisonError::into_inner);
    let is_current = handle.as_ref().map_or(false, |handle| handle.thread().id() == thread::current().id());
    if is_current {
        None
    } else {
        handle.take()
    }
}
