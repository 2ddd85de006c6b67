package wbp

import "time"

// FetchPlanner decides when to request the latest version of a model. (W4)
//
// After a failure that may not recur, the worker retries the version after a delay, which doubles
// with each failure.
type FetchPlanner struct {
	model        string
	versions     *versionStore
	timing       *Timing
	requestedAt  time.Duration // when an announcement or a layout was last requested
	answeredTo   time.Duration // when the last answered ping was sent
	backoffKey   Key           // the version that is postponed
	backoffUntil time.Duration // when that version may be retried
	backoffPause time.Duration // the last delay of that version
}

func newFetchPlanner(model string, versions *versionStore, timing *Timing) *FetchPlanner {
	return &FetchPlanner{model: model, versions: versions, timing: timing, requestedAt: never, answeredTo: never}
}

// reconnected prepares for a new session: the latest version may be requested at once.
func (p *FetchPlanner) reconnected() { p.requestedAt = never }

// hearOf handles the key of a version, from a beacon, a welcome or a pong, or from a chunk or end of a
// version that is not arriving. If the key is new, hearOf requests the latest version.
func (p *FetchPlanner) hearOf(key Key, now time.Duration) []Effect {
	if key.Version == 0 || !key.Newer(p.versions.newest()) || p.versions.isRejected(key) { // W4, W15
		return nil
	}
	if v := p.versions.inPhase(arriving); v != nil && (!key.Newer(v.Key) || p.versions.mode == catchingUp) { // W26
		return nil
	}
	if v := p.versions.inPhase(announced); v != nil && !key.Newer(v.Key) && v.lacks == aLayout { // W7
		return nil
	}
	if !key.Newer(p.backoffKey) && now < p.backoffUntil { // W36
		return nil
	}
	return p.requestLatest(key.Epoch, now, false)
}

// requestLatest returns a request for the latest version. It returns nothing if the last request was
// sent less than Timing.Quiet ago, unless atOnce is true.
func (p *FetchPlanner) requestLatest(epoch int64, now time.Duration, atOnce bool) []Effect {
	if now-p.requestedAt < p.timing.Quiet && !atOnce { // W4
		return nil
	}
	p.requestedAt = now
	waiting := p.versions.inPhase(announced)
	needsLayout := waiting != nil && waiting.lacks == aLayout
	return []Effect{Send{&Fetch{Model: p.model, Epoch: epoch, Layout: needsLayout}}}
}

// requestLayout requests the layout of an announced version. (W7)
func (p *FetchPlanner) requestLayout(key Key, now time.Duration) []Effect {
	p.requestedAt = now
	return []Effect{Send{&Fetch{Model: p.model, Epoch: key.Epoch, Version: key.Version, Layout: true}}}
}

// answered records that the ping sent at sentAt, and every request before it, was answered. (W12)
func (p *FetchPlanner) answered(sentAt time.Duration) {
	p.answeredTo = sentAt
	if v := p.versions.inPhase(arriving); v != nil {
		v.transfer.answered(sentAt)
	}
}

// isDue reports whether to request a layout again. The timeout is longer while the answer may still
// be on its way. (W7)
func (p *FetchPlanner) isDue(now time.Duration) bool {
	timeout := p.timing.Patience
	if p.answeredTo <= p.requestedAt {
		timeout = p.timing.PatienceMax
	}
	return now-p.requestedAt >= timeout
}

// backOff postpones a version after a failure. The delay doubles with each failure of the version. (W36)
func (p *FetchPlanner) backOff(key Key, now time.Duration) {
	p.backoffPause *= 2
	if p.backoffKey != key {
		p.backoffPause = p.timing.Patience
	}
	if p.backoffPause > p.timing.PatienceMax {
		p.backoffPause = p.timing.PatienceMax
	}
	p.backoffKey, p.backoffUntil = key, now+p.backoffPause
}

// endBackoff ends the delay of a version that is no longer available, since the latest version may
// now be an older one, which must not wait.
func (p *FetchPlanner) endBackoff(key Key) {
	if p.backoffKey == key {
		p.backoffUntil = 0
	}
}
