package wbp

const rejectedKept = 8 // versions remembered that could not be taken here

// inMemory are the phases that a buffer or a segment is needed for.
var inMemory = map[State]bool{arriving: true, staged: true, ready: true, applying: true}

// A held is a version that is here, and what there is of it in its phase.
type held struct {
	Key
	announce *Announce
	phase    State
	lacks    State   // while it is announced
	layout   *Layout // once that is known
	buffer   []byte
	segment  Segment   // where it lies instead, on the shared road
	shared   bool      // it was copied from there into the buffer
	transfer *Transfer // while it arrives
	version  *Version  // once it is whole
	running  *Running  // while it runs
}

// A base is the bytes of what runs here, which patches build on, in the buffer that they were staged in. (D3)
type base struct {
	running Running
	layout  *Layout
	data    []byte
	users   int // patches that arrive for it, or are being decoded
}

// holdings are the versions of one model, and the memory that they take.
type holdings struct {
	buffers buffers
	base    *base // nil: no patch can be taken
	// Could not be taken; not tried again. An older one still may be: what was rejected may have been
	// aborted, or meant for few, and the latest for all be one that was missed.
	rejected []Key
	live     []*held // but for those that were dropped or rejected; each behind those before it
}

// at returns the version in a phase, the oldest if there are several; nil if there is none.
func (h *holdings) at(phase State) *held {
	for _, v := range h.live {
		if v.phase == phase {
			return v
		}
	}
	return nil
}

// all returns the versions in some phases.
func (h *holdings) all(phases ...State) []*held {
	var found []*held
	for _, phase := range phases {
		for _, v := range h.live {
			if v.phase == phase {
				found = append(found, v)
			}
		}
	}
	return found
}

// given returns the version of a key, if it is in one of these phases.
func (h *holdings) given(key Key, phases ...State) *held {
	for _, v := range h.all(phases...) {
		if v.Key == key {
			return v
		}
	}
	return nil
}

// newest is the newest version that needs no announcement any more.
func (h *holdings) newest() Key {
	var newest Key
	for _, v := range h.all(staged, ready, applying, running) {
		if v.Newer(newest) {
			newest = v.Key
		}
	}
	return newest
}

func (h *holdings) isRejected(key Key) bool {
	for _, known := range h.rejected {
		if known == key {
			return true
		}
	}
	return false
}

// expect takes note of a version that was announced, in place of any that was only announced.
func (h *holdings) expect(a *Announce) *held {
	h.move(h.at(announced), newer)
	v := &held{Key: Key{a.Epoch, a.Version}, announce: a, phase: announced, lacks: aLayout}
	h.live = append(h.live, v)
	return v
}

// gain takes note that something that an announced version lacked is here, or is not to be had for now.
func (v *held) gain(event Event) {
	if after := lacks[v.lacks][event]; after != "" {
		v.lacks = after
	}
}

// takeMemory gives a version a staging buffer; false if all are in use: then it lacks one of these.
func (h *holdings) takeMemory(v *held) (bool, error) {
	var err error
	if v.buffer, err = h.buffers.take(v.announce.Bytes); v.buffer == nil {
		v.gain(full)
		return false, err
	}
	v.gain(freed)
	return true, nil
}

// rename has a version of another name in the place of one that runs.
func (h *holdings) rename(v *held, key Key) {
	if h.move(v, renamed) {
		v.Key = key
	}
}

// move lets something happen to a version, and tells whether it has an arrow for that.
func (h *holdings) move(v *held, event Event) bool {
	if v == nil || arrows[v.phase][event] == "" {
		return false
	}
	v.phase = arrows[v.phase][event]
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

func (h *holdings) giveBack(v *held) {
	if v.segment != nil {
		v.segment.Release()
		v.segment = nil
	}
	if v.buffer == nil {
		return
	}
	if job := v.transfer.job; job != nil {
		job.unwanted.Store(true) // and who decodes lets go of both
	} else {
		h.letGo(v.transfer)
		h.buffers.giveBack(v.buffer)
	}
	v.buffer = nil
}

// letGo ends a transfer: nothing of it will be written any more, nor is needed that a patch builds on or came into.
func (h *holdings) letGo(t *Transfer) {
	t.revokeAll()
	b := t.base
	if b == nil {
		return
	}
	release(t.Buffer)
	t.Buffer, t.base = nil, nil
	b.users--
	if runs := h.at(running); b == h.base && (runs == nil || *runs.running != b.running) {
		h.rebase(nil)
	}
}

// rebase keeps the bytes of what begins to run, in place of those of the version before; of nil, none. But what a
// patch still needs stays until the next version runs: then it returns false.
func (h *holdings) rebase(v *held) bool {
	old := h.base
	if old != nil && old.users > 0 {
		return false
	}
	if h.base = nil; v != nil {
		h.base = &base{*v.running, v.version.Layout, v.buffer, 0}
		v.buffer = nil
		h.buffers.taken--
	}
	if old != nil && v != nil {
		h.buffers.spare(old.data)
	} else if old != nil {
		release(old.data) // it was needed for patches alone
	}
	return true
}

// free gives all memory back to the system. Nobody may use a version afterwards.
func (h *holdings) free() {
	for _, v := range h.all(arriving, staged, ready, applying) {
		h.move(v, newer)
	}
	h.rebase(nil)
	h.buffers.close()
}
