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
	seal  *Opening  // what opens the bytes in their place, once all are here; nil: they come in the clear
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
	if l.owner != nil && l.seal == nil {
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

// take finds out whether all is here, and sound; the bytes are in their place then.
func (l *Lease) take(p proof) (crc uint32, sound bool) {
	if l.count != len(l.view) {
		return 0, false
	}
	if l.seal != nil {
		return l.seal.Open(l.view, l.view)
	}
	return l.crc, p == checksum(l.crc)
}

// A proof tells whether a payload is a chunk's, and puts it into its place.
type proof interface {
	take(to, payload []byte) (crc uint32, sound bool)
}

// A checksum is that of a chunk in the clear.
type checksum uint32

func (c checksum) take(to, payload []byte) (crc uint32, sound bool) {
	if CRC32C(payload) != uint32(c) {
		return 0, false
	}
	copy(to, payload)
	return uint32(c), true
}

// Cancel says that the rest will never come.
func (l *Lease) Cancel() {
	if l.owner != nil {
		l.owner.takeBack(l)
	}
}

// A Transfer is one version on its way into a staging buffer, pushed and fetched in any order. What arrives may be a
// patch instead, into memory of its own: then the version is decoded from that.
//
// Pushed chunks come in order, so whatever lies below the highest pushed one was dropped and is
// fetched at once. What lies above may still be pushed: it is fetched after the end, or when
// nothing has arrived for a while. At most a window of chunks is asked for; an answer that does
// not come in time turns all of them back to missing, and the patience doubles until something
// arrives. But answers come in the order of what was asked: as long as no later ping was answered,
// they are on their way.
type Transfer struct {
	Announce *Announce
	Layout   *Layout
	Buffer   []byte
	Key      Key
	Here     int64  // chunks that have arrived
	Restarts int    // times the whole did not match its digest
	Digest   string // from the end; empty: not known yet

	patch *PatchOffer   // what arrives in place of the version, if that is not nil
	base  *base         // what it builds on, for as long as that is needed
	job   *Patching     // all of it is here, and is being decoded
	took  time.Duration // decoding it, once that is done
	why   string        // no patch arrives, though there are some
	tries int           // times that nothing came for too long, though the connection is the same

	reportedAt time.Duration // when the publisher was told last how far this is

	plan       Plan
	states     []byte
	crcs       []uint32
	damaged    int
	asked      int
	cursor     int // nothing below it is missing
	pushed     int // everything below it was pushed, or dropped on the way
	leases     []*Lease
	timing     *Timing
	heardAt    time.Duration
	askedAt    time.Duration
	answeredTo time.Duration // when the last ping was sent that was answered
	patience   time.Duration
	gap        time.Duration // between two chunks, the longest lately
	endAsked   bool
	comes      State // how: see coming
}

// newTransfer begins to receive a version into a buffer of its size; why says why no patch arrives, though there are some.
func newTransfer(announce *Announce, layout *Layout, buffer []byte, why string, now time.Duration, timing *Timing) *Transfer {
	t := receive(announce, layout, buffer, now, timing)
	t.why = atMost(why, LabelMax)
	return t
}

// newTransferOfPatch begins to receive a patch on a base, into a buffer of its own.
func newTransferOfPatch(patch *PatchOffer, on *base, announce *Announce, layout *Layout, buffer []byte, now time.Duration,
	timing *Timing) *Transfer {
	t := receive(announce, layout, buffer, now, timing)
	t.patch, t.base = patch, on
	return t
}

func receive(announce *Announce, layout *Layout, buffer []byte, now time.Duration, timing *Timing) *Transfer {
	plan := Plan{int64(len(buffer)), announce.ChunkBytes}
	return &Transfer{
		Announce: announce, Layout: layout, Buffer: buffer, Key: Key{announce.Epoch, announce.Version},
		plan: plan, states: make([]byte, plan.Count()), crcs: make([]uint32, plan.Count()),
		timing: timing, heardAt: now, askedAt: now, answeredTo: never, reportedAt: now, patience: timing.Patience, comes: received,
	}
}

func (t *Transfer) count() int { return len(t.states) }

// by names the patch that arrives; nil: it is the version.
func (t *Transfer) by() *PatchID {
	if t.patch == nil {
		return nil
	}
	return &t.patch.PatchID
}

// speaks tells whether what names this patch, or none, speaks of what arrives. (D9)
func (t *Transfer) speaks(patch *PatchID) bool {
	if t.patch == nil || patch == nil {
		return t.patch == nil && patch == nil
	}
	return t.patch.PatchID == *patch
}

// hopeless tells whether nothing that fits comes, though it was asked for again and again.
func (t *Transfer) hopeless() bool { return t.comes != decoded && t.tries >= TriesMax }

func (t *Transfer) complete() bool { return t.Here == int64(t.count()) && t.Digest != "" }

// add takes a chunk and returns whether it is new and sound. A chunk that is neither is ignored.
// lease is the one that its payload was received into, if there was one.
func (t *Transfer) add(number int64, p proof, payload []byte, lease *Lease, now time.Duration, pushed bool) bool {
	if number >= int64(t.count()) {
		return false
	}
	index, crc, sound := int(number), uint32(0), false
	if pushed && index >= t.pushed { // W10
		t.pushed = index + 1
	}
	if lease != nil && lease.owner == t && !lease.over && lease.index == number {
		t.takeBack(lease)
		if crc, sound = lease.take(p); !sound {
			t.reject(index)
			return false
		}
	} else if crc, sound = t.copy(index, p, payload); !sound { // W9
		return false
	}
	t.states[index] = here
	t.crcs[index] = crc
	t.Here++
	t.hear(now)
	return true
}

// copy takes a payload that was received elsewhere.
func (t *Transfer) copy(index int, p proof, payload []byte) (crc uint32, sound bool) {
	if state := t.states[index]; state == here || state == lent || len(payload) == 0 {
		return 0, false
	}
	begin, end := t.plan.Span(int64(index))
	if int64(len(payload)) == end-begin {
		crc, sound = p.take(t.Buffer[begin:end], payload)
	}
	if !sound {
		t.reject(index)
		return 0, false
	}
	t.take(index)
	return crc, true
}

// take makes room in the window if the chunk was asked for.
func (t *Transfer) take(index int) {
	if t.states[index] == asked {
		t.asked--
	}
}

// fits tells whether a chunk has this place, and this size.
func (t *Transfer) fits(index int64, size int) bool {
	if index >= int64(t.count()) {
		return false
	}
	begin, end := t.plan.Span(index)
	return int64(size) == end-begin
}

// lend returns the place of a chunk of this size, to receive it there; nil if it has none. seal opens it.
func (t *Transfer) lend(index int64, size int, seal *Opening) *Lease {
	if !t.fits(index, size) || t.states[index] == here || t.states[index] == lent {
		return nil
	}
	t.take(int(index))
	t.states[index] = lent
	begin, end := t.plan.Span(index)
	lease := &Lease{view: t.Buffer[begin:end], seal: seal, owner: t, index: index} // what lies behind stays as it is
	t.leases = append(t.leases, lease)
	return lease
}

// takeBack ends a lease: nothing may be written there any more.
func (t *Transfer) takeBack(lease *Lease) {
	for i, known := range t.leases {
		if known == lease {
			t.leases = append(t.leases[:i], t.leases[i+1:]...)
			lease.over = true
			t.miss(int(lease.index))
			return
		}
	}
}

func (t *Transfer) takeBackAll() {
	for len(t.leases) > 0 {
		t.takeBack(t.leases[0])
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
	t.tries = 0
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
func (t *Transfer) end(digest string) {
	t.Digest = digest
	t.pull()
}

// pull says that nothing more will be pushed, as far as we can tell.
func (t *Transfer) pull() { t.changeWay(unpushed) }

func (t *Transfer) changeWay(event Event) {
	if after := coming[t.comes][event]; after != "" {
		t.comes = after
	}
}

// decode lends a buffer, and what the patch builds on, to whoever decodes it: it is here, whole.
func (t *Transfer) decode(buffer []byte) *Patching {
	t.changeWay(patched)
	t.job = &Patching{Model: t.Announce.Model, transfer: t, base: t.base, patch: t.Buffer, buffer: buffer, digest: t.Digest}
	return t.job
}

// decoded takes note that the patch is decoded, and how long that took.
func (t *Transfer) decoded(took time.Duration) { t.job, t.took = nil, took }

// revoke tells whether somebody decodes the patch, who is to end that soon.
func (t *Transfer) revoke() bool {
	if t.job != nil {
		t.job.end()
	}
	return t.job != nil
}

// letGo ends it: nothing of it will be written any more. It returns what a patch was building on, if that was still
// needed; neither that nor the patch is any more.
func (t *Transfer) letGo() *base {
	t.takeBackAll()
	b := t.base
	if b != nil {
		release(t.Buffer)
		t.Buffer, t.base = nil, nil
	}
	return b
}

// answered takes the word that a ping was answered that was sent then.
func (t *Transfer) answered(sentAt time.Duration) { t.answeredTo = sentAt }

// reports tells whether the publisher is to be told how far this is. (W23)
func (t *Transfer) reports(now time.Duration) bool {
	due := now-t.reportedAt >= t.timing.Report || t.Here%ProgressChunks == 0
	if due {
		t.reportedAt = now
	}
	return due
}

// read takes every chunk from memory that holds the whole version.
func (t *Transfer) read(data []byte) {
	t.takeBackAll()
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
	if t.comes == decoded {
		return nil
	}
	for _, lease := range t.leases {
		if lease.count > lease.seen {
			lease.seen, t.heardAt = lease.count, now
		}
	}
	silent := now - t.heardAt
	if silent >= t.timing.Quiet { // W30
		t.pull()
	}
	patience := t.patience
	if t.answeredTo <= t.askedAt { // what was asked is still on its way
		patience = t.timing.PatienceMax
	}
	if silent >= patience { // W12, W32
		t.tries++
		t.askAgain(now)
		t.patience *= 2
		if t.patience > t.timing.PatienceMax {
			t.patience = t.timing.PatienceMax
		}
	}
	var fetches []Message
	if t.Digest == "" && t.comes == pulled && !t.endAsked {
		t.endAsked = true
		fetches = append(fetches, t.fetch(0, 0))
	}
	if t.asked <= WindowChunks/2 { // W11
		fetches = t.ranges(fetches)
	}
	if len(fetches) > 0 {
		t.askedAt = now
	}
	return fetches
}

func (t *Transfer) fetch(first, count int) Message {
	return &Fetch{Model: t.Announce.Model, Epoch: t.Key.Epoch, Version: t.Key.Version,
		First: int64(first), Count: int64(count), Patch: t.by(), Unpatched: t.why} // D10
}

// ranges asks for missing chunks until the window is full.
func (t *Transfer) ranges(fetches []Message) []Message {
	limit := t.pushed
	if t.comes == pulled {
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
	t.Digest, t.endAsked = "", false
	t.pull()
	return false
}

// reconnected says that what was asked on the connection before will not come.
func (t *Transfer) reconnected(now time.Duration) {
	t.askAgain(now)
	t.pull()
	t.tries = 0
}

// askAgain takes everything outstanding for lost, a payload that has stopped to arrive included.
func (t *Transfer) askAgain(now time.Duration) {
	t.takeBackAll()
	for i, state := range t.states {
		if state == asked {
			t.states[i] = missing
		}
	}
	t.asked, t.cursor, t.endAsked, t.heardAt = 0, 0, false, now
}
