//! Phases of a publisher's workers, recipients, decisions and versions, which change only by the
//! transitions of the tables in `protocol/phases.rs`. This publisher does not use the events of ended
//! processes and of reclaimable memory.

use crate::phases::next;
pub use crate::protocol::phases::*;

/// A current state, and the table of its transitions.
#[derive(Clone, Copy)]
pub struct StateMachine<S: 'static, E: 'static>(S, &'static [(S, E, S)]);

impl<S: Copy + Default + PartialEq, E: Copy + PartialEq> StateMachine<S, E> {
    /// Starts in the default state of the table.
    pub fn new(table: &'static [(S, E, S)]) -> StateMachine<S, E> {
        StateMachine(S::default(), table)
    }

    pub fn state(&self) -> S {
        self.0
    }

    pub fn is(&self, state: S) -> bool {
        self.0 == state
    }

    /// Applies an event. Returns true if the table has this transition.
    pub fn apply_event(&mut self, event: E) -> bool {
        next(self.1, self.0, event).map(|state| self.0 = state).is_some()
    }
}
