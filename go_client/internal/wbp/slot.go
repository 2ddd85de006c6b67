package wbp

import (
	"fmt"
	"time"
)

const (
	nothingFits = "nothing comes that fits what was announced"
	restartsMax = 3 // transfers of a version whose digest did not match, before it is given up
	appliesMax  = 3 // in a row that fail half-way, before a version is tried no more
)

// A slot is one model of a worker: what comes of it, and what becomes of the versions here (phases.go).
//
// The latest version wins: an older one that is on its way makes room for it. But a worker that had to
// drop one finishes the next, by fetching, before it looks at anything newer.
type slot struct {
	model      string
	timing     *Timing
	opens      Opens
	keyring    *Keyring // nil: versions come in the clear
	acceptance acceptance
	holds      holdings
	mode       State
	patches    bool          // they are taken
	listens    bool          // to chunks of patches, in place of those of versions
	shared     bool          // versions are read from shared memory: nothing needs to be pushed
	torn       int           // applies in a row that failed half-way: while there is one, nothing runs
	epoch      int64         // the greatest of which bytes were written into the model
	failure    *Failed       // the last one, until another version is begun
	stale      Key           // was not to be had from shared memory: fetch it, if it is offered
	askedAt    time.Duration // when the latest announcement was asked for
	answeredTo time.Duration // when the last ping was sent that was answered
	later      putOff        // what has failed, and is to be tried again
}

func newSlot(model string, accepts func(*Layout) string, bytesMax int64, timing *Timing, opens Opens) *slot {
	return &slot{
		model: model, timing: timing, opens: opens, mode: following, askedAt: never, answeredTo: never,
		acceptance: acceptance{accepts: accepts, bytesMax: bytesMax, accepted: map[string]bool{}},
	}
}

// running is what runs; nil before the first version, and after one that failed half-way.
func (s *slot) running() *Running {
	if v := s.holds.at(running); v != nil {
		return v.running
	}
	return nil
}

// What the publisher says.

// hearOf takes a beacon, a welcome or a stray chunk that speaks of a version: ask if it is news.
func (s *slot) hearOf(key Key, now time.Duration) []Effect {
	if key.Version == 0 || !key.Newer(s.holds.newest()) || s.holds.isRejected(key) { // W4, W15
		return nil
	}
	if v := s.holds.at(arriving); v != nil && (!key.Newer(v.Key) || s.mode == catchingUp) { // W26
		return nil
	}
	if v := s.holds.at(announced); v != nil && !key.Newer(v.Key) && v.lacks == aLayout { // W7
		return nil
	}
	if !key.Newer(s.later.Key) && now < s.later.until { // W36
		return nil
	}
	return s.askLatest(key.Epoch, now)
}

func (s *slot) askLatest(epoch int64, now time.Duration) []Effect {
	if now-s.askedAt < s.timing.Quiet { // W4
		return nil
	}
	s.askedAt = now
	waiting := s.holds.at(announced)
	needsLayout := waiting != nil && waiting.lacks == aLayout
	return []Effect{Send{&Fetch{Model: s.model, Epoch: epoch, Layout: needsLayout}}}
}

// announced takes the word that a version exists. Its chunks may follow if the announcement was
// pushed; with push false none will.
func (s *slot) announced(a *Announce, layout []byte, push bool, now time.Duration) []Effect {
	key := Key{a.Epoch, a.Version}
	if layout != nil {
		if wrong := s.acceptance.learn(a, layout); wrong != "" {
			s.holds.move(s.holds.given(key, announced), failed) // it waited for this
			return s.fail(key, CodeLayoutInvalid, wrong, now)
		}
	}
	if v := s.holds.given(key, staged); v != nil && a.Commit == "auto" { // W5
		return s.commit(v)
	}
	if !s.wants(a, key) {
		return nil
	}
	v := s.holds.expect(a)
	effects := s.begin(v, now)
	if v.phase == arriving && !push { // W31
		v.transfer.pull()
		effects = append(effects, s.pull(v, now)...)
	}
	return effects
}

// wants tells whether an announcement is of a version to begin, or to begin anew.
func (s *slot) wants(a *Announce, key Key) bool {
	if !key.Newer(s.holds.newest()) || s.holds.isRejected(key) { // W5, W15
		return false
	}
	v := s.holds.at(arriving)
	switch {
	case v == nil:
		return true
	case v.Key != key:
		return key.Newer(v.Key) && s.mode == following // W8, W26
	case !sameBytes(a, v.announce):
		return true // one of the two was damaged
	}
	v.announce = a // it may have been committed meanwhile
	return false
}

// sameBytes tells whether two announcements of a version agree on what arrives.
func sameBytes(a, b *Announce) bool {
	return a.Layout == b.Layout && a.Bytes == b.Bytes && a.ChunkBytes == b.ChunkBytes
}

// announcedWhole takes announcement, chunk and end in one.
func (s *slot) announcedWhole(a *Announce, payload []byte, now time.Duration) []Effect {
	chunk := piece{Key: Key{a.Epoch, a.Version}, proof: checksum(a.Whole.CRC)}
	end := &End{Model: a.Model, Epoch: a.Epoch, Version: a.Version, Digest: a.Whole.Digest}
	effects := s.announced(a, nil, true, now)
	effects = append(effects, s.chunk(chunk, payload, nil, now, true)...)
	return append(effects, s.end(end, now)...)
}

// renamed takes the word that what runs is a newer version, byte for byte: nothing is to be fetched or
// applied. Not if another version is at the user's, who may be writing it into the model.
func (s *slot) renamed(r *Rename, now time.Duration) []Effect {
	v, key := s.holds.at(running), Key{r.Epoch, r.Version} // W25
	if v == nil || *v.running != r.Was || len(s.holds.all(ready, applying)) > 0 || !key.Newer(s.holds.newest()) {
		return nil
	}
	if begun := s.holds.at(arriving); begun != nil && begun.Newer(key) {
		return nil
	}
	for _, older := range s.holds.all(announced, arriving, staged) {
		s.holds.move(older, newer)
	}
	s.holds.rename(v, key)
	s.failure = nil
	said := append(s.runs(v, r.Was.Digest), Renamed{s.model, key, r.Metadata})
	return append(said, s.turn(completed, now)...)
}

// begin starts to receive a version, if its layout is known.
func (s *slot) begin(v *held, now time.Duration) []Effect {
	a := v.announce
	if code, text := s.acceptance.fault(a); code != "" {
		return s.decline(v, code, text, now)
	}
	if v.layout = s.acceptance.layout(a); v.layout == nil { // W7
		s.askedAt = now
		return []Effect{Send{&Fetch{Model: s.model, Epoch: a.Epoch, Version: a.Version, Layout: true}}}
	}
	segment := s.segment(a)
	if segment == nil {
		v.gain(known)
		return s.reserve(v, nil, now)
	}
	v.gain(located)
	if a.Acknowledge == "applied" && a.Commit == "auto" { // S6
		return s.point(v, segment, now)
	}
	v.gain(opened)
	return s.reserve(v, segment, now)
}

// reserve finds memory for a version; if there is no more, resume goes on when some is free.
func (s *slot) reserve(v *held, segment Segment, now time.Duration) []Effect {
	if segment != nil {
		defer segment.Release()
	}
	a := v.announce
	var effects []Effect
	if s.holds.move(s.holds.at(arriving), newer) { // W8
		effects = s.turn(replaced, now)
	}
	enough, err := s.holds.takeMemory(v)
	if err != nil && s.holds.base != nil { // the next version matters more
		if !s.holds.rebase(nil) {
			return effects // decoded goes on with it
		}
		enough, err = s.holds.takeMemory(v)
	}
	if err != nil {
		text := fmt.Sprintf("there is no memory for %d bytes (%v): lower BytesMax, or make room", a.Bytes, err)
		return append(effects, s.decline(v, CodeNoMemory, text, now)...)
	}
	if !enough {
		return effects
	}
	v.transfer = s.begins(v, segment == nil && a.Whole == nil, now)
	s.moveOn(v, begun)
	if segment != nil {
		if v.shared = segment.Copy(s.model, v.Key, v.transfer.read) == nil; !v.shared { // S6
			v.transfer.unread()
		}
	}
	if a.Whole != nil {
		return effects
	}
	return append(effects, s.listen(v, now)...)
}

// segment opens the shared memory that holds a version; nil if it must come over the network.
func (s *slot) segment(a *Announce) Segment {
	if !s.shared || a.Shared == nil || s.stale == (Key{a.Epoch, a.Version}) {
		return nil
	}
	return s.opens(a.Shared, a.Bytes)
}

// point makes a version ready that is whole in shared memory.
func (s *slot) point(v *held, segment Segment, now time.Duration) []Effect {
	for _, older := range s.holds.all(arriving, staged) {
		s.holds.move(older, newer)
	}
	v.segment, v.version = segment, &Version{Model: s.model, Key: v.Key, Layout: v.layout, Shared: true, segment: segment,
		Metadata: v.announce.Metadata}
	if v.announce.Hash { // S7
		v.version.hash = v.announce.ChunkBytes
	}
	s.moveOn(v, mapped)
	return append([]Effect{Ready{v.version}}, s.turn(completed, now)...)
}

// moveOn forgets why another version was not taken, now that one is on its way. (That nothing runs is
// said on.)
func (s *slot) moveOn(v *held, event Event) {
	s.holds.move(v, event)
	if s.torn == 0 {
		s.failure = nil // W17
	}
}

// turn takes pushed chunks again, and looks for what came meanwhile; or no longer.
func (s *slot) turn(event Event, now time.Duration) []Effect {
	mode := modes[s.mode][event] // W26
	if mode == "" {
		return nil
	}
	s.mode = mode
	effects := []Effect{Subscribe{s.topic(), mode == following && !s.shared}}
	if mode == following {
		effects = append(effects, s.askLatest(s.holds.newest().Epoch, now)...)
	}
	return effects
}

// decline says that a version is not taken.
func (s *slot) decline(v *held, code Code, text string, now time.Duration) []Effect {
	if triedAgain[code] { // W15
		s.holds.move(v, failed)
	} else {
		s.holds.move(v, declined)
	}
	return s.fail(v.Key, code, text, now)
}

func (s *slot) fail(key Key, code Code, text string, now time.Duration) []Effect {
	if triedAgain[code] {
		s.later.again(key, s.timing, now)
	}
	text = atMost(text, TextMax)
	s.failure = &Failed{Model: s.model, Epoch: key.Epoch, Version: key.Version, Code: code, Text: text}
	return []Effect{s.sayFailed(), Rejected{s.model, key, code, text}}
}

// A putOff is a version that has failed and is to be tried again: it is left alone for ever longer. (W36)
type putOff struct {
	Key
	until, pause time.Duration
}

// again puts a version off, for twice as long as the last time.
func (p *putOff) again(key Key, timing *Timing, now time.Duration) {
	p.pause *= 2
	if p.Key != key {
		p.pause = timing.Patience
	}
	if p.pause > timing.PatienceMax {
		p.pause = timing.PatienceMax
	}
	p.Key, p.until = key, now+p.pause
}

// noLonger takes the word that a version is not to be had any more: what was before it may be what there is.
func (p *putOff) noLonger(key Key) {
	if p.Key == key {
		p.until = 0
	}
}

// What arrives of it.

// A piece is a chunk as it came: with a checksum, or sealed.
type piece struct {
	Key
	index  int64
	proof  proof
	sealed *SealedChunk
	patch  *PatchID // of which it is a piece; nil: of the version
}

func pieceOf(c *Chunk) piece {
	return piece{Key{c.Epoch, c.Version}, c.Index, checksum(c.CRC), nil, c.Patch}
}

func sealedPieceOf(c *SealedChunk) piece {
	return piece{Key{c.Epoch, c.Version}, c.Index, nil, c, c.Patch}
}

// place says where the payload of a chunk belongs that is about to be received; nil: nowhere.
func (s *slot) place(chunk piece, size int) *Lease {
	v := s.holds.given(chunk.Key, arriving)
	if v == nil || !v.transfer.speaks(chunk.patch) || !v.transfer.fits(chunk.index, size) {
		return nil
	}
	var seal *Opening
	if chunk.sealed != nil {
		if seal = s.keyring.chunk(subjectOf(v.announce, v.transfer.patch), chunk.sealed, size); seal == nil {
			return nil
		}
	}
	return v.transfer.lend(chunk.index, size, seal)
}

// chunk takes a piece of a version.
func (s *slot) chunk(chunk piece, payload []byte, lease *Lease, now time.Duration, pushed bool) []Effect {
	v := s.holds.given(chunk.Key, arriving)
	if v == nil {
		return s.stray(chunk.Key, now)
	}
	t := v.transfer
	if !t.speaks(chunk.patch) {
		return nil
	}
	if chunk.sealed != nil && lease == nil {
		opening := s.keyring.chunk(subjectOf(v.announce, t.patch), chunk.sealed, len(payload))
		if opening == nil { // a hello brings its key (E6), and patience the chunk
			return nil
		}
		chunk.proof = opening
	}
	fresh := t.add(chunk.index, chunk.proof, payload, lease, now, pushed)
	effects := s.pull(v, now)
	slow := now-t.reportedAt >= s.timing.Report // W23
	if fresh && pushed && (slow || t.Here%ProgressChunks == 0) {
		t.reportedAt = now
		effects = append(effects, s.sayProgress(v))
	}
	return append(effects, s.completed(v, now)...)
}

// end takes the word that all chunks of a version are out.
func (s *slot) end(end *End, now time.Duration) []Effect {
	key := Key{end.Epoch, end.Version}
	v := s.holds.given(key, arriving)
	if v == nil {
		return s.stray(key, now)
	}
	if !v.transfer.speaks(end.Patch) || v.transfer.comes == decoded {
		return nil
	}
	v.transfer.end(end.Digest)
	return append(s.pull(v, now), s.completed(v, now)...)
}

// answered takes the word that a ping was answered that was sent then, and so was whatever was asked before it. (W12)
func (s *slot) answered(sentAt time.Duration) {
	s.answeredTo = sentAt
	if v := s.holds.at(arriving); v != nil {
		v.transfer.answeredTo = sentAt
	}
}

// stray takes note of a version of which something came, but which is not being received.
func (s *slot) stray(key Key, now time.Duration) []Effect {
	if s.holds.at(announced) != nil { // W4
		return nil
	}
	return s.hearOf(key, now)
}

func (s *slot) pull(v *held, now time.Duration) []Effect {
	var effects []Effect
	for _, fetch := range v.transfer.wants(now) {
		effects = append(effects, Send{fetch})
	}
	return effects
}

// completed verifies and stages what is arriving, if it is whole.
func (s *slot) completed(v *held, now time.Duration) []Effect {
	t := v.transfer
	switch { // W13
	case !t.complete():
		return nil
	case t.patch != nil:
		return s.decode(v)
	case t.verify():
		return s.arrived(v, now)
	case t.Restarts < restartsMax:
		return nil // the next tick fetches it anew
	}
	text := fmt.Sprintf("the whole did not match its digest, %d times", t.Restarts)
	return s.decline(v, CodeDigestMismatch, text, now)
}

// arrived stages a version that is whole and sound, and commits it unless that waits for others.
func (s *slot) arrived(v *held, now time.Duration) []Effect {
	together := v.announce.Commit == "together" // W14
	v.version = &Version{Model: s.model, Key: v.Key, Layout: v.transfer.Layout, Digest: v.transfer.Digest,
		Shared: v.shared, Patch: v.transfer.by(), data: v.buffer, took: v.transfer.took,
		sayStaged: together || v.announce.Acknowledge == "staged", Metadata: v.announce.Metadata}
	s.holds.move(s.holds.at(staged), newer)
	s.holds.move(v, whole)
	effects := s.sayStaged(v)
	if !together {
		effects = append(effects, s.commit(v)...)
	}
	return append(effects, s.turn(completed, now)...)
}

func (s *slot) commit(v *held) []Effect {
	s.holds.move(v, committed)
	return []Effect{Ready{v.version}}
}

// committed takes the word that the version that is staged here may be applied.
func (s *slot) committed(c *Commit) []Effect {
	v := s.holds.given(Key{c.Epoch, c.Version}, staged) // W14
	if v == nil || v.version.Digest != c.Digest {
		return nil
	}
	return s.commit(v)
}

// aborted drops what there is of a version that must not be applied.
func (s *slot) aborted(key Key, now time.Duration) []Effect {
	s.holds.move(s.holds.given(key, announced, arriving, staged), aborted) // W14
	s.later.noLonger(key)
	// There may be room now for what waited; who is catching up must find something to do.
	effects := s.resume(now)
	if len(effects) == 0 && s.mode == catchingUp && s.holds.at(arriving) == nil { // W26
		return s.askLatest(key.Epoch, now)
	}
	return effects
}

// gone takes the word that the publisher no longer has a version; 0: it has none.
func (s *slot) gone(epoch, version int64, now time.Duration) []Effect {
	s.later.noLonger(Key{epoch, version})
	for _, v := range s.holds.all(announced, arriving) {
		waits := v.phase == announced // W27
		named := version == v.Version || version == 0 && waits
		late := epoch != 0 && epoch != v.Epoch // a word of an older publisher
		if !named || late || !s.holds.move(v, gone) || waits {
			continue
		}
		if effects := s.resume(now); len(effects) > 0 {
			return effects
		}
		return s.askLatest(v.Epoch, now)
	}
	return nil
}

// prepare maps memory in which a version will lie, so that it need not wait for that.
func (s *slot) prepare(p *Prepare) {
	if !s.shared || p.Bytes > s.acceptance.bytesMax {
		return
	}
	if segment := s.opens(p.Shared, p.Bytes); segment != nil { // S11
		segment.Warm()
		segment.Release()
	}
}

// The session.

// expect makes a buffer: versions of this size will probably come over the network.
func (s *slot) expect(size int64) {
	if !s.shared && size <= s.acceptance.bytesMax {
		s.holds.buffers.reserve(size)
	}
}

// reconnected takes note that the publisher has let this worker in (again).
func (s *slot) reconnected(newest Key, now time.Duration) []Effect {
	for _, v := range s.holds.all(announced, arriving, staged) {
		if v.phase == announced || v.Epoch != newest.Epoch { // W28
			s.holds.move(v, fenced)
		} else if v.phase == arriving {
			v.transfer.reconnected(now)
		}
	}
	s.holds.rejected, s.askedAt = nil, never
	if s.torn > 1 {
		s.torn = 1 // it may be tried as often as at first
	}
	effects := s.sayStaged(s.holds.all(ready, applying, staged)...)
	return append(effects, s.hearOf(newest, now)...)
}

// What the user does with a version that is ready.

// taken takes note that somebody has begun to apply a version.
func (s *slot) taken(key Key) { s.holds.move(s.holds.given(key, ready), taken) }

// applied takes note that a version runs here; digest is that of its bytes, if anybody hashed them.
func (s *slot) applied(key Key, digest string, now time.Duration) []Effect {
	v, older := s.holds.given(key, applying), s.holds.at(running) // W16
	if v == nil {
		return nil
	}
	v.running = &Running{v.Epoch, v.Version, digest}
	if s.patches && v.announce.Keep && !v.version.Shared { // D3
		s.holds.rebase(v)
	} else {
		s.holds.rebase(nil)
	}
	s.holds.move(v, applied)
	s.holds.move(older, newer)
	s.torn = 0
	if f := s.failure; f != nil && !(Key{f.Epoch, f.Version}).Newer(key) { // W17
		s.failure = nil
	}
	return append(s.runs(v, digest), s.resume(now)...)
}

// runs takes note of what runs, and says it.
func (s *slot) runs(v *held, digest string) []Effect {
	was := v.running
	v.running = &Running{v.Epoch, v.Version, digest}
	if b := s.holds.base; b != nil && b.running == *was { // it has another name
		b.running = *v.running
	}
	if v.Epoch > s.epoch {
		s.epoch = v.Epoch
	}
	return []Effect{s.sayApplied(v)}
}

// failed takes note that a version could not be applied. If the model is intact, what ran before still runs.
func (s *slot) failed(key Key, text string, intact bool, now time.Duration) []Effect {
	v, event := s.holds.given(key, applying), declined // W24
	if v == nil {
		return nil
	}
	if !intact { // it holds parts of two versions; what is tried next comes verified
		s.holds.move(s.holds.at(running), torn)
		s.holds.rebase(nil)
		s.stale = key
		if key.Epoch > s.epoch {
			s.epoch = key.Epoch
		}
		if s.torn++; s.torn < appliesMax {
			event = torn
		}
	}
	s.holds.move(v, event)
	return append(s.fail(key, CodeApply, text, now), s.resume(now)...)
}

// gotStale takes note that a version was gone from shared memory: ask for the latest.
func (s *slot) gotStale(key Key, now time.Duration) []Effect {
	if !s.holds.move(s.holds.given(key, applying), stale) { // S5
		return nil
	}
	s.stale, s.askedAt = key, never
	return s.askLatest(key.Epoch, now)
}

// dropped takes note that a version was replaced by a newer one before anybody applied it.
func (s *slot) dropped(key Key, now time.Duration) []Effect {
	if !s.holds.move(s.holds.given(key, ready, applying), newer) {
		return nil
	}
	return s.resume(now)
}

// resume begins what waited for a buffer.
func (s *slot) resume(now time.Duration) []Effect {
	waiting := s.holds.at(announced)
	if waiting == nil || s.holds.at(arriving) != nil {
		return nil
	}
	if !waiting.Newer(s.holds.newest()) {
		s.holds.move(waiting, newer)
		return nil
	}
	if waiting.lacks != aBuffer {
		return nil
	}
	return s.reserve(waiting, s.segment(waiting.announce), now)
}

// Time.

// tick fetches what is due.
func (s *slot) tick(now time.Duration) []Effect {
	if v := s.holds.at(arriving); v != nil {
		if v.transfer.hopeless() && v.transfer.patch != nil {
			return s.giveUp(v, "nothing more of it comes", now)
		}
		if v.transfer.hopeless() { // W12
			return s.decline(v, CodeDigestMismatch, nothingFits, now)
		}
		return append(s.pull(v, now), s.completed(v, now)...)
	}
	v := s.holds.at(announced)
	if v == nil || v.lacks != aLayout {
		return s.resume(now)
	}
	patience := s.timing.Patience
	if s.answeredTo <= s.askedAt {
		patience = s.timing.PatienceMax // W7: it is still on its way
	}
	if now-s.askedAt < patience {
		return nil
	}
	return s.begin(v, now)
}

// repeat says again how things stand, in case it got lost.
func (s *slot) repeat() []Effect { // W17
	var effects []Effect
	begun, busy := s.holds.at(arriving), s.holds.at(applying)
	if begun != nil && busy == nil {
		effects = append(effects, s.sayProgress(begun))
	}
	effects = append(effects, s.sayStaged(s.holds.all(ready, applying, staged)...)...)
	if v := s.holds.at(running); v != nil {
		effects = append(effects, s.sayApplied(v))
	}
	if s.failure != nil {
		effects = append(effects, s.sayFailed())
	}
	if busy != nil { // it may hang in an apply, and others become ready behind it
		effects = append(effects, s.sayProgress(busy))
	} else if waiting := s.holds.at(ready); waiting != nil && begun == nil {
		effects = append(effects, s.sayProgress(waiting))
	}
	return effects
}

func (s *slot) sayProgress(v *held) Effect {
	switch v.phase {
	case arriving:
		return Send{&Progress{s.model, v.Epoch, v.Version, v.transfer.Here, "receiving", v.transfer.by(), ""}}
	case applying:
		return Send{&Progress{s.model, v.Epoch, v.Version, 0, "applying", nil, ""}}
	}
	return Send{&Progress{s.model, v.Epoch, v.Version, 0, "staged", nil, ""}}
}

func (s *slot) sayStaged(some ...*held) []Effect {
	var effects []Effect
	for _, v := range some {
		if v.version.sayStaged {
			effects = append(effects, Send{&Staged{s.model, v.Epoch, v.Version, v.version.Digest, v.version.Patch}})
		}
	}
	return effects
}

func (s *slot) sayApplied(v *held) Effect {
	by := v.version // D11
	return Send{&Applied{s.model, v.Epoch, v.Version, v.running.Digest, by.Patch, by.took.Microseconds()}}
}

func (s *slot) sayFailed() Effect {
	f := *s.failure
	f.Intact = s.torn == 0 // W24
	return Send{&f}
}

// ControlTopic carries announcements, ends and beacons of a model.
func ControlTopic(model string) string { return model + "/ctl" }

// DataTopic carries the chunks of versions of a model.
func DataTopic(model string) string { return model + "/dat" }

// PatchTopic carries chunks and ends of patches.
func PatchTopic(model string) string { return model + "/dlt" }
