//! Updates for async tasks: a dedicated thread applies versions, and wakes the task that waits.

use crate::error::Error;
use crate::worker::{Update, Worker};
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

const LOOK: Duration = Duration::from_millis(100); // how often to check for a dropped stream

/// What the stream and its thread share: at most one item, and the task to wake.
#[derive(Default)]
struct Between {
    item: Option<Result<Update, Error>>,
    waker: Option<Waker>,
    ended: bool,
    unwanted: bool,
}

#[derive(Default)]
struct Meeting {
    between: Mutex<Between>,
    taken: Condvar,
}

impl Meeting {
    fn open(&self) -> MutexGuard<'_, Between> {
        self.between.lock().unwrap_or_else(PoisonError::into_inner) // never half changed
    }

    /// Hands over an item, once the previous one was taken. Returns false if the stream was
    /// dropped.
    fn leave(&self, item: Result<Update, Error>) -> bool {
        let mut between = self.open();
        while between.item.is_some() && !between.unwanted {
            between = self.taken.wait(between).unwrap_or_else(PoisonError::into_inner);
        }
        between.item = Some(item);
        let wanted = !between.unwanted;
        wake(between);
        wanted
    }
}

/// Wakes the waiting task after releasing the lock, since the task may poll at once.
fn wake(mut between: MutexGuard<'_, Between>) {
    let waker = between.waker.take();
    drop(between);
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// A stream of the versions as they are applied, which ends when the worker is closed.
///
/// The stream needs no particular runtime: poll it with `poll_next`, or as a `futures_core::Stream`
/// with the feature `stream`. At most one version is applied ahead of the one that waits to be
/// taken. Of the versions that arrive meanwhile, only the newest is applied.
pub struct UpdateStream(Arc<Meeting>);

impl UpdateStream {
    pub(crate) fn of(worker: Arc<Worker>) -> io::Result<UpdateStream> {
        let meeting = Arc::new(Meeting::default());
        let stream = UpdateStream(meeting.clone());
        let apply = move || {
            while !meeting.open().unwanted {
                let wanted = match worker.receive(LOOK) {
                    Ok(None) => continue,
                    Err(Error::Closed { .. }) => break,
                    Ok(Some(update)) => meeting.leave(Ok(update)),
                    Err(error) => meeting.leave(Err(error)),
                };
                if !wanted {
                    return;
                }
            }
            let mut between = meeting.open();
            between.ended = true;
            wake(between);
        };
        thread::Builder::new().name("weightbus-stream".to_owned()).spawn(apply)?;
        Ok(stream)
    }

    /// Returns the next applied version, or the error of a rejected version. If there is neither,
    /// the task is woken later. Returns `None` once the worker is closed.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Update, Error>>> {
        // cloned and dropped without the lock: both run foreign code
        let mut waker = Some(context.waker().clone());
        let mut between = self.0.open();
        if let Some(item) = between.item.take() {
            self.0.taken.notify_all();
            return Poll::Ready(Some(item));
        }
        if between.ended {
            return Poll::Ready(None);
        }
        std::mem::swap(&mut between.waker, &mut waker);
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
        self.0.open().unwanted = true;
        self.0.taken.notify_all();
    }
}
