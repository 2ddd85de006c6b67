//! A lock for a model's memory: many readers or one writer, with deadlines.
//!
//! A waiting writer has priority over new readers, so that steady reading cannot keep new weights
//! out. The writer's wait has a deadline, so that no reader waits forever. While the user's
//! function decides on a written version, readers wait, too. Once the function exceeds its
//! deadline, readers get access, and check the model's state.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// State of a call.
#[derive(Clone, Copy, PartialEq)]
pub enum CallState {
    UnderWay,
    Returned,
    Overdue,
}

/// A call of a user's function, with a deadline. Its state changes once: to `Returned` or `Overdue`.
pub struct Call {
    deadline: Instant,
    state: Mutex<CallState>,
}

impl Call {
    pub fn new(deadline: Instant) -> Call {
        Call { deadline, state: Mutex::new(CallState::UnderWay) }
    }

    /// Returns the state of the call, which becomes overdue at its deadline.
    pub fn state(&self) -> CallState {
        let overdue = Instant::now() >= self.deadline;
        self.settle(if overdue { CallState::Overdue } else { CallState::UnderWay })
    }

    /// Records that the call has returned. Returns true if it returned in time.
    pub fn returned(&self) -> bool {
        self.settle(CallState::Returned) == CallState::Returned
    }

    /// Changes the state to `new`, unless the call is no longer under way. Returns the state.
    fn settle(&self, new: CallState) -> CallState {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if *state == CallState::UnderWay {
            *state = new;
        }
        *state
    }
}

/// What the writer is doing.
#[derive(Default)]
enum Writer {
    #[default]
    Absent,
    Writing,
    Calling(Arc<Call>),
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
    changed: Condvar,
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner) // never half changed
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, until: Option<Instant>) -> MutexGuard<'a, State> {
        match until {
            Some(until) => {
                let time = until.saturating_duration_since(Instant::now());
                self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
            }
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Waits for read access, and returns it.
    pub fn read(&self) -> Reader<'_> {
        let mut state = self.state();
        loop {
            let until = match &state.writer {
                Writer::Absent if state.writers_waiting == 0 => break,
                Writer::Calling(call) if call.state() == CallState::Overdue => break,
                Writer::Calling(call) => Some(call.deadline),
                _ => None,
            };
            state = self.wait(state, until);
        }
        state.readers += 1;
        Reader(self)
    }

    /// Waits for read access, with priority over waiting writers, and returns it. The caller must
    /// read only for a short time. Returns `None` if a writer is still active at the deadline.
    pub fn read_first(&self, deadline: Instant) -> Option<Reader<'_>> {
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
                self.changed.notify_all();
                return None;
            }
            state = self.wait(state, Some(deadline));
        }
        state.writers_waiting -= 1;
        state.writer = Writer::Writing;
        Some(Pass(self))
    }

    /// Makes waiting writers call `wanted` again.
    pub fn wake(&self) {
        drop(self.state()); // a writer that has just called `wanted` is waiting by now
        self.changed.notify_all();
    }

    fn set(&self, writer: Writer) {
        self.state().writer = writer;
        self.changed.notify_all();
    }

    /// True if a call of the user's function has exceeded its deadline and still runs.
    pub fn is_overdue(&self) -> bool {
        matches!(&self.state().writer, Writer::Calling(call) if call.state() == CallState::Overdue)
    }
}

/// Read access, until dropped.
pub struct Reader<'a>(&'a Gate);

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.0.state().readers -= 1;
        self.0.changed.notify_all();
    }
}

/// Exclusive access, until dropped.
pub struct Pass<'a>(&'a Gate);

impl Pass<'_> {
    /// Begins a call of the user's function. Nothing is written during the call, and readers wait
    /// until the call ends or exceeds its deadline.
    pub fn begin_call(&self, call: &Arc<Call>) {
        self.0.set(Writer::Calling(call.clone()));
    }

    /// Ends the call.
    pub fn end_call(&self) {
        self.0.set(Writer::Writing);
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.set(Writer::Absent);
    }
}
