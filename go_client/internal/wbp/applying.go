package wbp

import "time"

const appliesMax = 3 // in a row that fail half-way, before a version is tried no more

// Applying is what became of the versions of one model that were applied here, or could not be. (W15, W24)
type Applying struct {
	model   string
	holds   *holdings
	asking  *Asking
	patches bool    // they are taken, and build on what runs
	epoch   int64   // the greatest of which bytes were written into the model
	torn    int     // applies in a row that failed half-way: while there is one, nothing runs
	stale   Key     // was not to be had from shared memory: fetch it, if it is offered
	last    *Failed // the last one, until another version is begun
}

// applied takes note that a version runs here; digest is that of its bytes, if anybody hashed them. nil: it was not begun.
func (a *Applying) applied(key Key, digest string) []Effect {
	v, older := a.holds.find(key, applying), a.holds.at(running) // W16
	if v == nil {
		return nil
	}
	runs := &Running{v.Epoch, v.Version, digest}
	if a.patches && v.announce.Keep && !v.staged.Shared { // D3
		a.holds.rebase(v, runs)
	} else {
		a.holds.rebase(nil, nil)
	}
	a.holds.move(v, applied, runs)
	a.holds.move(older, newer)
	return []Effect{a.runs(v)}
}

// failed takes note that a version could not be applied. If the model is intact, what ran before still runs.
func (a *Applying) failed(key Key, text string, intact bool, now time.Duration) []Effect {
	v, event := a.holds.find(key, applying), declined // W24
	if v == nil {
		return nil
	}
	if !intact { // it holds parts of two versions; what is tried next comes verified
		a.holds.move(a.holds.at(running), torn)
		a.holds.rebase(nil, nil)
		a.stale = key
		a.reaches(key)
		if a.torn++; a.torn < appliesMax {
			event = torn
		}
	}
	a.holds.move(v, event)
	return a.fail(key, CodeApply, text, now)
}

// gotStale takes note that a version was gone from shared memory, if it was begun. (S5)
func (a *Applying) gotStale(key Key) bool {
	if !a.holds.move(a.holds.find(key, applying), stale) {
		return false
	}
	a.stale = key
	return true
}

// runs takes note of what runs, and says it.
func (a *Applying) runs(v *held) Effect {
	a.torn = 0
	a.reaches(v.Key)
	if f := a.last; f != nil && !(Key{f.Epoch, f.Version}).Newer(v.Key) { // W17
		a.last = nil
	}
	return sayApplied(a.model, v)
}

// reaches takes note that bytes of a version were written into the model.
func (a *Applying) reaches(key Key) {
	if key.Epoch > a.epoch {
		a.epoch = key.Epoch
	}
}

// renamed takes the word that what runs is a newer version, byte for byte; nil if that has no effect. It has none
// if another version is at the user's, who may be writing it into the model.
func (a *Applying) renamed(r *Rename) []Effect {
	v, key := a.holds.at(running), Key{r.Epoch, r.Version} // W25
	if v == nil || *v.running != r.Was || len(a.holds.all(ready, applying)) > 0 || !key.Newer(a.holds.newest()) {
		return nil
	}
	if begun := a.holds.at(arriving); begun != nil && begun.Newer(key) {
		return nil
	}
	for _, older := range a.holds.all(announced, arriving, staged) {
		a.holds.move(older, newer)
	}
	a.holds.rename(v, key)
	said := a.runs(v)
	a.begun()
	return []Effect{said, Renamed{a.model, key, r.Metadata}}
}

// reconnected takes note that a session begins: what was torn may be tried as often as at first.
func (a *Applying) reconnected() {
	if a.torn > 1 {
		a.torn = 1
	}
}

// begun forgets why another version was not taken, now that one is on its way. (That nothing runs is said on.)
func (a *Applying) begun() {
	if a.torn == 0 {
		a.last = nil // W17
	}
}

// fail tells the publisher and the user that a version is not taken; not now, or not ever.
func (a *Applying) fail(key Key, code Code, text string, now time.Duration) []Effect {
	if triedAgain[code] {
		a.asking.putOff(key, now)
	}
	text = atMost(text, TextMax)
	a.last = &Failed{Model: a.model, Epoch: key.Epoch, Version: key.Version, Code: code, Text: text}
	return append(a.failure(), Rejected{a.model, key, code, text})
}

// failure says what was not taken last, if it still counts.
func (a *Applying) failure() []Effect {
	if a.last == nil {
		return nil
	}
	return []Effect{sayFailed(a.last, a.torn == 0)}
}
