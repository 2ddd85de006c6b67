package wbp

// These tables of phase x event -> phase define the phases of a version at a worker. Nothing else
// changes a phase.
//
//	announced ──> arriving ──> staged ──> ready ──> applying ──> running
//	    │             │           │         │           │           │
//	    └─────────────┴───────────┴─────────┴───────────┴───────────┴──> dropped, rejected
//
// An event without a transition from the current phase is ignored, since messages may be late,
// repeated or out of order. docs/PROTOCOL.md has the same tables (section 8), and
// tests/vectors/phases.json lists every pair of phase and event.

// A State is a state of one of the tables below, such as the phase of a version.
type State string

// An Event may change a state.
type Event string

// A Table maps each state and event to the next state. Events that change nothing are omitted.
type Table map[State]map[Event]State

// Phases of a version.
const (
	announced State = "announced" // its layout or memory is missing
	arriving  State = "arriving"  // its chunks are being received
	staged    State = "staged"    // complete and verified; waits for a commit
	ready     State = "ready"     // may be applied
	applying  State = "applying"  // an apply is in progress
	running   State = "running"
	dropped   State = "dropped"  // forgotten; it may be announced again
	rejected  State = "rejected" // not retried in this session
)

// Events of a version.
const (
	begun     Event = "begun"     // its layout is known and fits, and it has memory
	mapped    Event = "mapped"    // its segment is open, so it need not be staged
	whole     Event = "whole"     // all chunks and the digest have arrived, and match
	committed Event = "committed" // its commit is auto, or commit arrived, or it was announced again as auto
	taken     Event = "taken"     // an apply started
	putBack   Event = "put-back"  // the apply was postponed
	applied   Event = "applied"
	declined  Event = "declined" // a permanent failure, or the user rejected it
	failed    Event = "failed"   // a failure that may pass
	torn      Event = "torn"     // an apply failed half-way: the previously running version is lost, too
	stale     Event = "stale"    // its segment now holds another version
	renamed   Event = "renamed"  // a newer version has the same bytes
	newer     Event = "newer"    // a newer version replaces it
	gone      Event = "gone"     // the publisher no longer has it
	aborted   Event = "aborted"
	fenced    Event = "fenced" // a session of another epoch started
)

var arrows = Table{
	announced: {
		begun:    arriving,
		mapped:   ready,
		declined: rejected,
		failed:   dropped,
		newer:    dropped,
		gone:     dropped,
		aborted:  dropped,
		fenced:   dropped,
	},
	arriving: {
		whole:   staged,
		failed:  dropped,
		newer:   dropped,
		gone:    dropped,
		aborted: dropped,
		fenced:  dropped,
	},
	staged: {
		committed: ready,
		newer:     dropped,
		aborted:   dropped,
		fenced:    dropped,
	},
	ready: {
		taken: applying,
		newer: dropped,
	},
	applying: {
		applied:  running,
		putBack:  ready,
		declined: rejected,
		failed:   dropped,
		torn:     dropped,
		stale:    dropped,
		newer:    dropped,
	},
	running: {
		renamed: running,
		newer:   dropped,
		torn:    dropped,
	},
	dropped:  {},
	rejected: {},
}

// These states are what an announced version waits for. A missing layout was requested. A segment
// or memory is available at once or not at all. A buffer becomes free when another version returns
// it. The version is begun once it lacks only memory, and mapped once it lacks only a segment.
const (
	aLayout  State = "layout"
	aSegment State = "segment"
	aMemory  State = "memory"
	aBuffer  State = "buffer"

	known   Event = "known"
	located Event = "located"
	opened  Event = "opened"
	full    Event = "full"
	freed   Event = "freed"
)

var lacks = Table{
	aLayout:  {known: aMemory, located: aSegment},
	aSegment: {opened: aMemory},
	aMemory:  {full: aBuffer},
	aBuffer:  {freed: aMemory},
}

// These states are the ways in which an arriving version is received. In state received, the
// publisher pushes chunks, and lost ones are fetched. In state pulled, all missing chunks are
// fetched.
const (
	received State = "received"
	pulled   State = "pulled"
	copied   State = "copied"
	decoded  State = "decoded"

	unpushed    Event = "unpushed"
	copyStarted Event = "copy-started"
	patched     Event = "patched"
	copyEnded   Event = "copy-ended"
)

var coming = Table{
	received: {unpushed: pulled, copyStarted: copied},
	pulled:   {patched: decoded},
	copied:   {copyEnded: pulled},
	decoded:  {},
}

// These states tell whether a model's pushed chunks are received. A worker that dropped an arriving
// version for a newer one fetches that newer version completely before it starts another one
// (catchingUp). Otherwise a worker that is slower than its publisher would never complete a
// version.
const (
	following  State = "following"
	catchingUp State = "catching-up"

	replaced  Event = "replaced"
	completed Event = "completed"
)

var modes = Table{
	following:  {replaced: catchingUp},
	catchingUp: {completed: following},
}

// These states tell whether a worker has a session with its publisher. A worker that is probing has
// no session yet: its hello was answered, and it still tests whether it can read the publisher's
// memory.
const (
	outside State = "outside"
	probing State = "probing"
	inside  State = "inside"

	welcomed Event = "welcomed"
	unknown  Event = "unknown"
	refused  Event = "refused"
	silent   Event = "silent"
)

var sessions = Table{
	outside: {located: probing, welcomed: inside},
	probing: {
		located:  probing, // by another welcome
		welcomed: inside,
		unknown:  outside,
		refused:  outside,
		silent:   outside,
	},
	inside: {
		located:  probing, // by a publisher of another epoch
		welcomed: inside,  // the same
		unknown:  outside,
		refused:  outside,
		silent:   outside,
	},
}

// Tables has all tables by name, for tests.
var Tables = map[string]Table{
	"version": arrows, "announced": lacks, "arriving": coming, "model": modes, "worker": sessions,
}
