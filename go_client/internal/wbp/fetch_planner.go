package wbp

import "time"

// FetchPlanner is when a worker asks for the latest version of a model, of which it has heard. (W4)
//
// A version that has failed, and is to be tried again, is left alone for ever longer pauses.
type FetchPlanner struct {
	model    string
	versions *versionStore
	timing   *Timing
	latestAt time.Duration // when the latest announcement was asked for
	answers  time.Duration // when the last ping was sent that was answered
	later    Key           // what is put off
	until    time.Duration // when it may be tried again
	pause    time.Duration // for which it was put off
}

func newFetchPlanner(model string, versions *versionStore, timing *Timing) *FetchPlanner {
	return &FetchPlanner{model: model, versions: versions, timing: timing, latestAt: never, answers: never}
}

// reconnected takes note that a session begins.
func (a *FetchPlanner) reconnected() { a.latestAt = never }

// hearOf takes a beacon, a welcome or a stray chunk that speaks of a version: ask if it is news.
func (a *FetchPlanner) hearOf(key Key, now time.Duration) []Effect {
	if key.Version == 0 || !key.Newer(a.versions.newest()) || a.versions.isRejected(key) { // W4, W15
		return nil
	}
	if v := a.versions.at(arriving); v != nil && (!key.Newer(v.Key) || a.versions.mode == catchingUp) { // W26
		return nil
	}
	if v := a.versions.at(announced); v != nil && !key.Newer(v.Key) && v.lacks == aLayout { // W7
		return nil
	}
	if !key.Newer(a.later) && now < a.until { // W36
		return nil
	}
	return a.latest(key.Epoch, now, false)
}

// latest asks for the latest version, but not all the time.
func (a *FetchPlanner) latest(epoch int64, now time.Duration, atOnce bool) []Effect {
	if now-a.latestAt < a.timing.Quiet && !atOnce { // W4
		return nil
	}
	a.latestAt = now
	waiting := a.versions.at(announced)
	needsLayout := waiting != nil && waiting.lacks == aLayout
	return []Effect{Send{&Fetch{Model: a.model, Epoch: epoch, Layout: needsLayout}}}
}

// layout asks for the layout of a version that was announced. (W7)
func (a *FetchPlanner) layout(key Key, now time.Duration) []Effect {
	a.latestAt = now
	return []Effect{Send{&Fetch{Model: a.model, Epoch: key.Epoch, Version: key.Version, Layout: true}}}
}

// answered takes the word that a ping was answered that was sent then, and so was whatever was asked before it. (W12)
func (a *FetchPlanner) answered(sentAt time.Duration) {
	a.answers = sentAt
	if v := a.versions.at(arriving); v != nil {
		v.transfer.answered(sentAt)
	}
}

// due tells whether to ask again for a layout, which may be on its way. (W7)
func (a *FetchPlanner) due(now time.Duration) bool {
	patience := a.timing.Patience
	if a.answers <= a.latestAt {
		patience = a.timing.PatienceMax
	}
	return now-a.latestAt >= patience
}

// putOff leaves a version alone for a while, for twice as long as the last time. (W36)
func (a *FetchPlanner) putOff(key Key, now time.Duration) {
	a.pause *= 2
	if a.later != key {
		a.pause = a.timing.Patience
	}
	if a.pause > a.timing.PatienceMax {
		a.pause = a.timing.PatienceMax
	}
	a.later, a.until = key, now+a.pause
}

// putOffNoLonger takes the word that a version is not to be had any more: what was before it may be what there is.
func (a *FetchPlanner) putOffNoLonger(key Key) {
	if a.later == key {
		a.until = 0
	}
}
