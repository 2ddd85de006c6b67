package wbp

// What a version goes through at a worker: phase x event -> phase. Nothing else moves one.
//
//	announced ──> arriving ──> staged ──> ready ──> applying ──> running
//	    │             │           │         │           │           │
//	    └─────────────┴───────────┴─────────┴───────────┴───────────┴──> dropped, rejected
//
// An event that has no arrow from a version's phase changes nothing: messages come late, twice and in
// any order. docs/PROTOCOL.md has the same tables (section 8), and tests/vectors/phases.json has every
// arrow, and every pair without one.

// A State is the phase of a version, the mode of a model, or whether a worker has a session.
type State string

// An Event may lead to another state.
type Event string

// A Table says what an event leads to in each state; nothing where it changes nothing.
type Table map[State]map[Event]State

// Phases of a version.
const (
	announced State = "announced" // there is such a version; its layout or memory is missing
	arriving  State = "arriving"  // its chunks are coming
	staged    State = "staged"    // whole and verified; waits for a commit
	ready     State = "ready"     // the user may apply it
	applying  State = "applying"  // the user does
	running   State = "running"
	dropped   State = "dropped"  // of no use; it may be announced again
	rejected  State = "rejected" // not tried again in this session
)

// What happens to a version.
const (
	begun     Event = "begun"     // its layout is known and fits, and there is memory
	mapped    Event = "mapped"    // its segment is open, and it need not be staged
	whole     Event = "whole"     // all chunks and the digest are here, and match
	committed Event = "committed" // it is auto, or commit came, or it is announced as auto
	taken     Event = "taken"     // the user begins to apply it
	putBack   Event = "put-back"  // the user will apply it later
	applied   Event = "applied"
	declined  Event = "declined" // a check fails that a repetition will not mend, or the user turns it down
	failed    Event = "failed"   // something fails that may be otherwise next time
	torn      Event = "torn"     // an apply has failed half-way: what ran is gone, too
	stale     Event = "stale"    // its segment holds another version by now
	renamed   Event = "renamed"  // a newer version has the same bytes
	newer     Event = "newer"    // a newer version takes its place
	gone      Event = "gone"     // the publisher has it no more
	aborted   Event = "aborted"
	fenced    Event = "fenced" // a session of another epoch has begun
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

// Of an announced version: what it lacks. Who lacks a layout has asked for it; a segment and memory are there at
// once, or are not to be had; a buffer is when another version lets go of one. It is begun once it lacks no more than
// memory, and mapped once it lacks no more than a segment.
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

// Of an arriving version: how it comes. A chunk that is received may have been asked for; where nothing more is
// pushed, all are.
const (
	received State = "received"
	pulled   State = "pulled"
	copied   State = "copied"
	decoded  State = "decoded"

	unpushed Event = "unpushed"
	lentOut  Event = "lent"
	patched  Event = "patched"
	returned Event = "returned"
)

var coming = Table{
	received: {unpushed: pulled, lentOut: copied},
	pulled:   {patched: decoded},
	copied:   {returned: pulled},
	decoded:  {},
}

// Of a model: whether its worker takes what is pushed. Who had to drop an arriving version for a newer
// one finishes the next, by fetching, before it looks at anything newer; else one that is slower than
// its publisher would never complete any.
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

// Of a worker: whether it has a session with its publisher. While it probes it has none: its hello is answered, and
// it is yet to be seen whether the publisher's memory can be read.
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

// Tables are all of them, by what they are of.
var Tables = map[string]Table{
	"version": arrows, "announced": lacks, "arriving": coming, "model": modes, "worker": sessions,
}
