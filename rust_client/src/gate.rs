//! A lock for a model's memory: many readers or one writer, with deadlines.
//!
//! A waiting writer has priority over new readers, so that steady reading cannot keep new weights
//! out. The writer's wait has a deadline, so that no reader waits forever. While the user's
//! function decides on a written version, readers wait, too. Once the function exceeds its
//! deadline, readers enter and check the model's state.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// State of a call.
#[derive(Clone, Copy, PartialEq)]
pub enum Fate {
    UnderWay,
    Returned,
    Overdue,
}

/// A call of a user's function, which must return by `by`. Its state changes once: to `Returned` or
/// to `Overdue`.
pub struct Call {
    by: Instant,
    fate: Mutex<Fate>,
}

impl Call {
    pub fn new(by: Instant) -> Call {
        Call { by, fate: Mutex::new(Fate::UnderWay) }
    }

    /// Returns the state of the call, which becomes overdue at its deadline.
    pub fn fate(&self) -> Fate {
        let late = Instant::now() >= self.by;
        self.settle(if late { Fate::Overdue } else { Fate::UnderWay })
    }

    /// Records that the call has returned. Returns true if it returned in time.
    pub fn returned(&self) -> bool {
        self.settle(Fate::Returned) == Fate::Returned
    }

    fn settle(&self, now: Fate) -> Fate {
        let mut fate = self.fate.lock().unwrap_or_else(PoisonError::into_inner);
        if *fate == Fate::UnderWay {
            *fate = now;
        }
        *fate
    }
}

/// What the writer is doing.
#[derive(Default)]
enum Writer {
    #[default]
    Absent,
    Writes,
    Calls(Arc<Call>),
}

#[derive(Default)]
struct State {
    readers: usize,
    writer: Writer,
    writers_waiting: usize,
}

/// A lock for many readers or one writer.
#[derive(Default)]
pub struct Gate {
    state: Mutex<State>,
    moved: Condvar,
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner) // never half changed
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, until: Option<Instant>) -> MutexGuard<'a, State> {
        match until {
            Some(until) => {
                let time = until.saturating_duration_since(Instant::now());
                self.moved.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
            }
            None => self.moved.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Waits for read access, and returns it.
    pub fn read(&self) -> Reader<'_> {
        let mut state = self.state();
        loop {
            let until = match &state.writer {
                Writer::Absent if state.writers_waiting == 0 => break,
                Writer::Calls(call) if call.fate() == Fate::Overdue => break,
                Writer::Calls(call) => Some(call.by),
                _ => None,
            };
            state = self.wait(state, until);
        }
        state.readers += 1;
        Reader(self)
    }

    /// Waits for read access, with priority over waiting writers, and returns it: for a short read.
    /// Returns `None` if a writer is still active at the deadline.
    pub fn look(&self, deadline: Instant) -> Option<Reader<'_>> {
        let mut state = self.state();
        while !matches!(state.writer, Writer::Absent) {
            if Instant::now() >= deadline {
                return None;
            }
            state = self.wait(state, Some(deadline));
        }
        state.readers += 1;
        Some(Reader(self))
    }

    /// Waits for exclusive access, and returns it. Returns `None` at the deadline, or once `wanted`
    /// returns false; `wanted` is called at every change and at `wake`.
    pub fn write(&self, deadline: Instant, wanted: &dyn Fn() -> bool) -> Option<Pass<'_>> {
        let mut state = self.state();
        state.writers_waiting += 1;
        while state.readers > 0 || !matches!(state.writer, Writer::Absent) {
            if Instant::now() >= deadline || !wanted() {
                state.writers_waiting -= 1;
                self.moved.notify_all();
                return None;
            }
            state = self.wait(state, Some(deadline));
        }
        state.writers_waiting -= 1;
        state.writer = Writer::Writes;
        Some(Pass(self))
    }

    /// Makes waiting writers call `wanted` again.
    pub fn wake(&self) {
        drop(self.state()); // a writer that has just called `wanted` is waiting by now
        self.moved.notify_all();
    }

    fn set(&self, writer: Writer) {
        self.state().writer = writer;
        self.moved.notify_all();
    }

    /// True if a call of the user's function has exceeded its deadline and still runs.
    pub fn is_overdue(&self) -> bool {
        matches!(&self.state().writer, Writer::Calls(call) if call.fate() == Fate::Overdue)
    }
}

/// Read access, until dropped.
pub struct Reader<'a>(&'a Gate);

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.0.state().readers -= 1;
        self.0.moved.notify_all();
    }
}

/// Exclusive access, until dropped.
pub struct Pass<'a>(&'a Gate);

impl Pass<'_> {
    /// Begins a call of the user's function. Nothing is written during the call, and readers wait
    /// until the call ends or exceeds its deadline.
    pub fn calls(&self, call: &Arc<Call>) {
        self.0.set(Writer::Calls(call.clone()));
    }

    /// Ends the call.
    pub fn writes(&self) {
        self.0.set(Writer::Writes);
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.set(Writer::Absent);
    }
}
