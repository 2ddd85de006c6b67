package wbp

import "time"

// FetchPlanner decides when to request the latest version of a model. (W4)
//
// After a failure that may not recur, the version is retried after a delay, which doubles with each
// failure.
type FetchPlanner struct {
	model        string
	versions     *versionStore
	timing       *Timing
	latestAt     time.Duration // when an announcement was last requested
	answers      time.Duration // when the last answered ping was sent
	backoffKey   Key           // the version that is postponed
	backoffUntil time.Duration // when that version may be retried
	backoffPause time.Duration // the last delay of that version
}

func newFetchPlanner(model string, versions *versionStore, timing *Timing) *FetchPlanner {
	return &FetchPlanner{model: model, versions: versions, timing: timing, latestAt: never, answers: never}
}

// reconnected prepares for a new session: the latest version may be requested at once.
func (a *FetchPlanner) reconnected() { a.latestAt = never }

// hearOf handles a version that a beacon, a welcome, a pong or a stray chunk names. If the version
// is new, hearOf requests the latest version.
func (a *FetchPlanner) hearOf(key Key, now time.Duration) []Effect {
	if key.Version == 0 || !key.Newer(a.versions.newest()) || a.versions.isRejected(key) { // W4, W15
		return nil
	}
	if v := a.versions.inPhase(arriving); v != nil && (!key.Newer(v.Key) || a.versions.mode == catchingUp) { // W26
		return nil
	}
	if v := a.versions.inPhase(announced); v != nil && !key.Newer(v.Key) && v.lacks == aLayout { // W7
		return nil
	}
	if !key.Newer(a.backoffKey) && now < a.backoffUntil { // W36
		return nil
	}
	return a.requestLatest(key.Epoch, now, false)
}

// requestLatest returns a request for the latest version. Unless atOnce is true, it returns nothing within
// Timing.Quiet of the last request.
func (a *FetchPlanner) requestLatest(epoch int64, now time.Duration, atOnce bool) []Effect {
	if now-a.latestAt < a.timing.Quiet && !atOnce { // W4
		return nil
	}
	a.latestAt = now
	waiting := a.versions.inPhase(announced)
	needsLayout := waiting != nil && waiting.lacks == aLayout
	return []Effect{Send{&Fetch{Model: a.model, Epoch: epoch, Layout: needsLayout}}}
}

// layout requests the layout of an announced version. (W7)
func (a *FetchPlanner) layout(key Key, now time.Duration) []Effect {
	a.latestAt = now
	return []Effect{Send{&Fetch{Model: a.model, Epoch: key.Epoch, Version: key.Version, Layout: true}}}
}

// answered records that the ping sent at sentAt, and every request before it, was answered. (W12)
func (a *FetchPlanner) answered(sentAt time.Duration) {
	a.answers = sentAt
	if v := a.versions.inPhase(arriving); v != nil {
		v.transfer.answered(sentAt)
	}
}

// due reports whether to request a layout again. The timeout is longer while the answer may still
// be on its way. (W7)
func (a *FetchPlanner) due(now time.Duration) bool {
	patience := a.timing.Patience
	if a.answers <= a.latestAt {
		patience = a.timing.PatienceMax
	}
	return now-a.latestAt >= patience
}

// backOff postpones the retry of a version, each time for twice as long. (W36)
func (a *FetchPlanner) backOff(key Key, now time.Duration) {
	a.backoffPause *= 2
	if a.backoffKey != key {
		a.backoffPause = a.timing.Patience
	}
	if a.backoffPause > a.timing.PatienceMax {
		a.backoffPause = a.timing.PatienceMax
	}
	a.backoffKey, a.backoffUntil = key, now+a.backoffPause
}

// endBackoff ends the delay of a version that is no longer available, since an older version
// may be the latest.
func (a *FetchPlanner) endBackoff(key Key) {
	if a.backoffKey == key {
		a.backoffUntil = 0
	}
}
