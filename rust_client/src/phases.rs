//! The phases of versions, models, sessions, workers, targets and decisions, as tables of (phase,
//! event, next phase). Nothing else changes a phase.
//!
//! ```text
//! announced ──> arriving ──> staged ──> ready ──> applying ──> running
//!     │             │           │         │           │           │
//!     └─────────────┴───────────┴─────────┴───────────┴───────────┴──> dropped, rejected
//! ```
//!
//! An event without an arrow from a phase changes nothing: messages come late, twice and in any
//! order. The tables are made from the description of the protocol. A publisher uses no transitions
//! of ended processes and of reclaimable memory.

pub use crate::protocol::phases::*;

/// Returns the state that an event leads to; `None` if the table has no such transition.
pub fn next<S: Copy + PartialEq, E: Copy + PartialEq>(table: &[(S, E, S)], state: S, event: E) -> Option<S> {
    table.iter().find(|(from, by, _)| (*from, *by) == (state, event)).map(|&(_, _, to)| to)
}

/// The current phase in a table.
#[derive(Clone, Copy)]
pub struct At<S: 'static, E: 'static>(S, &'static [(S, E, S)]);

impl<S: Copy + Default + PartialEq, E: Copy + PartialEq> At<S, E> {
    pub fn first(table: &'static [(S, E, S)]) -> At<S, E> {
        At(S::default(), table)
    }

    pub fn now(&self) -> S {
        self.0
    }

    pub fn is(&self, state: S) -> bool {
        self.0 == state
    }

    /// Applies an event. Returns true if the table has this transition.
    pub fn take(&mut self, event: E) -> bool {
        next(self.1, self.0, event).map(|state| self.0 = state).is_some()
    }
}
