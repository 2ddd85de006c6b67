//! How threads of this crate are waited for.

use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Takes the handle of a thread to wait for it, unless that is the one that runs here, which cannot: then the handle
/// stays for whoever can.
pub fn join_handle(place: &Mutex<Option<JoinHandle<()>>>) -> Option<JoinHandle<()>> {
    let mut handle = place.lock().unwrap_or_else(PoisonError::into_inner);
    let own = handle.as_ref().map_or(false, |handle| handle.thread().id() == thread::current().id());
    if own {
        None
    } else {
        handle.take()
    }
}
