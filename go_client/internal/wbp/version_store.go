package wbp

import "time"

const rejectedKept = 8 // rejected versions that are remembered

// phasesWithMemory are the phases in which a version needs a buffer or a segment.
var phasesWithMemory = map[State]bool{arriving: true, staged: true, ready: true, applying: true}

// A versionEntry is a version with its phase and the data of that phase.
type versionEntry struct {
	Key
	announce         *Announce
	phase            State
	lacks            State   // what the version waits for, while announced (a state of announcedTable)
	layout           *Layout // once known
	buffer           []byte
	segment          Segment        // shared memory that has the version's data; nil if buffer has the data
	shared           bool           // the buffer was copied from shared memory
	transfer         *Transfer      // while arriving
	staged           *StagedVersion // once staged
	awaitsCompanions bool           // while staged: the version is committed, and waits for its companions
	running          *Running       // while running
}

// updateAnnouncement replaces the stored announcement with a repeated one. If the two announcements
// describe different bytes, it changes nothing and returns false.
func (v *versionEntry) updateAnnouncement(a *Announce) bool {
	same := a.Layout == v.announce.Layout && a.Bytes == v.announce.Bytes && a.ChunkBytes == v.announce.ChunkBytes
	if same {
		v.announce = a
	}
	return same
}

// setLayout sets the layout of the version.
func (v *versionEntry) setLayout(layout *Layout) { v.layout = layout }

// resolve applies an event to what an announced version waits for: its layout or memory has become
// available, or is not available now.
func (v *versionEntry) resolve(event Event) {
	if after := announcedTable[v.lacks][event]; after != "" {
		v.lacks = after
	}
}

// copy copies the version from a segment, if the segment still holds it. (S6)
func (v *versionEntry) copy(segment Segment) {
	v.shared = segment.Copy(v.announce.Model, v.Key, v.transfer.copyFrom) == nil
	if !v.shared {
		v.transfer.dropChunks()
	}
}

// awaitCompanions records that the staged version is committed, and waits for its companions. (C2)
func (v *versionEntry) awaitCompanions() { v.awaitsCompanions = true }

// setTransfer sets the transfer that receives the version.
func (v *versionEntry) setTransfer(t *Transfer) { v.transfer = t }

// A base has the bytes of the running version, on which patches build, in their staging buffer. (D3)
type base struct {
	running Running
	layout  *Layout
	data    []byte
	users   int // number of patches that are arriving or being decoded
}

// A versionStore has the versions of one model, and their memory.
type versionStore struct {
	mode    State
	buffers buffers
	base    *base // nil: no patch can be decoded
	// Versions that are not retried. Versions older than a rejected version are accepted: the
	// publisher may have aborted the rejected version or sent it to only a few workers, so an older
	// version that this worker missed may be the latest for all workers.
	rejected []Key
	live     []*versionEntry // neither dropped nor rejected, in the order in which they entered their phases
}

// inPhase returns the version that is in this phase, or nil if there is none. If there are several,
// inPhase returns the one that entered the phase first.
func (s *versionStore) inPhase(phase State) *versionEntry {
	for _, v := range s.live {
		if v.phase == phase {
			return v
		}
	}
	return nil
}

// inPhases returns the versions in any of these phases.
func (s *versionStore) inPhases(phases ...State) []*versionEntry {
	var found []*versionEntry
	for _, phase := range phases {
		for _, v := range s.live {
			if v.phase == phase {
				found = append(found, v)
			}
		}
	}
	return found
}

// find returns the version with this key, or nil if it is in none of these phases.
func (s *versionStore) find(key Key, phases ...State) *versionEntry {
	for _, v := range s.inPhases(phases...) {
		if v.Key == key {
			return v
		}
	}
	return nil
}

// awaitingCompanions returns the staged version if it is committed and waits for its companions; else nil.
func (s *versionStore) awaitingCompanions() *versionEntry {
	if v := s.inPhase(staged); v != nil && v.awaitsCompanions {
		return v
	}
	return nil
}

// waiting returns the version that waits for its companions, else the version that is ready to be
// applied; nil if there is neither.
func (s *versionStore) waiting() *versionEntry {
	if v := s.awaitingCompanions(); v != nil {
		return v
	}
	return s.inPhase(ready)
}

// hasReadyOrRunning reports whether the version with this key or a newer one is ready or runs.
func (s *versionStore) hasReadyOrRunning(key Key) bool {
	for _, v := range s.inPhases(ready, running) {
		if !key.Newer(v.Key) {
			return true
		}
	}
	return false
}

// newest returns the key of the newest complete version; zero if no version is complete.
func (s *versionStore) newest() Key {
	var newest Key
	for _, v := range s.inPhases(staged, ready, applying, running) {
		if v.Newer(newest) {
			newest = v.Key
		}
	}
	return newest
}

func (s *versionStore) isRejected(key Key) bool {
	for _, known := range s.rejected {
		if known == key {
			return true
		}
	}
	return false
}

// expect adds an announced version, and drops the version that was in phase announced before it.
func (s *versionStore) expect(a *Announce) *versionEntry {
	s.move(s.inPhase(announced), newer)
	v := &versionEntry{Key: Key{a.Epoch, a.Version}, announce: a, phase: announced, lacks: aLayout}
	s.live = append(s.live, v)
	return v
}

// takeMemory takes a staging buffer for a version. If all buffers are in use or the allocation fails,
// it records that the version waits for a buffer, and returns false.
func (s *versionStore) takeMemory(v *versionEntry) (bool, error) {
	var err error
	if v.buffer, err = s.buffers.take(v.announce.Bytes); v.buffer == nil {
		v.resolve(full)
		return false, err
	}
	v.resolve(freed)
	return true, nil
}

// reconnected prepares for a new session of an epoch. It drops announced versions, and versions of
// other epochs that are not ready yet. It requests the arriving version again, since the requests of
// the previous session will not be answered. (W28)
func (s *versionStore) reconnected(epoch int64, now time.Duration) {
	for _, v := range s.inPhases(announced, arriving, staged) {
		if v.phase == announced || v.Epoch != epoch {
			s.move(v, fenced)
		} else if v.phase == arriving {
			v.transfer.reconnected(now)
		}
	}
	s.rejected = nil
}

// changeMode applies an event to the mode. It returns false if the mode has no transition for the event. (W26)
func (s *versionStore) changeMode(event Event) bool {
	mode := modelTable[s.mode][event]
	if mode != "" {
		s.mode = mode
	}
	return mode != ""
}

// rename gives the running version another key.
func (s *versionStore) rename(v *versionEntry, key Key) {
	was := *v.running
	now := Running{Epoch: key.Epoch, Version: key.Version, Digest: was.Digest}
	if !s.move(v, renamed, &now) {
		return
	}
	v.Key = key
	if s.base != nil && s.base.running == was {
		s.base.running = now
	}
}

// move applies an event to a version. It returns false if v is nil or the version's phase has no transition for
// the event. parts are new values for the fields of the next phase: a *Transfer, *StagedVersion or *Running.
func (s *versionStore) move(v *versionEntry, event Event, parts ...interface{}) bool {
	if v == nil || versionTable[v.phase][event] == "" {
		return false
	}
	v.phase = versionTable[v.phase][event]
	for _, part := range parts {
		switch part := part.(type) {
		case *Transfer:
			v.transfer = part
		case *StagedVersion:
			v.staged, v.segment = part, part.segment
		case *Running:
			v.running = part
		}
	}
	for i, known := range s.live {
		if known == v {
			s.live = append(s.live[:i], s.live[i+1:]...)
		}
	}
	switch v.phase {
	case rejected:
		if s.rejected = append(s.rejected, v.Key); len(s.rejected) > rejectedKept {
			s.rejected = s.rejected[1:]
		}
	case dropped:
	default:
		s.live = append(s.live, v)
	}
	if !phasesWithMemory[v.phase] {
		s.giveBack(v)
	}
	return true
}

// giveBack releases a version's memory.
func (s *versionStore) giveBack(v *versionEntry) {
	if v.segment != nil {
		v.segment.Release()
		v.segment = nil
	}
	if v.buffer == nil {
		return
	}
	if !v.transfer.cancelDecoding() { // otherwise follower.decoded releases the transfer and the buffer
		s.release(v.transfer)
		s.buffers.giveBack(v.buffer)
	}
	v.buffer = nil
}

// The patch base.

// setPatchBase makes the bytes of a new running version the patch base, and releases the previous
// base. If v is nil, there is no base afterwards. While a patch uses the previous base, setPatchBase
// changes nothing and returns false.
func (s *versionStore) setPatchBase(v *versionEntry, runs *Running) bool {
	old := s.base
	if old != nil && old.users > 0 {
		return false
	}
	if s.base = nil; v != nil {
		s.base = &base{*runs, v.staged.Layout, v.buffer, 0}
		v.buffer = nil
		s.buffers.forget()
	}
	if old != nil && v != nil {
		s.buffers.recycle(old.data)
	} else if old != nil {
		release(old.data) // without a base, no patch needs the buffer
	}
	return true
}

// useBase returns the base for a new patch, which counts as a user of the base until release.
func (s *versionStore) useBase() *base {
	s.base.users++
	return s.base
}

// release ends a transfer's use of its base, if it has one. If the base's version no longer runs,
// release drops the base.
func (s *versionStore) release(t *Transfer) {
	b := t.detachBase()
	if b == nil {
		return
	}
	b.users--
	if runs := s.inPhase(running); b == s.base && (runs == nil || *runs.running != b.running) {
		s.setPatchBase(nil, nil)
	}
}

// free releases all memory to the system. No version may be used afterwards.
func (s *versionStore) free() {
	for _, v := range s.inPhases(arriving, staged, ready, applying) {
		s.move(v, newer)
	}
	s.setPatchBase(nil, nil)
	s.buffers.close()
}
