package weightbus

import "time"

const probePauseMax = time.Minute // longest pause between two probes of the first address

// A route decides which of its addresses the worker connects to, in the order that the user gave.
// It has neither clock nor sockets. (W37)
type route struct {
	addresses     []string
	retryPause    time.Duration // after each round of failures
	probeInterval time.Duration // shortest pause between two probes of the first address
	current       int           // index of the address that the worker is connected to, or tries
	failures      int           // in a row
	inSession     bool          // a session has begun with the current address
	foundByProbe  bool          // the worker returned to the first address because a probe was answered
	movedAt       time.Duration // when the worker moved, or will move, to the current address
	sessionSince  time.Duration // when inSession became true
	probePause    time.Duration // before the next probe
	probeAt       time.Duration // when to probe the first address next, or never
}

const never = time.Duration(1<<63 - 1)

func newRoute(addresses []string, retryPause, lostAfter time.Duration) *route {
	interval := lostAfter
	if interval < time.Second {
		interval = time.Second
	}
	return &route{addresses: addresses, retryPause: retryPause, probeInterval: interval, probePause: interval, probeAt: never}
}

func (r *route) address() string { return r.addresses[r.current] }

// hasSeveral reports whether the worker has more than one address.
func (r *route) hasSeveral() bool { return len(r.addresses) > 1 }

// joined records that a session has begun.
func (r *route) joined(now time.Duration) {
	if r.inSession {
		return
	}
	r.inSession, r.sessionSince = true, now
	if r.current > 0 {
		r.probeAt = now + r.probePause
	}
}

// failed records that the current address failed, and moves on to the next one. It returns how long
// to wait before trying the next address: retryPause after each round of failures, otherwise 0. A
// session shorter than retryPause counts as a failure, too: otherwise a publisher that ends each
// session at once would be dialled without a pause.
func (r *route) failed(now time.Duration) (wait time.Duration) {
	if r.inSession && now-r.sessionSince >= r.retryPause {
		r.failures = 0
	}
	if r.current == 0 {
		r.setProbePause(now)
	}
	if r.failures++; r.failures%len(r.addresses) == 0 {
		wait = r.retryPause
	}
	r.moveTo((r.current+1)%len(r.addresses), now+wait)
	return wait
}

// setProbePause sets the pause before the next probe when the worker leaves the first address. The pause
// is short after a long stay there, and doubles each time that a probe brought the worker back in vain.
func (r *route) setProbePause(now time.Duration) {
	switch {
	case r.inSession && now-r.movedAt >= r.probeInterval:
		r.probePause = r.probeInterval
	case r.foundByProbe && r.probePause < probePauseMax:
		if r.probePause *= 2; r.probePause > probePauseMax {
			r.probePause = probePauseMax
		}
	}
}

func (r *route) moveTo(to int, at time.Duration) {
	r.current, r.movedAt, r.inSession, r.foundByProbe, r.probeAt = to, at, false, false, never
}

// probeIsDue reports whether to probe the first address now. After it has returned true, it returns
// false until probed was called and the pause has passed.
func (r *route) probeIsDue(now time.Duration) bool {
	if now < r.probeAt {
		return false
	}
	r.probeAt = never
	return true
}

// probed records the outcome of a probe. If a publisher answers and the worker is in session with
// another address, probed moves to the first address and returns true.
func (r *route) probed(answers bool, now time.Duration) (moved bool) {
	switch {
	case r.current == 0 || !r.inSession:
	case answers:
		r.moveTo(0, now)
		r.foundByProbe = true
		return true
	default:
		r.probeAt = now + r.probePause
	}
	return false
}
