package wbp

import "time"

const rejectedKept = 8 // versions remembered that could not be taken here

// inMemory are the phases that a buffer or a segment is needed for.
var inMemory = map[State]bool{arriving: true, staged: true, ready: true, applying: true}

// A held is a version that is here, and what there is of it in its phase.
type versionEntry struct {
	Key
	announce *Announce
	phase    State
	lacks    State   // while it is announced
	layout   *Layout // once that is known
	buffer   []byte
	segment  Segment        // where it lies instead, on the shared road
	shared   bool           // it was copied from there into the buffer
	transfer *Transfer      // while it arrives
	staged   *StagedVersion // once it is whole
	running  *Running       // while it runs
}

// retold takes another announcement of it, if the same arrives, and tells whether it does.
func (v *versionEntry) updateAnnouncement(a *Announce) bool {
	same := a.Layout == v.announce.Layout && a.Bytes == v.announce.Bytes && a.ChunkBytes == v.announce.ChunkBytes
	if same {
		v.announce = a
	}
	return same
}

// knows takes note of its layout.
func (v *versionEntry) knows(layout *Layout) { v.layout = layout }

// gain takes note that something that an announced version lacked is here, or is not to be had for now.
func (v *versionEntry) resolve(event Event) {
	if after := lacks[v.lacks][event]; after != "" {
		v.lacks = after
	}
}

// copy takes all of it out of shared memory, if that holds it. (S6)
func (v *versionEntry) copy(segment Segment) {
	v.shared = segment.Copy(v.announce.Model, v.Key, v.transfer.read) == nil
	if !v.shared {
		v.transfer.unread()
	}
}

// comesBy has it arrive anew, by other means.
func (v *versionEntry) comesBy(t *Transfer) { v.transfer = t }

// A base is the bytes of what runs here, which patches build on, in the buffer that they were staged in. (D3)
type base struct {
	running Running
	layout  *Layout
	data    []byte
	users   int // patches that arrive for it, or are being decoded
}

// holdings are the versions of one model, and the memory that they take.
type versionStore struct {
	mode    State
	buffers buffers
	base    *base // nil: no patch can be taken
	// Could not be taken; not tried again. An older one still may be: what was rejected may have been
	// aborted, or meant for few, and the latest for all be one that was missed.
	rejected []Key
	live     []*versionEntry // but for those that were dropped or rejected; each behind those before it
}

// at returns the version in a phase, the oldest if there are several; nil if there is none.
func (h *versionStore) at(phase State) *versionEntry {
	for _, v := range h.live {
		if v.phase == phase {
			return v
		}
	}
	return nil
}

// all returns the versions in some phases.
func (h *versionStore) all(phases ...State) []*versionEntry {
	var found []*versionEntry
	for _, phase := range phases {
		for _, v := range h.live {
			if v.phase == phase {
				found = append(found, v)
			}
		}
	}
	return found
}

// find returns the version of a key, if it is in one of these phases.
func (h *versionStore) find(key Key, phases ...State) *versionEntry {
	for _, v := range h.all(phases...) {
		if v.Key == key {
			return v
		}
	}
	return nil
}

// newest is the newest version that needs no announcement any more.
func (h *versionStore) newest() Key {
	var newest Key
	for _, v := range h.all(staged, ready, applying, running) {
		if v.Newer(newest) {
			newest = v.Key
		}
	}
	return newest
}

func (h *versionStore) isRejected(key Key) bool {
	for _, known := range h.rejected {
		if known == key {
			return true
		}
	}
	return false
}

// expect takes note of a version that was announced, in place of any that was only announced.
func (h *versionStore) expect(a *Announce) *versionEntry {
	h.move(h.at(announced), newer)
	v := &versionEntry{Key: Key{a.Epoch, a.Version}, announce: a, phase: announced, lacks: aLayout}
	h.live = append(h.live, v)
	return v
}

// takeMemory gives a version a staging buffer; false if all are in use: then it lacks one of these.
func (h *versionStore) takeMemory(v *versionEntry) (bool, error) {
	var err error
	if v.buffer, err = h.buffers.take(v.announce.Bytes); v.buffer == nil {
		v.resolve(full)
		return false, err
	}
	v.resolve(freed)
	return true, nil
}

// reconnected takes note that a session begins, of this epoch: what was asked for before will not come. (W28)
func (h *versionStore) reconnected(epoch int64, now time.Duration) {
	for _, v := range h.all(announced, arriving, staged) {
		if v.phase == announced || v.Epoch != epoch {
			h.move(v, fenced)
		} else if v.phase == arriving {
			v.transfer.reconnected(now)
		}
	}
	h.rejected = nil
}

// turn lets something happen to the model, and tells whether its mode is another one now. (W26)
func (h *versionStore) changeMode(event Event) bool {
	mode := modes[h.mode][event]
	if mode != "" {
		h.mode = mode
	}
	return mode != ""
}

// rename has a version of another name in the place of one that runs.
func (h *versionStore) rename(v *versionEntry, key Key) {
	was := *v.running
	now := Running{key.Epoch, key.Version, was.Digest}
	if !h.move(v, renamed, &now) {
		return
	}
	v.Key = key
	if h.base != nil && h.base.running == was {
		h.base.running = now
	}
}

// move lets something happen to a version, by which there is more of it: what it arrives by, what is whole, or as what
// it runs. It tells whether there is an arrow for that.
func (h *versionStore) move(v *versionEntry, event Event, by ...interface{}) bool {
	if v == nil || arrows[v.phase][event] == "" {
		return false
	}
	v.phase = arrows[v.phase][event]
	for _, part := range by {
		switch part := part.(type) {
		case *Transfer:
			v.transfer = part
		case *StagedVersion:
			v.staged, v.segment = part, part.segment
		case *Running:
			v.running = part
		}
	}
	for i, known := range h.live {
		if known == v {
			h.live = append(h.live[:i], h.live[i+1:]...)
		}
	}
	switch v.phase {
	case rejected:
		if h.rejected = append(h.rejected, v.Key); len(h.rejected) > rejectedKept {
			h.rejected = h.rejected[1:]
		}
	case dropped:
	default:
		h.live = append(h.live, v)
	}
	if !inMemory[v.phase] {
		h.giveBack(v)
	}
	return true
}

func (h *versionStore) giveBack(v *versionEntry) {
	if v.segment != nil {
		v.segment.Release()
		v.segment = nil
	}
	if v.buffer == nil {
		return
	}
	if !v.transfer.revoke() { // else who decodes lets go of both
		h.release(v.transfer)
		h.buffers.giveBack(v.buffer)
	}
	v.buffer = nil
}

// What patches build on.

// rebase keeps the bytes of what begins to run, in place of those of the version before; of nil, none. But what a
// patch still needs stays until the next version runs: then it returns false.
func (h *versionStore) setPatchBase(v *versionEntry, runs *Running) bool {
	old := h.base
	if old != nil && old.users > 0 {
		return false
	}
	if h.base = nil; v != nil {
		h.base = &base{*runs, v.staged.Layout, v.buffer, 0}
		v.buffer = nil
		h.buffers.forget()
	}
	if old != nil && v != nil {
		h.buffers.spare(old.data)
	} else if old != nil {
		release(old.data) // it was needed for patches alone
	}
	return true
}

// buildOn returns what a patch builds on, which needs it until release.
func (h *versionStore) buildOn() *base {
	h.base.users++
	return h.base
}

// release takes the word that nothing of a transfer is needed any more; if what its patch builds on runs no more, nobody
// needs that.
func (h *versionStore) release(t *Transfer) {
	b := t.letGo()
	if b == nil {
		return
	}
	b.users--
	if runs := h.at(running); b == h.base && (runs == nil || *runs.running != b.running) {
		h.setPatchBase(nil, nil)
	}
}

// free gives all memory back to the system. Nobody may use a version afterwards.
func (h *versionStore) free() {
	for _, v := range h.all(arriving, staged, ready, applying) {
		h.move(v, newer)
	}
	h.setPatchBase(nil, nil)
	h.buffers.close()
}
