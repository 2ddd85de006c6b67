package wbp

// Tables define how events change the phase of a version at a worker. Nothing else changes a phase.
// This is the path of a version, which can be dropped in every phase:
//
//	announced ──> arriving ──> staged ──> ready ──> applying ──> running
//	    │             │           │         │           │           │
//	    └─────────────┴───────────┴─────────┴───────────┴───────────┴──> dropped, rejected
//
// An event without a transition from the current phase is ignored, since messages may be late,
// repeated or out of order. The tables are in tables.go. docs/PROTOCOL.md has the same tables
// (section 8), and tests/vectors/phases.json lists every pair of phase and event.

// A State is a state of one of the Tables, such as the phase of a version.
type State string

// An Event is what may change a State.
type Event string

// A Table maps each state and event to the next state. Events that change nothing are omitted.
type Table map[State]map[Event]State
