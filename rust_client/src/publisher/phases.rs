//! The phases of a publisher's workers, targets, decisions and versions. Nothing else than the tables
//! changes a phase. The transitions of ended processes and of reclaimable memory are unused here.

use crate::phases::next;
pub use crate::protocol::phases::*;

/// The current phase in a table.
#[derive(Clone, Copy)]
pub struct StateMachine<S: 'static, E: 'static>(S, &'static [(S, E, S)]);

impl<S: Copy + Default + PartialEq, E: Copy + PartialEq> StateMachine<S, E> {
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
