// Package wbp implements the worker's side of the weight bus protocol WBP/1 (docs/PROTOCOL.md)
// without sockets, goroutines or clocks: messages go in with the current time, and effects come out.
package wbp

import "time"

// Limits of this worker.
const (
	DepthMax              = 32      // depth of nested JSON that the parser accepts; senders use at most 16
	LayoutBytesGuaranteed = 1 << 20 // layouts up to this size are always accepted: some 10,000 tensors
	NamesGuaranteed       = 1 << 14 // number of names in a layout that is always accepted: some 5 MB of memory
	NameCost              = 512     // bytes of memory that one name counts as
	BytesMaxDefault       = 1 << 36 // size of the largest version that a worker accepts by default
	EpochsKept            = 8       // number of epochs for which the publisher's age is stored
	BuffersMax            = 2       // staging buffers of a model: one complete, one arriving
)

// TimingOf returns the Timing for a ping interval; the default is TimingOf(1 s, 5 s).
func TimingOf(ping, lostAfter time.Duration) Timing {
	quick := 250 * time.Millisecond
	if ping < quick {
		quick = ping
	}
	return Timing{Ping: ping, LostAfter: lostAfter, DeafAfter: 6 * lostAfter, HelloRetry: quick, Quiet: quick,
		Report: quick * 2 / 5, Patience: ping, PatienceMax: 16 * ping}
}

// never is a time long before the start of any clock.
const never = time.Duration(-1 << 61)
