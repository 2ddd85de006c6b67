// Made by `make protocol`; do not edit.
//! The protocol WBP/1, as `protocol/` describes it.

pub mod codes;
pub mod limits;
pub mod messages;
pub mod phases;
pub mod timers;
