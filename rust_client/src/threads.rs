//! Joining the threads of this crate.

use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Takes the handle of a thread, so that the caller can join it. Returns `None` if the handle was
/// taken, or if the caller is that thread, which cannot join itself.
pub fn join_handle(place: &Mutex<Option<JoinHandle<()>>>) -> Option<JoinHandle<()>> {
    let mut handle = place.lock().unwrap_or_else(PoisonError::into_inner);
    let own = handle.as_ref().map_or(false, |handle| handle.thread().id() == thread::current().id());
    if own {
        None
    } else {
        handle.take()
    }
}
