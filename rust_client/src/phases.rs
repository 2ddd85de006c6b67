//! The phases of versions, models and sessions at a worker, as tables of (phase, event, next
//! phase). A phase changes only by a transition in these tables.
//!
//! ```text
//! announced ──> arriving ──> staged ──> ready ──> applying ──> running
//!     │             │           │         │           │           │
//!     └─────────────┴───────────┴─────────┴───────────┴───────────┴──> dropped, rejected
//! ```
//!
//! An event that has no transition from the current phase changes nothing: messages can arrive
//! late, twice and in any order. The tables are generated from the description of the protocol.

pub use crate::protocol::phases::*;

/// Returns the state that an event leads to; `None` if the table has no such transition.
pub fn next<S: Copy + PartialEq, E: Copy + PartialEq>(table: &[(S, E, S)], state: S, event: E) -> Option<S> {
    table.iter().find(|(from, by, _)| (*from, *by) == (state, event)).map(|&(_, _, to)| to)
}
