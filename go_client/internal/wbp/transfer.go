package wbp

import (
	"bytes"
	"hash/crc32"
	"time"
)

// States of a chunk, and what changes them:
//
//	missing               a fetch is sent                              requested
//	missing, requested    the payload arrives in other memory          here
//	missing, requested    the payload begins to enter the buffer       leased
//	leased                the payload is complete and valid            here
//	leased                the payload is damaged or cut off            missing
//
// While a chunk is leased, payloads of it from elsewhere are ignored: its memory has only one writer.
const (
	missing byte = iota
	requested
	here
	leased
)

const damagedMax = 16 // damaged chunks that are requested again without waiting for a timeout

// A Lease is memory into which a payload is received in parts.
type Lease struct {
	view    []byte
	count   int       // bytes received so far
	crc     uint32    // of the received bytes, computed while they are in the cache
	opening *Opening  // decrypts the complete payload in place; nil if the payload is not sealed
	owner   *Transfer // nil if the memory is not part of a transfer
	index   int64     // of the chunk
	checked int       // count when dueFetches was last called
	ended   bool      // the memory must no longer be written
}

// Room returns the memory for the next bytes; nil if the lease has ended.
func (l *Lease) Room() []byte {
	if l.ended {
		return nil
	}
	return l.view[l.count:]
}

// Received records that the caller has written n bytes into the slice that Room returned.
func (l *Lease) Received(n int) {
	if l.owner != nil && l.opening == nil {
		l.crc = crc32.Update(l.crc, castagnoli, l.view[l.count:l.count+n])
	}
	l.count += n
}

// Payload returns the whole memory of the lease; nil if the lease has ended.
func (l *Lease) Payload() []byte {
	if l.ended {
		return nil
	}
	return l.view
}

// verify reports whether the payload is complete and valid, and returns its CRC-32C. It decrypts a
// sealed payload in place. p has the expected checksum of any other payload.
func (l *Lease) verify(p proof) (crc uint32, valid bool) {
	if l.count != len(l.view) {
		return 0, false
	}
	if l.opening != nil {
		return l.opening.Decrypt(l.view, l.view)
	}
	return l.crc, p == checksum(l.crc)
}

// A proof checks a chunk's payload. copyTo also writes the payload, decrypted, into `to` if it is valid.
type proof interface {
	copyTo(to, payload []byte) (crc uint32, valid bool)
}

// A checksum is the proof of a chunk that is not sealed.
type checksum uint32

func (c checksum) copyTo(to, payload []byte) (crc uint32, valid bool) {
	if CRC32C(payload) != uint32(c) {
		return 0, false
	}
	copy(to, payload)
	return uint32(c), true
}

// Cancel ends the lease of a payload that will not be completed.
func (l *Lease) Cancel() {
	if l.owner != nil {
		l.owner.endLease(l)
	}
}

// A Transfer receives one version into a staging buffer. The version's chunks are pushed or
// fetched, and arrive in any order. A transfer of a patch receives the patch into separate memory,
// and the version is decoded from the patch.
//
// Pushed chunks arrive in order. So a missing chunk below the highest pushed chunk was lost, and is
// fetched at once. Missing chunks above it may still be pushed, and are fetched after the end
// message, or when nothing has arrived for a while. At most WindowChunks chunks are requested at a
// time. If no chunk arrives within the retry delay, all requested chunks become missing, and the
// delay doubles until a chunk arrives. The publisher answers fetches and pings in order: as long as it
// has not answered a ping that was sent after a fetch, the requested chunks may be on their way.
type Transfer struct {
	Announce *Announce
	Layout   *Layout
	Buffer   []byte
	Key      Key
	Here     int64  // number of chunks that have arrived
	Restarts int    // number of digest mismatches
	Digest   string // from the end message; empty before

	patch     *PatchOffer   // the patch that is received; nil: the whole version
	base      *base         // the base of the patch, until detachBase
	job       *Patching     // while the patch is being decoded
	took      time.Duration // time to decode the patch, once decoded
	unpatched string        // the reason why no offered patch is received
	timeouts  int           // number of timeouts in a row on the same connection

	reportedAt time.Duration // when progress was last reported

	plan           Plan
	states         []byte
	crcs           []uint32
	damaged        int // number of damaged chunks
	requestedCount int // number of chunks in state requested
	cursor         int // no chunk with a lower index is missing
	pushedEnd      int // all chunks with a lower index were pushed; some may have been lost
	leases         []*Lease
	timing         *Timing
	heardAt        time.Duration // when the last chunk arrived
	fetchedAt      time.Duration // when the last fetch was sent
	answeredTo     time.Duration // when the last answered ping was sent
	retryDelay     time.Duration
	gap            time.Duration // the longest recent time between two chunks
	endRequested   bool
	arrival        State // a state of arrivingTable
}

// newTransfer returns a transfer of a whole version into a buffer of its size. why is the reason that
// none of the offered patches is received; "" if none was offered.
func newTransfer(announce *Announce, layout *Layout, buffer []byte, why string, now time.Duration, timing *Timing) *Transfer {
	t := receive(announce, layout, buffer, now, timing)
	t.unpatched = truncate(why, LabelMax)
	return t
}

// newTransferOfPatch returns a transfer of a patch on base b into a buffer of the patch's size.
func newTransferOfPatch(patch *PatchOffer, b *base, announce *Announce, layout *Layout, buffer []byte, now time.Duration,
	timing *Timing) *Transfer {
	t := receive(announce, layout, buffer, now, timing)
	t.patch, t.base = patch, b
	return t
}

func receive(announce *Announce, layout *Layout, buffer []byte, now time.Duration, timing *Timing) *Transfer {
	plan := Plan{int64(len(buffer)), announce.ChunkBytes}
	return &Transfer{
		Announce: announce, Layout: layout, Buffer: buffer, Key: Key{announce.Epoch, announce.Version},
		plan: plan, states: make([]byte, plan.Count()), crcs: make([]uint32, plan.Count()),
		timing: timing, heardAt: now, fetchedAt: now, answeredTo: never, reportedAt: now, retryDelay: timing.Patience, arrival: received,
	}
}

func (t *Transfer) count() int { return len(t.states) }

// patchID returns the id of the patch that is received, or nil if the whole version is received.
func (t *Transfer) patchID() *PatchID {
	if t.patch == nil {
		return nil
	}
	return &t.patch.PatchID
}

// matches reports whether a message belongs to this transfer. patch is the message's patch, or nil
// if the message is about the whole version. (D9)
func (t *Transfer) matches(patch *PatchID) bool {
	if t.patch == nil || patch == nil {
		return t.patch == nil && patch == nil
	}
	return t.patch.PatchID == *patch
}

// isExhausted reports whether TriesMax requests in a row have brought no new chunk.
func (t *Transfer) isExhausted() bool { return t.arrival != decoded && t.timeouts >= TriesMax }

func (t *Transfer) complete() bool { return t.Here == int64(t.count()) && t.Digest != "" }

// add stores a chunk, and returns true if the chunk is new and valid. It ignores any other chunk.
// lease is the memory that the payload was received into, or nil if the payload is in other memory.
func (t *Transfer) add(index64 int64, p proof, payload []byte, lease *Lease, now time.Duration, pushed bool) bool {
	if index64 >= int64(t.count()) {
		return false
	}
	index, crc, valid := int(index64), uint32(0), false
	if pushed && index >= t.pushedEnd { // W10
		t.pushedEnd = index + 1
	}
	if lease != nil && lease.owner == t && !lease.ended && lease.index == index64 {
		t.endLease(lease)
		if crc, valid = lease.verify(p); !valid {
			t.reject(index)
			return false
		}
	} else if crc, valid = t.copy(index, p, payload); !valid { // W9
		return false
	}
	t.states[index] = here
	t.crcs[index] = crc
	t.Here++
	t.recordArrival(now)
	return true
}

// copy stores a payload that is in other memory. valid is false if the chunk is not wanted or not valid.
func (t *Transfer) copy(index int, p proof, payload []byte) (crc uint32, valid bool) {
	if state := t.states[index]; state == here || state == leased || len(payload) == 0 {
		return 0, false
	}
	begin, end := t.plan.Span(int64(index))
	if int64(len(payload)) == end-begin {
		crc, valid = p.copyTo(t.Buffer[begin:end], payload)
	}
	if !valid {
		t.reject(index)
		return 0, false
	}
	t.unrequest(index)
	return crc, true
}

// unrequest stops counting a chunk as requested, so that the window has room for another request.
func (t *Transfer) unrequest(index int) {
	if t.states[index] == requested {
		t.requestedCount--
	}
}

// fits reports whether size is the size of the chunk with this index.
func (t *Transfer) fits(index int64, size int) bool {
	if index >= int64(t.count()) {
		return false
	}
	begin, end := t.plan.Span(index)
	return int64(size) == end-begin
}

// newLease returns a lease to receive a chunk into the buffer, or nil if the chunk is not wanted.
// opening decrypts the chunk, or is nil if the chunk is not sealed.
func (t *Transfer) newLease(index int64, size int, opening *Opening) *Lease {
	if !t.fits(index, size) || t.states[index] == here || t.states[index] == leased {
		return nil
	}
	t.unrequest(int(index))
	t.states[index] = leased
	begin, end := t.plan.Span(index)
	// Opening.Decrypt uses the bytes after the view for the tag, and restores these bytes.
	lease := &Lease{view: t.Buffer[begin:end], opening: opening, owner: t, index: index}
	t.leases = append(t.leases, lease)
	return lease
}

// endLease ends a lease: its memory must no longer be written. The chunk becomes missing.
func (t *Transfer) endLease(lease *Lease) {
	for i, known := range t.leases {
		if known == lease {
			t.leases = append(t.leases[:i], t.leases[i+1:]...)
			lease.ended = true
			t.markMissing(int(lease.index))
			return
		}
	}
}

func (t *Transfer) endAllLeases() {
	for len(t.leases) > 0 {
		t.endLease(t.leases[0])
	}
}

// markMissing marks a chunk as missing, so that it is fetched.
func (t *Transfer) markMissing(index int) {
	t.states[index] = missing
	if index < t.cursor {
		t.cursor = index
	}
}

// reject drops a damaged chunk. The first damagedMax damaged chunks are requested again at once,
// later ones after a timeout.
func (t *Transfer) reject(index int) {
	t.damaged++
	if t.states[index] == requested && t.damaged <= damagedMax {
		t.requestedCount--
		t.states[index] = missing
	}
	if t.states[index] == missing {
		t.markMissing(index)
	}
}

// recordArrival records that a chunk arrived, and adapts the retry delay to the time between chunks,
// so that a slow link does not cause timeouts.
func (t *Transfer) recordArrival(now time.Duration) {
	t.timeouts = 0
	t.gap = longer(now-t.heardAt, t.gap*7/8)
	t.retryDelay = longer(t.timing.Patience, 4*t.gap) // W32
	if t.retryDelay > t.timing.PatienceMax {
		t.retryDelay = t.timing.PatienceMax
	}
	t.heardAt = now
}

func longer(a, b time.Duration) time.Duration {
	if a > b {
		return a
	}
	return b
}

// end records the digest from the end message. After that message no more chunks are pushed.
func (t *Transfer) end(digest string) {
	t.Digest = digest
	t.pull()
}

// pull makes dueFetches fetch all missing chunks from now on: probably none will be pushed.
func (t *Transfer) pull() { t.changeArrival(unpushed) }

func (t *Transfer) changeArrival(event Event) {
	if after := arrivingTable[t.arrival][event]; after != "" {
		t.arrival = after
	}
}

// decode returns a job that decodes the complete patch into buffer.
func (t *Transfer) decode(buffer []byte) *Patching {
	t.changeArrival(patched)
	t.job = &Patching{Model: t.Announce.Model, transfer: t, base: t.base, patch: t.Buffer, buffer: buffer, digest: t.Digest}
	return t.job
}

// decoded records that the patch has been decoded, and how long that took.
func (t *Transfer) decoded(took time.Duration) { t.job, t.took = nil, took }

// cancelDecoding cancels the decoding of the patch. It returns false if no patch was being decoded.
func (t *Transfer) cancelDecoding() bool {
	if t.job != nil {
		t.job.cancel()
	}
	return t.job != nil
}

// detachBase ends all leases, so that the buffer is not written any more. If the transfer has a base,
// detachBase releases the patch's memory and returns the base.
func (t *Transfer) detachBase() *base {
	t.endAllLeases()
	b := t.base
	if b != nil {
		release(t.Buffer)
		t.Buffer, t.base = nil, nil
	}
	return b
}

// answered records that the ping sent at sentAt, and every request before it, was answered.
func (t *Transfer) answered(sentAt time.Duration) { t.answeredTo = sentAt }

// reportDue reports whether a report of progress is due, and if so records that it is sent. (W23)
func (t *Transfer) reportDue(now time.Duration) bool {
	due := now-t.reportedAt >= t.timing.Report || t.Here%ProgressChunks == 0
	if due {
		t.reportedAt = now
	}
	return due
}

// copyFrom copies every chunk from data, which holds the whole version.
func (t *Transfer) copyFrom(data []byte) {
	t.endAllLeases()
	for i := range t.states {
		begin, end := t.plan.Span(int64(i))
		copy(t.Buffer[begin:end], data[begin:end])
		t.states[i], t.crcs[i] = here, CRC32C(t.Buffer[begin:end])
	}
	t.Here, t.requestedCount, t.cursor = int64(t.count()), 0, t.count()
}

// dropChunks marks all chunks as missing. It is called if the shared memory was overwritten while
// copyFrom copied it, or if the digest does not match.
func (t *Transfer) dropChunks() { t.Here, t.states, t.cursor = 0, make([]byte, t.count()), 0 }

// dueFetches returns the fetches that are due. A Fetch of 0 chunks requests the announcement and the
// end message.
func (t *Transfer) dueFetches(now time.Duration) []Message {
	if t.arrival == decoded {
		return nil
	}
	for _, lease := range t.leases {
		if lease.count > lease.checked {
			lease.checked, t.heardAt = lease.count, now
		}
	}
	silent := now - t.heardAt
	if silent >= t.timing.Quiet { // W30
		t.pull()
	}
	timeout := t.retryDelay
	if t.answeredTo <= t.fetchedAt { // the chunks may still be on their way
		timeout = t.timing.PatienceMax
	}
	if silent >= timeout { // W12, W32
		t.timeouts++
		t.requestAgain(now)
		t.retryDelay *= 2
		if t.retryDelay > t.timing.PatienceMax {
			t.retryDelay = t.timing.PatienceMax
		}
	}
	var fetches []Message
	if t.Digest == "" && t.arrival == pulled && !t.endRequested {
		t.endRequested = true
		fetches = append(fetches, t.fetch(0, 0))
	}
	if t.requestedCount <= WindowChunks/2 { // W11
		fetches = t.addFetches(fetches)
	}
	if len(fetches) > 0 {
		t.fetchedAt = now
	}
	return fetches
}

func (t *Transfer) fetch(first, count int) Message {
	return &Fetch{Model: t.Announce.Model, Epoch: t.Key.Epoch, Version: t.Key.Version,
		First: int64(first), Count: int64(count), Patch: t.patchID(), Unpatched: t.unpatched} // D10
}

// addFetches appends fetches of missing chunks until WindowChunks chunks are requested.
func (t *Transfer) addFetches(fetches []Message) []Message {
	limit := t.pushedEnd
	if t.arrival == pulled {
		limit = t.count()
	}
	for t.requestedCount < WindowChunks {
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
		for last < limit && t.states[last] == missing && t.requestedCount < WindowChunks {
			t.states[last] = requested
			t.requestedCount++
			last++
		}
		t.cursor = last
		fetches = append(fetches, t.fetch(first, last-first))
	}
	return fetches
}

// verify reports whether the version matches its digest. If it does not, verify marks all chunks as missing.
func (t *Transfer) verify() bool {
	if t.Digest == Digest(t.Announce.Layout, t.plan.ChunkBytes, t.crcs) {
		return true
	}
	t.Restarts++
	t.dropChunks()
	t.requestedCount, t.pushedEnd = 0, 0
	t.Digest, t.endRequested = "", false
	t.pull()
	return false
}

// reconnected handles a new session: it makes dueFetches request all missing chunks again, since the
// requests of the previous session will not be answered.
func (t *Transfer) reconnected(now time.Duration) {
	t.requestAgain(now)
	t.pull()
	t.timeouts = 0
}

// requestAgain marks all requested and leased chunks as missing, so that they are requested again.
func (t *Transfer) requestAgain(now time.Duration) {
	t.endAllLeases()
	for i, state := range t.states {
		if state == requested {
			t.states[i] = missing
		}
	}
	t.requestedCount, t.cursor, t.endRequested, t.heardAt = 0, 0, false, now
}
