//! A lock for which threads wait only until a deadline. `std::sync::Mutex` has no such deadline.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A value that one thread uses at a time.
pub struct TimedLock<T> {
    value: Mutex<Option<T>>, // `None` while a thread uses the value
    returned: Condvar,
}

impl<T> TimedLock<T> {
    pub fn new(value: T) -> TimedLock<T> {
        TimedLock { value: Mutex::new(Some(value)), returned: Condvar::new() }
    }

    fn value(&self) -> MutexGuard<'_, Option<T>> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the value. Returns `None` if another thread still uses the value at `until`.
    pub fn lock_until(&self, until: Instant) -> Option<TimedGuard<'_, T>> {
        let mut slot = self.value();
        loop {
            if let Some(value) = slot.take() {
                return Some(TimedGuard { lock: self, value: Some(value) });
            }
            let left = until.checked_duration_since(Instant::now())?;
            slot = self.returned.wait_timeout(slot, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Holds the value, and returns the value to the lock when dropped, also by a panic.
pub struct TimedGuard<'a, T> {
    lock: &'a TimedLock<T>,
    value: Option<T>, // `Some` until this is dropped
}

impl<T> Deref for TimedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("the value is held")
    }
}

impl<T> DerefMut for TimedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("the value is held")
    }
}

impl<T> Drop for TimedGuard<'_, T> {
    fn drop(&mut self) {
        *self.lock.value() = self.value.take();
        self.lock.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn nobody_waits_beyond_a_deadline_and_whoever_may_has_it_next() {
        let timed = TimedLock::new(0);
        let began = Instant::now();
        let first = timed.lock_until(began).unwrap();
        assert!(timed.lock_until(began + Duration::from_millis(50)).is_none());
        assert!(began.elapsed() >= Duration::from_millis(50));
        thread::scope(|scope| {
            let waiting: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| *timed.lock_until(began + Duration::from_secs(60)).unwrap() += 1))
                .collect();
            drop(first);
            waiting.into_iter().for_each(|thread| thread.join().unwrap());
        });
        assert_eq!(*timed.lock_until(began).unwrap(), 4);
    }

    #[test]
    fn a_thread_that_panics_gives_it_back() {
        let timed = TimedLock::new(());
        thread::scope(|scope| {
            let panics = scope.spawn(|| {
                let _turn = timed.lock_until(Instant::now());
                panic!("in its turn");
            });
            assert!(panics.join().is_err());
        });
        assert!(timed.lock_until(Instant::now()).is_some());
    }
}
