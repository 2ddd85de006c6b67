package wbp

import (
	"fmt"
	"time"
)

const (
	restartsMax  = 3 // transfers of a version whose digest did not match, before it is given up
	rejectedKept = 8 // versions remembered that could not be taken here
	layoutsKept  = 4 // layouts remembered, so that a model that alternates sends none again
)

// A slot is one model of a worker: what it runs, what is arriving, and what waits to be applied.
//
//	idle ──announce──> arriving ──all chunks, digest──> staged ──commit──> ready ──applied──> idle
//	                      │                               │                  │
//	                      └── newer announced ────────────┴── abort, newer   └── failed
//
// auto versions are ready as soon as they are staged. The latest version wins: a newer
// announcement replaces the transfer under way. But a worker that was replaced once finishes the
// next one, by fetching, before it looks at anything newer; otherwise one that is slower than the
// trainer would never complete any.
type slot struct {
	model    string
	accepts  func(layout *Layout) string
	bytesMax int64
	timing   *Timing
	opens    Opens

	shared     bool // versions are read from shared memory: nothing needs to be pushed
	running    *Running
	arriving   *Transfer
	undecided  *Version         // staged together, waiting for the commit
	ready      map[Key]*Version // given out to be applied
	waiting    *Announce        // newer, but its layout or a buffer is missing
	catchingUp bool             // finishing one version, whatever is announced

	buffers  buffers
	layouts  []*Layout       // the latest ones
	accepted map[string]bool // ids of layouts among them that can be applied here
	// Versions that could not be taken; not tried again. An older one still may be: what was
	// rejected may have been aborted, or meant for few, and the latest for all be one that was
	// missed.
	rejected []Key
	failure  *Failed       // the last one, until another version is begun
	taken    Key           // is being applied
	stale    Key           // was not to be had from shared memory: fetch it, if it is offered
	askedAt  time.Duration // when the latest announcement was asked for
}

func newSlot(model string, accepts func(*Layout) string, bytesMax int64, timing *Timing, opens Opens) *slot {
	return &slot{
		model: model, accepts: accepts, bytesMax: bytesMax, timing: timing, opens: opens,
		ready: map[Key]*Version{}, accepted: map[string]bool{}, askedAt: never,
	}
}

// newest is the newest version that needs no announcement any more.
func (s *slot) newest() Key {
	var newest Key
	consider := func(key Key) {
		if key.Newer(newest) {
			newest = key
		}
	}
	for key := range s.ready {
		consider(key)
	}
	if s.running != nil {
		consider(Key{s.running.Epoch, s.running.Version})
	}
	if s.undecided != nil {
		consider(s.undecided.Key)
	}
	return newest
}

func (s *slot) isRejected(key Key) bool {
	for _, known := range s.rejected {
		if known == key {
			return true
		}
	}
	return false
}

func (s *slot) reject(key Key) {
	if s.rejected = append(s.rejected, key); len(s.rejected) > rejectedKept {
		s.rejected = s.rejected[1:]
	}
}

// What the publisher says.

// hearOf takes a beacon, a welcome or a stray chunk that speaks of a version: ask if it is news.
func (s *slot) hearOf(key Key, now time.Duration) []Effect {
	known := s.newest()
	if s.arriving != nil && s.arriving.Key.Newer(known) {
		known = s.arriving.Key
	}
	if key.Version == 0 || !key.Newer(known) || s.catchingUp || s.isRejected(key) {
		return nil
	}
	return s.askLatest(key.Epoch, now)
}

func (s *slot) askLatest(epoch int64, now time.Duration) []Effect {
	if now-s.askedAt < s.timing.Quiet {
		return nil
	}
	s.askedAt = now
	needsLayout := s.waiting != nil && s.layout(s.waiting.Layout) == nil
	return []Effect{Send{&Fetch{Model: s.model, Epoch: epoch, Layout: needsLayout}}}
}

// announced takes the word that a version exists. Its chunks may follow if the announcement was
// pushed; with push false none will.
func (s *slot) announced(a *Announce, layout []byte, push bool, now time.Duration) []Effect {
	key := Key{a.Epoch, a.Version}
	if layout != nil {
		if wrong := s.learn(a, layout); wrong != "" {
			return s.refuse(a, CodeLayoutInvalid, wrong)
		}
	}
	if s.undecided != nil && key == s.undecided.Key && a.Commit == "auto" {
		return s.commit()
	}
	if !key.Newer(s.newest()) || s.isRejected(key) {
		return nil
	}
	if s.arriving != nil {
		switch {
		case s.arriving.Key.Newer(key):
			return nil
		case s.arriving.Key == key && sameBytes(a, s.arriving.Announce):
			s.arriving.Announce = a // it may have been committed meanwhile
			return nil
		case s.arriving.Key != key && s.catchingUp:
			return nil
		}
	}
	effects := s.begin(a, now)
	if s.arriving != nil && !push {
		s.arriving.pull()
		effects = append(effects, s.pull(now)...)
	}
	return effects
}

// sameBytes tells whether two announcements of a version agree on what arrives.
func sameBytes(a, b *Announce) bool {
	return a.Layout == b.Layout && a.Bytes == b.Bytes && a.ChunkBytes == b.ChunkBytes
}

// announcedWhole takes announcement, chunk and end in one.
func (s *slot) announcedWhole(a *Announce, payload []byte, now time.Duration) []Effect {
	bare := *a
	bare.Whole = nil
	chunk := &Chunk{Model: a.Model, Epoch: a.Epoch, Version: a.Version, CRC: a.Whole.CRC}
	end := &End{Model: a.Model, Epoch: a.Epoch, Version: a.Version, Digest: a.Whole.Digest}
	effects := s.announced(&bare, nil, true, now)
	effects = append(effects, s.chunk(chunk, payload, nil, now, true)...)
	return append(effects, s.end(end, now)...)
}

func (s *slot) layout(id string) *Layout {
	for _, layout := range s.layouts {
		if layout.ID == id {
			return layout
		}
	}
	return nil
}

// learn remembers a layout; it returns what is wrong with it, if anything.
func (s *slot) learn(a *Announce, bytes []byte) string {
	if int64(len(bytes)) != a.LayoutBytes {
		return fmt.Sprintf("the layout has %d bytes, announced were %d", len(bytes), a.LayoutBytes)
	}
	layout, err := ParseLayout(bytes)
	if err != nil {
		return err.Error()
	}
	if layout.ID != a.Layout {
		return fmt.Sprintf("the layout hashes to %s, announced was %s", layout.ID, a.Layout)
	}
	if s.layout(layout.ID) != nil {
		return ""
	}
	if s.layouts = append(s.layouts, layout); len(s.layouts) > layoutsKept {
		delete(s.accepted, s.layouts[0].ID)
		s.layouts = s.layouts[1:]
	}
	return ""
}

// begin starts to receive a version, replacing an older one that is still arriving.
func (s *slot) begin(a *Announce, now time.Duration) []Effect {
	s.waiting = a
	layout := s.layout(a.Layout)
	if code, text := s.fault(a, layout); code != "" {
		return s.refuse(a, code, text)
	}
	if layout == nil {
		s.askedAt = now
		return []Effect{Send{&Fetch{Model: s.model, Epoch: a.Epoch, Version: a.Version, Layout: true}}}
	}
	segment := s.segment(a)
	if segment != nil && a.Acknowledge == "applied" && a.Commit == "auto" {
		return append(s.dropArriving(now), s.point(a, layout, segment)...)
	}
	if segment != nil {
		defer segment.Release()
	}
	effects := s.abandon()
	buffer, err := s.buffers.take(a.Bytes)
	if err != nil {
		text := fmt.Sprintf("there is no memory for %d bytes (%v): lower BytesMax, or make room", a.Bytes, err)
		effects = append(effects, s.refuse(a, CodeNoMemory, text)...)
		return append(effects, s.caughtUp(a.Epoch, now)...)
	}
	if buffer == nil {
		return effects // resume begins when one is given back
	}
	s.waiting, s.failure = nil, nil
	s.arriving = newTransfer(a, layout, buffer, now, s.timing)
	if segment != nil && segment.Copy(s.model, s.arriving.Key, s.arriving.read) != nil {
		s.arriving.unread()
	}
	return effects
}

// segment opens the shared memory that holds a version; nil if it must come over the network.
func (s *slot) segment(a *Announce) Segment {
	if !s.shared || a.Shared == nil || s.stale == (Key{a.Epoch, a.Version}) {
		return nil
	}
	return s.opens(a.Shared, a.Bytes)
}

// point makes a version ready that is whole in shared memory.
func (s *slot) point(a *Announce, layout *Layout, segment Segment) []Effect {
	s.waiting, s.failure = nil, nil
	s.forgetUndecided()
	v := &Version{Model: s.model, Key: Key{a.Epoch, a.Version}, Layout: layout, segment: segment}
	if a.Hash {
		v.hash = a.ChunkBytes
	}
	s.ready[v.Key] = v
	return []Effect{Ready{v}}
}

// abandon drops what arrives for a newer version; that one is finished, whatever comes.
func (s *slot) abandon() []Effect {
	if s.arriving == nil {
		return nil
	}
	s.releaseArriving()
	if s.catchingUp {
		return nil
	}
	s.catchingUp = true
	return []Effect{Subscribe{DataTopic(s.model), false}}
}

// releaseArriving ends a transfer before it is whole: its buffer may serve another.
func (s *slot) releaseArriving() {
	s.arriving.revokeAll()
	s.buffers.giveBack(s.arriving.Buffer)
	s.arriving = nil
}

// fault says why a version cannot be taken; an empty code if it can.
func (s *slot) fault(a *Announce, layout *Layout) (code Code, text string) {
	switch {
	case a.Encoding != "raw":
		return CodeUnsupported, fmt.Sprintf("encoding %q; this worker takes \"raw\"", a.Encoding)
	case a.Encryption != nil:
		return CodeUnsupported, fmt.Sprintf("encryption %q; this worker knows none", *a.Encryption)
	case a.Bytes > s.bytesMax:
		return CodeTooLarge, fmt.Sprintf("%d bytes; this worker takes at most %d: raise its BytesMax if that is "+
			"meant", a.Bytes, s.bytesMax)
	case a.Bytes > ChunksMax*a.ChunkBytes:
		return CodeTooManyChunks, fmt.Sprintf("%d bytes in chunks of %d are more than %d chunks", a.Bytes,
			a.ChunkBytes, ChunksMax)
	case layout == nil:
		return "", ""
	case layout.Bytes != a.Bytes:
		return CodeLayoutInvalid, fmt.Sprintf("announced are %d bytes, the layout holds %d", a.Bytes, layout.Bytes)
	case s.accepted[layout.ID]:
		return "", ""
	}
	if text := s.accepts(layout); text != "" {
		return CodeLayoutMismatch, text
	}
	s.accepted[layout.ID] = true
	return "", ""
}

// refuse says that a version is not taken.
func (s *slot) refuse(a *Announce, code Code, text string) []Effect {
	key := Key{a.Epoch, a.Version}
	if !triedAgain[code] {
		s.reject(key)
	}
	s.waiting = nil
	return []Effect{s.fail(key, code, text), Rejected{s.model, key, code, text}}
}

func (s *slot) fail(key Key, code Code, text string) Effect {
	if runes := []rune(text); len(runes) > TextMax {
		text = string(runes[:TextMax])
	}
	s.failure = &Failed{s.model, key.Epoch, key.Version, code, text}
	return Send{s.failure}
}

// place says where the payload of a chunk belongs that is about to be received; nil: nowhere.
func (s *slot) place(chunk *Chunk, size int) *Lease {
	if s.arriving == nil || s.arriving.Key != (Key{chunk.Epoch, chunk.Version}) {
		return nil
	}
	return s.arriving.lend(chunk.Index, size)
}

// chunk takes a piece of a version.
func (s *slot) chunk(chunk *Chunk, payload []byte, lease *Lease, now time.Duration, pushed bool) []Effect {
	key := Key{chunk.Epoch, chunk.Version}
	t := s.arriving
	if t == nil || t.Key != key {
		return s.stray(key, now)
	}
	fresh := t.add(chunk, payload, lease, now, pushed)
	effects := s.pull(now)
	if fresh && pushed && t.Here%ProgressChunks == 0 {
		effects = append(effects, s.progress())
	}
	return append(effects, s.completed(now)...)
}

// end takes the word that all chunks of a version are out.
func (s *slot) end(end *End, now time.Duration) []Effect {
	key := Key{end.Epoch, end.Version}
	if s.arriving == nil || s.arriving.Key != key {
		return s.stray(key, now)
	}
	s.arriving.end(end.Digest)
	return append(s.pull(now), s.completed(now)...)
}

// stray takes note of a version of which something came, but which is not being received.
func (s *slot) stray(key Key, now time.Duration) []Effect {
	if s.waiting != nil {
		return nil
	}
	return s.hearOf(key, now)
}

func (s *slot) pull(now time.Duration) []Effect {
	var effects []Effect
	for _, fetch := range s.arriving.wants(now) {
		effects = append(effects, Send{fetch})
	}
	return effects
}

func (s *slot) progress() Effect {
	key := s.arriving.Key
	return Send{&Progress{s.model, key.Epoch, key.Version, s.arriving.Here, "receiving"}}
}

// completed verifies and stages what is arriving, if it is whole.
func (s *slot) completed(now time.Duration) []Effect {
	t := s.arriving
	if t == nil || !t.complete() {
		return nil
	}
	if !t.verify() {
		if t.Restarts < restartsMax {
			return nil // the next tick fetches it anew
		}
		s.releaseArriving()
		text := fmt.Sprintf("the whole did not match its digest, %d times", t.Restarts)
		return append(s.refuse(t.Announce, CodeDigestMismatch, text), s.caughtUp(t.Key.Epoch, now)...)
	}
	s.arriving = nil
	together := t.Announce.Commit == "together"
	v := &Version{Model: s.model, Key: t.Key, Layout: t.Layout, Digest: t.Digest, data: t.Buffer,
		sayStaged: together || t.Announce.Acknowledge == "staged"}
	var effects []Effect
	if v.sayStaged {
		effects = append(effects, s.staged(v))
	}
	s.forgetUndecided()
	s.undecided = v
	if !together {
		effects = append(effects, s.commit()...)
	}
	return append(effects, s.caughtUp(t.Key.Epoch, now)...)
}

// forgetUndecided drops a version: a newer one is whole, or this one will not be committed.
func (s *slot) forgetUndecided() {
	if s.undecided != nil {
		s.buffers.giveBack(s.undecided.data)
		s.undecided = nil
	}
}

// commit makes the version ready that is staged.
func (s *slot) commit() []Effect {
	v := s.undecided
	s.undecided = nil
	s.ready[v.Key] = v
	return []Effect{Ready{v}}
}

// caughtUp ends a transfer: take pushed chunks again, and look for what came meanwhile.
func (s *slot) caughtUp(epoch int64, now time.Duration) []Effect {
	if !s.catchingUp {
		return nil
	}
	s.catchingUp = false
	effects := []Effect{Subscribe{DataTopic(s.model), !s.shared}}
	return append(effects, s.askLatest(epoch, now)...)
}

// committed takes the word that the version that is staged here may be applied.
func (s *slot) committed(c *Commit) []Effect {
	v := s.undecided
	if v == nil || v.Key != (Key{c.Epoch, c.Version}) || v.Digest != c.Digest {
		return nil
	}
	return s.commit()
}

// aborted drops what there is of a version that must not be applied.
func (s *slot) aborted(key Key, now time.Duration) []Effect {
	if s.undecided != nil && s.undecided.Key == key {
		s.forgetUndecided()
		effects := s.resume(now)
		return effects
	}
	if s.arriving != nil && s.arriving.Key == key {
		return s.dropArriving(now)
	}
	return nil
}

// gone takes the word that the publisher no longer has a version.
func (s *slot) gone(epoch, version int64, now time.Duration) []Effect {
	if s.waiting != nil && (version == 0 || s.waiting.Version == version) && (epoch == 0 || s.waiting.Epoch == epoch) {
		s.waiting = nil
	}
	t := s.arriving
	if t == nil || t.Key.Version != version || epoch != 0 && epoch != t.Key.Epoch {
		return nil
	}
	return append(s.dropArriving(now), s.askLatest(t.Key.Epoch, now)...)
}

func (s *slot) dropArriving(now time.Duration) []Effect {
	if s.arriving == nil {
		return nil
	}
	epoch := s.arriving.Key.Epoch
	s.releaseArriving()
	s.waiting = nil
	return s.caughtUp(epoch, now)
}

// reconnected takes note that the publisher has let this worker in (again).
func (s *slot) reconnected(newest Key, now time.Duration) []Effect {
	if s.undecided != nil && s.undecided.Key.Epoch != newest.Epoch {
		s.forgetUndecided()
	}
	s.waiting, s.rejected, s.askedAt = nil, nil, never
	var effects []Effect
	if s.arriving != nil && s.arriving.Key.Epoch != newest.Epoch {
		effects = s.dropArriving(now)
	} else if s.arriving != nil {
		s.arriving.reconnected(now)
	}
	s.askedAt = never
	effects = append(effects, s.repeatStaged()...)
	return append(effects, s.hearOf(newest, now)...)
}

// expect makes a buffer: versions of this size will probably come over the network.
func (s *slot) expect(size int64) {
	if !s.shared && size <= s.bytesMax {
		s.buffers.reserve(size)
	}
}

// What the user does with a version that is ready.

// applied takes note that a version runs here; digest is that of its bytes, if anybody hashed them.
func (s *slot) applied(key Key, digest string, now time.Duration) []Effect {
	if s.returned(key) == nil {
		return nil
	}
	s.running = &Running{key.Epoch, key.Version, digest}
	return append([]Effect{s.sayApplied()}, s.resume(now)...)
}

// failed takes note that a version could not be applied; the old one still runs.
func (s *slot) failed(key Key, text string, now time.Duration) []Effect {
	if s.returned(key) == nil {
		return nil
	}
	s.reject(key)
	return append([]Effect{s.fail(key, CodeApply, text)}, s.resume(now)...)
}

// gotStale takes note that a version was gone from shared memory: ask for the latest.
func (s *slot) gotStale(key Key, now time.Duration) []Effect {
	if s.returned(key) == nil {
		return nil
	}
	s.stale, s.askedAt = key, never
	return s.askLatest(key.Epoch, now)
}

// dropped takes note that a version was replaced by a newer one before anybody applied it.
func (s *slot) dropped(key Key, now time.Duration) []Effect {
	if s.returned(key) == nil {
		return nil
	}
	return s.resume(now)
}

func (s *slot) returned(key Key) *Version {
	v := s.ready[key]
	if v == nil {
		return nil
	}
	delete(s.ready, key)
	if v.segment != nil {
		v.segment.Release()
	} else {
		s.buffers.giveBack(v.data)
	}
	return v
}

// resume begins what waited for a buffer.
func (s *slot) resume(now time.Duration) []Effect {
	if s.waiting == nil || s.arriving != nil {
		return nil
	}
	if key := (Key{s.waiting.Epoch, s.waiting.Version}); !key.Newer(s.newest()) {
		s.waiting = nil
		return nil
	}
	return s.begin(s.waiting, now)
}

// Time.

// tick fetches what is due.
func (s *slot) tick(now time.Duration) []Effect {
	if s.arriving != nil {
		return append(s.pull(now), s.completed(now)...)
	}
	if s.waiting != nil && now-s.askedAt >= s.timing.Patience {
		return s.resume(now)
	}
	return nil
}

// repeat says again how things stand, in case it got lost.
func (s *slot) repeat() []Effect {
	var effects []Effect
	if s.arriving != nil {
		effects = append(effects, s.progress())
	}
	effects = append(effects, s.repeatStaged()...)
	if s.running != nil {
		effects = append(effects, s.sayApplied())
	}
	if s.failure != nil {
		effects = append(effects, Send{s.failure})
	}
	if s.arriving == nil && len(s.ready) > 0 {
		effects = append(effects, s.phase())
	}
	return effects
}

// phase tells what becomes of the newest version that is ready.
func (s *slot) phase() Effect {
	var newest Key
	for key := range s.ready {
		if key.Newer(newest) {
			newest = key
		}
	}
	phase := "staged"
	if newest == s.taken {
		phase = "applying"
	}
	return Send{&Progress{s.model, newest.Epoch, newest.Version, 0, phase}}
}

func (s *slot) repeatStaged() []Effect {
	var effects []Effect
	for _, v := range s.ready {
		if v.sayStaged {
			effects = append(effects, s.staged(v))
		}
	}
	if s.undecided != nil && s.undecided.sayStaged {
		effects = append(effects, s.staged(s.undecided))
	}
	return effects
}

func (s *slot) staged(v *Version) Effect {
	return Send{&Staged{s.model, v.Key.Epoch, v.Key.Version, v.Digest}}
}

func (s *slot) sayApplied() Effect {
	return Send{&Applied{s.model, s.running.Epoch, s.running.Version, s.running.Digest}}
}

// ControlTopic carries announcements, ends and beacons of a model.
func ControlTopic(model string) string { return model + "/ctl" }

// DataTopic carries the chunks of a model.
func DataTopic(model string) string { return model + "/dat" }
