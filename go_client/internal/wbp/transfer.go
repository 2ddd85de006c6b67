package wbp

import (
	"bytes"
	"hash/crc32"
	"time"
)

// States of a chunk.
//
//	missing ──fetch──> asked ──┐
//	   │                 │     ├──> here
//	   ├─────push────────┼─────┤
//	   └─────lend────────┴─> lent ──damaged, cut off──> missing
//
// A chunk is lent while its bytes are being received straight into their place. Whatever else
// comes of it meanwhile is ignored, since nobody may write there twice.
const (
	missing byte = iota
	asked
	here
	lent
)

const damagedMax = 16 // damaged chunks that are asked for again at once, before patience decides

// A Lease is memory into which a payload is being received, piece by piece.
type Lease struct {
	view  []byte
	count int       // bytes that are here
	crc   uint32    // of these, computed while they are in the cache
	owner *Transfer // nil: the memory belongs to the lease alone
	index int64     // of the chunk
	seen  int       // how much was here when the transfer looked last
	over  bool      // the memory serves another purpose by now: keep out
}

// Room returns where the next bytes go; nil if nobody wants them any more.
func (l *Lease) Room() []byte {
	if l.over {
		return nil
	}
	return l.view[l.count:]
}

// Received takes note of so many bytes in Room().
func (l *Lease) Received(n int) {
	if l.owner != nil {
		l.crc = crc32.Update(l.crc, castagnoli, l.view[l.count:l.count+n])
	}
	l.count += n
}

// Payload returns all of the memory; nil if nobody wants it any more.
func (l *Lease) Payload() []byte {
	if l.over {
		return nil
	}
	return l.view
}

// Cancel says that the rest will never come.
func (l *Lease) Cancel() {
	if l.owner != nil {
		l.owner.revoke(l)
	}
}

// A Transfer is one version on its way into a staging buffer, pushed and fetched in any order.
//
// Pushed chunks come in order, so whatever lies below the highest pushed one was dropped and is
// fetched at once. What lies above may still be pushed: it is fetched after the end, or when
// nothing has arrived for a while. At most a window of chunks is asked for; an answer that does
// not come in time turns all of them back to missing, and the patience doubles until something
// arrives.
type Transfer struct {
	Announce *Announce
	Layout   *Layout
	Buffer   []byte
	Key      Key
	Here     int64  // chunks that have arrived
	Restarts int    // times the whole did not match its digest
	Digest   string // from the end; empty: not known yet

	reportedAt time.Duration // when the publisher was told last how far this is

	plan     Plan
	states   []byte
	crcs     []uint32
	damaged  int
	asked    int
	cursor   int // nothing below it is missing
	pushed   int // everything below it was pushed, or dropped on the way
	leases   []*Lease
	timing   *Timing
	heardAt  time.Duration
	patience time.Duration
	gap      time.Duration // between two chunks, the longest lately
	endAsked bool
	pulling  bool // nothing more will be pushed, as far as we can tell
}

// newTransfer begins to receive a version into a buffer of announce.Bytes bytes.
func newTransfer(announce *Announce, layout *Layout, buffer []byte, now time.Duration, timing *Timing) *Transfer {
	plan := Plan{announce.Bytes, announce.ChunkBytes}
	return &Transfer{
		Announce: announce, Layout: layout, Buffer: buffer, Key: Key{announce.Epoch, announce.Version},
		plan: plan, states: make([]byte, plan.Count()), crcs: make([]uint32, plan.Count()),
		timing: timing, heardAt: now, reportedAt: now, patience: timing.Patience,
	}
}

func (t *Transfer) count() int { return len(t.states) }

func (t *Transfer) complete() bool { return t.Here == int64(t.count()) && t.Digest != "" }

// add takes a chunk and returns whether it is new and sound. A chunk that is neither is ignored.
// lease is the one that its payload was received into, if there was one.
func (t *Transfer) add(chunk *Chunk, payload []byte, lease *Lease, now time.Duration, pushed bool) bool {
	if chunk.Index >= int64(t.count()) {
		return false
	}
	index := int(chunk.Index)
	if pushed && index >= t.pushed { // W10
		t.pushed = index + 1
	}
	if lease != nil && lease.owner == t && !lease.over && lease.index == chunk.Index {
		t.revoke(lease)
		if lease.count != len(lease.view) || lease.crc != chunk.CRC {
			t.reject(index)
			return false
		}
	} else if !t.copy(index, chunk.CRC, payload) { // W9
		return false
	}
	t.states[index] = here
	t.crcs[index] = chunk.CRC
	t.Here++
	t.hear(now)
	return true
}

// copy takes a payload that was received elsewhere.
func (t *Transfer) copy(index int, crc uint32, payload []byte) bool {
	if state := t.states[index]; state == here || state == lent || len(payload) == 0 {
		return false
	}
	begin, end := t.plan.Span(int64(index))
	if int64(len(payload)) != end-begin || CRC32C(payload) != crc {
		t.reject(index)
		return false
	}
	copy(t.Buffer[begin:end], payload)
	t.take(index)
	return true
}

// take makes room in the window if the chunk was asked for.
func (t *Transfer) take(index int) {
	if t.states[index] == asked {
		t.asked--
	}
}

// lend returns the place of a chunk of this size, to receive it there; nil if it has none.
func (t *Transfer) lend(index int64, size int) *Lease {
	if index >= int64(t.count()) || t.states[index] == here || t.states[index] == lent {
		return nil
	}
	begin, end := t.plan.Span(index)
	if int64(size) != end-begin {
		return nil
	}
	t.take(int(index))
	t.states[index] = lent
	lease := &Lease{view: t.Buffer[begin:end:end], owner: t, index: index}
	t.leases = append(t.leases, lease)
	return lease
}

// revoke ends a lease: nothing may be written there any more.
func (t *Transfer) revoke(lease *Lease) {
	for i, known := range t.leases {
		if known == lease {
			t.leases = append(t.leases[:i], t.leases[i+1:]...)
			lease.over = true
			t.miss(int(lease.index))
			return
		}
	}
}

func (t *Transfer) revokeAll() {
	for len(t.leases) > 0 {
		t.revoke(t.leases[0])
	}
}

// miss makes sure that a chunk is fetched.
func (t *Transfer) miss(index int) {
	t.states[index] = missing
	if index < t.cursor {
		t.cursor = index
	}
}

// reject drops a damaged chunk: it is fetched again, at once for the first few, else in due time.
func (t *Transfer) reject(index int) {
	t.damaged++
	if t.states[index] == asked && t.damaged <= damagedMax {
		t.asked--
		t.states[index] = missing
	}
	if t.states[index] == missing {
		t.miss(index)
	}
}

// hear is patient in proportion to how long something took to arrive, for slow links.
func (t *Transfer) hear(now time.Duration) {
	t.gap = longer(now-t.heardAt, t.gap*7/8)
	t.patience = longer(t.timing.Patience, 4*t.gap) // W32
	if t.patience > t.timing.PatienceMax {
		t.patience = t.timing.PatienceMax
	}
	t.heardAt = now
}

func longer(a, b time.Duration) time.Duration {
	if a > b {
		return a
	}
	return b
}

// end takes the digest of the whole: no more chunks will be pushed.
func (t *Transfer) end(digest string) { t.Digest, t.pulling = digest, true }

// pull says that nothing will be pushed.
func (t *Transfer) pull() { t.pulling = true }

// read takes every chunk from memory that holds the whole version.
func (t *Transfer) read(data []byte) {
	t.revokeAll()
	for i := range t.states {
		begin, end := t.plan.Span(int64(i))
		copy(t.Buffer[begin:end], data[begin:end])
		t.states[i], t.crcs[i] = here, CRC32C(t.Buffer[begin:end])
	}
	t.Here, t.asked, t.cursor = int64(t.count()), 0, t.count()
}

// unread forgets what read took: it was another version by the end.
func (t *Transfer) unread() { t.Here, t.states, t.cursor = 0, make([]byte, t.count()), 0 }

// wants returns what to fetch now; a Fetch of no chunks asks for announcement and end.
func (t *Transfer) wants(now time.Duration) []Message {
	for _, lease := range t.leases {
		if lease.count > lease.seen {
			lease.seen, t.heardAt = lease.count, now
		}
	}
	silent := now - t.heardAt
	if silent >= t.timing.Quiet { // W30
		t.pulling = true
	}
	if silent >= t.patience { // W12, W32
		t.askAgain(now)
		t.patience *= 2
		if t.patience > t.timing.PatienceMax {
			t.patience = t.timing.PatienceMax
		}
	}
	var fetches []Message
	if t.Digest == "" && t.pulling && !t.endAsked {
		t.endAsked = true
		fetches = append(fetches, t.fetch(0, 0))
	}
	if t.asked <= WindowChunks/2 { // W11
		fetches = t.ranges(fetches)
	}
	return fetches
}

func (t *Transfer) fetch(first, count int) Message {
	return &Fetch{Model: t.Announce.Model, Epoch: t.Key.Epoch, Version: t.Key.Version,
		First: int64(first), Count: int64(count)}
}

// ranges asks for missing chunks until the window is full.
func (t *Transfer) ranges(fetches []Message) []Message {
	limit := t.pushed
	if t.pulling {
		limit = t.count()
	}
	for t.asked < WindowChunks {
		if t.cursor >= limit {
			return fetches
		}
		found := bytes.IndexByte(t.states[t.cursor:limit], missing)
		if found < 0 {
			t.cursor = limit
			return fetches
		}
		first := t.cursor + found
		last := first
		for last < limit && t.states[last] == missing && t.asked < WindowChunks {
			t.states[last] = asked
			t.asked++
			last++
		}
		t.cursor = last
		fetches = append(fetches, t.fetch(first, last-first))
	}
	return fetches
}

// verify returns whether the whole is what was published; if not, it starts over.
func (t *Transfer) verify() bool {
	if t.Digest == Digest(t.Announce.Layout, t.plan.ChunkBytes, t.crcs) {
		return true
	}
	t.Restarts++
	t.unread()
	t.asked, t.pushed = 0, 0
	t.Digest, t.endAsked, t.pulling = "", false, true
	return false
}

// reconnected says that what was asked on the connection before will not come.
func (t *Transfer) reconnected(now time.Duration) {
	t.askAgain(now)
	t.pulling = true
}

// askAgain takes everything outstanding for lost, a payload that has stopped to arrive included.
func (t *Transfer) askAgain(now time.Duration) {
	t.revokeAll()
	for i, state := range t.states {
		if state == asked {
			t.states[i] = missing
		}
	}
	t.asked, t.cursor, t.endAsked, t.heardAt = 0, 0, false, now
}
