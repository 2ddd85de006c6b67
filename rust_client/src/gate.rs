//! Who is in a model's memory, and who waits.
//!
//! A writer that waits goes before new readers, so that steady reading cannot keep new weights out; but
//! it waits for a limited time only, and so does nobody for ever. While the user's function decides on
//! what was written, readers wait, too; once its time is over they find out what it left behind.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What has come of a call.
#[derive(Clone, Copy, PartialEq)]
pub enum Fate {
    UnderWay,
    Returned,
    Overdue,
}

/// A call of the user's function. It returns in time or it does not: whoever looks first decides.
pub struct Call {
    by: Instant,
    fate: Mutex<Fate>,
}

impl Call {
    pub fn new(by: Instant) -> Call {
        Call { by, fate: Mutex::new(Fate::UnderWay) }
    }

    pub fn fate(&self) -> Fate {
        let late = Instant::now() >= self.by;
        self.settle(if late { Fate::Overdue } else { Fate::UnderWay })
    }

    /// It has returned; tells whether that was in time.
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

/// What a writer does.
#[derive(Default)]
enum Writer {
    #[default]
    Nobody,
    Writes,
    Calls(Arc<Call>),
}

#[derive(Default)]
struct State {
    readers: usize,
    writer: Writer,
    writers_waiting: usize,
}

/// A place for many readers or one writer.
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

    /// Lets a reader in.
    pub fn read(&self) -> Reader<'_> {
        let mut state = self.state();
        loop {
            let until = match &state.writer {
                Writer::Nobody if state.writers_waiting == 0 => break,
                Writer::Calls(call) if call.fate() == Fate::Overdue => break,
                Writer::Calls(call) => Some(call.by),
                _ => None,
            };
            state = self.wait(state, until);
        }
        state.readers += 1;
        Reader(self)
    }

    /// Lets a reader in who is soon gone, before writers who wait; nothing if one is there until the deadline.
    pub fn look(&self, deadline: Instant) -> Option<Reader<'_>> {
        let mut state = self.state();
        while !matches!(state.writer, Writer::Nobody) {
            if Instant::now() >= deadline {
                return None;
            }
            state = self.wait(state, Some(deadline));
        }
        state.readers += 1;
        Some(Reader(self))
    }

    /// Lets a writer in, once nobody else is; nothing if somebody is until the deadline, or until it is
    /// wanted no longer, which is looked at whenever somebody is let in or out, and at `wake`.
    pub fn write(&self, deadline: Instant, wanted: &dyn Fn() -> bool) -> Option<Pass<'_>> {
        let mut state = self.state();
        state.writers_waiting += 1;
        while state.readers > 0 || !matches!(state.writer, Writer::Nobody) {
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

    /// Has those who wait look again at whether they are wanted.
    pub fn wake(&self) {
        drop(self.state()); // whoever has just looked waits by now
        self.moved.notify_all();
    }

    fn set(&self, writer: Writer) {
        self.state().writer = writer;
        self.moved.notify_all();
    }

    /// Whether a call is under way whose time is over.
    pub fn is_overdue(&self) -> bool {
        matches!(&self.state().writer, Writer::Calls(call) if call.fate() == Fate::Overdue)
    }
}

/// A reader's right to be there.
pub struct Reader<'a>(&'a Gate);

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.0.state().readers -= 1;
        self.0.moved.notify_all();
    }
}

/// A writer's right to be there alone.
pub struct Pass<'a>(&'a Gate);

impl Pass<'_> {
    /// Nothing is written during a call: readers wait for its end, or for its time to be over.
    pub fn calls(&self, call: &Arc<Call>) {
        self.0.set(Writer::Calls(call.clone()));
    }

    /// The call is over.
    pub fn writes(&self) {
        self.0.set(Writer::Writes);
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.set(Writer::Nobody);
    }
}
