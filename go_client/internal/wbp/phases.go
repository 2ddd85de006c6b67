package wbp

// Tables of phase x event -> phase define the phases of a version at a worker. Nothing else
// changes a phase.
//
//	announced ──> arriving ──> staged ──> ready ──> applying ──> running
//	    │             │           │         │           │           │
//	    └─────────────┴───────────┴─────────┴───────────┴───────────┴──> dropped, rejected
//
// An event without a transition from the current phase is ignored, since messages may be late,
// repeated or out of order. docs/PROTOCOL.md has the same tables (section 8), and
// tests/vectors/phases.json lists every pair of phase and event.

// A State is a state of one of the Tables, such as the phase of a version.
type State string

// An Event may change a state.
type Event string

// A Table maps each state and event to the next state. Events that change nothing are omitted.
type Table map[State]map[Event]State
