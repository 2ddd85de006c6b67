// Package wbp is the worker's side of the weight bus protocol WBP/1 (docs/PROTOCOL.md), without
// sockets, goroutines or clocks: what arrives goes in with the time, what is to be done comes out.
package wbp

import "time"

// Bounds of the protocol. A peer may send anything; what it can make this side remember or
// allocate is bounded here.
const (
	IntegerMax      = 1<<53 - 1       // the largest integer that every JSON library carries exactly
	HeaderBytesMax  = 65536           // a header holds names and numbers; bulk travels in payload frames
	DepthMax        = 32              // nesting that a reader of JSON follows; senders stop at 16
	TextMax         = 4096            // characters of a reason, an address, a path
	MetadataMax     = 32              // entries of what is said of one version
	MetadataNameMax = 128             // characters of the name of one
	LabelMax        = 256             // characters of a client's description or a host
	FeaturesMax     = 64              // features that one side can name
	GroupKeysMax    = 2               // group keys of a session: one, and the one before while it changes
	ModelsMax       = 64              // models of one worker, so that a hello fits a header
	ChunkBytesMax   = 1 << 26         // one chunk is one message, held whole by either side
	ChunksMax       = 1 << 20         // chunks of a version: a worker keeps a few bytes for each
	LayoutBytesMax  = 100_000_000 + 8 // safetensors' own bound on a header, and the length before it
	TensorsMax      = 1_000_000       // about what a header of that size can hold
	RankMax         = 64              // numpy's bound on dimensions
	NameBytesMax    = 4096            // of a tensor's name: far beyond any module path
	MessageBytesMax = 100_065_536     // the largest frame that a worker accepts
	LayoutBytesFree = 1 << 20         // of a layout that is taken however small BytesMax is: some 10,000 tensors
	NamesFree       = 1 << 14         // names of a layout, of metadata too, that are read however small BytesMax is: some 5 MB
	NameCost        = 512             // bytes of memory that a name of a layout counts as, with all that is kept of it
	WindowChunks    = 16              // chunks that a worker asks for before an answer
	ProgressChunks  = 16              // chunks between two reports: a quarter of what a push runs ahead
	BytesMaxDefault = 1 << 36         // bytes of one version that a worker takes unless told otherwise
	EpochsKept      = 8               // epochs of which the publisher's age is remembered
	BuffersMax      = 2               // staging buffers of a model: one complete, one arriving
	PatchesMax      = 8               // patches that lead to a version: one to each that workers may run
	TriesMax        = 5               // times that nothing new comes, until a version is fetched in place of a patch, or announced anew: half a minute
)

// Timing is how long a worker waits (section 11 of the protocol).
type Timing struct {
	Ping        time.Duration // between two pings and repetitions
	LostAfter   time.Duration // silence after which the publisher is lost
	DeafAfter   time.Duration // silence of the control channel alone after which it is lost
	HelloRetry  time.Duration // between two hellos
	Quiet       time.Duration // silence after which a push is no longer waited for
	Report      time.Duration // between two reports of progress where chunks come slowly
	Patience    time.Duration // silence after which a fetch is repeated; doubles each time
	PatienceMax time.Duration // its bound
}

// TimingOf returns the timers that follow from the ping interval; the defaults are TimingOf(1 s, 5 s).
func TimingOf(ping, lostAfter time.Duration) Timing {
	quick := 250 * time.Millisecond
	if ping < quick {
		quick = ping
	}
	return Timing{ping, lostAfter, 6 * lostAfter, quick, quick, quick * 2 / 5, ping, 16 * ping}
}

// never is a moment long before the start of any clock.
const never = time.Duration(-1 << 61)
