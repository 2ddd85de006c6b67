// Package wbp implements the worker's side of the weight bus protocol WBP/1 (docs/PROTOCOL.md)
// without sockets, goroutines or clocks: messages go in with the current time, and effects come
// out.
package wbp

import "time"

// Limits of the protocol. A peer may send anything: these limits bound the memory that its messages
// can use here.
const (
	IntegerMax      = 1<<53 - 1       // the largest integer that every JSON library represents exactly
	HeaderBytesMax  = 65536           // a header holds names and numbers; bulk data is in payload frames
	DepthMax        = 32              // nesting that the parser accepts; senders stop at 16
	TextMax         = 4096            // characters of a reason, an address, a path
	MetadataMax     = 32              // metadata entries of one version
	MetadataNameMax = 128             // characters of an entry's name
	LabelMax        = 256             // characters of a client's description or a host
	FeaturesMax     = 64              // features in one message
	GroupKeysMax    = 2               // the current group key and, during a rotation, the previous one
	ModelsMax       = 64              // models of one worker, so that a hello fits a header
	ChunkBytesMax   = 1 << 26         // one chunk is one message, which both sides hold whole
	ChunksMax       = 1 << 20         // chunks of a version: a worker stores a few bytes for each
	LayoutBytesMax  = 100_000_000 + 8 // safetensors' limit of a header, and the length prefix
	TensorsMax      = 1_000_000       // about as many as a header of that size can hold
	RankMax         = 64              // numpy's limit of dimensions
	NameBytesMax    = 4096            // of a tensor's name: far beyond any module path
	MessageBytesMax = 100_065_536     // the largest frame that a worker accepts
	LayoutBytesFree = 1 << 20         // layouts up to this size are always accepted: some 10,000 tensors
	NamesFree       = 1 << 14         // names of a layout and its metadata that are always read: some 5 MB
	NameCost        = 512             // bytes of memory that one name counts as
	WindowChunks    = 16              // requested chunks that have not arrived yet
	ProgressChunks  = 16              // chunks between two reports: a quarter of those pushed ahead
	BytesMaxDefault = 1 << 36         // the largest version that a worker accepts by default
	EpochsKept      = 8               // epochs for which the publisher's age is stored
	BuffersMax      = 2               // staging buffers of a model: one complete, one arriving
	PatchesMax      = 8               // patches of one version, each on another base
	TriesMax        = 5               // fetches in a row without a new chunk: half a minute on slow links
)

// Timing has the intervals and timeouts of a worker (section 11 of the protocol).
type Timing struct {
	Ping        time.Duration // between two pings, and between repetitions of a report
	LostAfter   time.Duration // without a message, after which the publisher is lost
	DeafAfter   time.Duration // without a control message, after which the publisher is lost
	HelloRetry  time.Duration // between two hellos
	Quiet       time.Duration // without a chunk, after which missing chunks are fetched instead of awaited
	Report      time.Duration // between two reports of progress when chunks arrive slowly
	Patience    time.Duration // without a chunk, after which a fetch is repeated; doubles each time
	PatienceMax time.Duration // limit of Patience
}

// TimingOf returns the Timing for a ping interval; the default is TimingOf(1 s, 5 s).
func TimingOf(ping, lostAfter time.Duration) Timing {
	quick := 250 * time.Millisecond
	if ping < quick {
		quick = ping
	}
	return Timing{ping, lostAfter, 6 * lostAfter, quick, quick, quick * 2 / 5, ping, 16 * ping}
}

// never is a time long before the start of any clock.
const never = time.Duration(-1 << 61)
