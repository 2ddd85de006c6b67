//! A stream of updates for async tasks: a dedicated thread applies versions, and wakes the task.

use crate::error::Error;
use crate::worker::{Update, Worker};
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

const CHECK_INTERVAL: Duration = Duration::from_millis(100); // how often to check for a dropped stream

/// The state that the stream and its thread share: at most one item, and the task to wake.
#[derive(Default)]
struct State {
    item: Option<Result<Update, Error>>,
    waker: Option<Waker>,
    ended: bool,
    unwanted: bool,
}

#[derive(Default)]
struct Channel {
    state: Mutex<State>,
    taken: Condvar,
}

impl Channel {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner) // never half changed
    }

    /// Passes an item to the stream, once the previous item was taken. False: the stream was dropped.
    fn send(&self, item: Result<Update, Error>) -> bool {
        let mut state = self.lock();
        while state.item.is_some() && !state.unwanted {
            state = self.taken.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.item = Some(item);
        let wanted = !state.unwanted;
        wake(state);
        wanted
    }
}

/// Wakes the waiting task after releasing the lock, since the task may poll at once.
fn wake(mut state: MutexGuard<'_, State>) {
    let waker = state.waker.take();
    drop(state);
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// A stream of the versions as they are applied, which ends when the worker is closed.
///
/// The stream needs no particular runtime: poll it with `poll_next`, or as a `futures_core::Stream`
/// with the feature `stream`. At most one version is applied ahead of the one that waits to be
/// taken. Of the versions that arrive meanwhile, only the newest is applied.
pub struct UpdateStream(Arc<Channel>);

impl UpdateStream {
    pub(crate) fn of(worker: Arc<Worker>) -> io::Result<UpdateStream> {
        let channel = Arc::new(Channel::default());
        let stream = UpdateStream(channel.clone());
        let apply = move || {
            while !channel.lock().unwanted {
                let wanted = match worker.receive(CHECK_INTERVAL) {
                    Ok(None) => continue,
                    Err(Error::Closed { .. }) => break,
                    Ok(Some(update)) => channel.send(Ok(update)),
                    Err(error) => channel.send(Err(error)),
                };
                if !wanted {
                    return;
                }
            }
            let mut state = channel.lock();
            state.ended = true;
            wake(state);
        };
        thread::Builder::new().name("weightbus-stream".to_owned()).spawn(apply)?;
        Ok(stream)
    }

    /// Returns the next applied version, or the error of a rejected version. If there is neither,
    /// the task is woken later. Returns `None` once the worker is closed.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Update, Error>>> {
        // cloned and dropped without the lock: both run foreign code
        let mut waker = Some(context.waker().clone());
        let mut state = self.0.lock();
        if let Some(item) = state.item.take() {
            self.0.taken.notify_all();
            return Poll::Ready(Some(item));
        }
        if state.ended {
            return Poll::Ready(None);
        }
        std::mem::swap(&mut state.waker, &mut waker);
        Poll::Pending
    }
}

#[cfg(feature = "stream")]
impl futures_core::Stream for UpdateStream {
    type Item = Result<Update, Error>;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Update, Error>>> {
        UpdateStream::poll_next(self.get_mut(), context)
    }
}

impl fmt::Debug for UpdateStream {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("UpdateStream")
    }
}

impl Drop for UpdateStream {
    fn drop(&mut self) {
        self.0.lock().unwanted = true;
        self.0.taken.notify_all();
    }
}
