package weightbus

import "time"

const probePauseMax = time.Minute // between two probes of the first address, however often a return fails

// A route decides with which of its addresses a worker is, in the order that the user gave. It has
// neither clock nor sockets. (W37)
type route struct {
	addresses []string
	retry     time.Duration // pause after a round
	every     time.Duration // between two probes of the first address
	present   int           // index of the address that the worker is with, or tries
	failures  int           // in a row
	inside    bool          // a session has begun with the present address
	returned  bool          // the worker is with the first address because a probe found it
	movedAt   time.Duration // when the worker turned, or will turn, to the present address
	insideAt  time.Duration // when inside became true
	pause     time.Duration // before the next probe
	probeAt   time.Duration // when the first address is probed; never: it is not
}

const never = time.Duration(1<<63 - 1)

func newRoute(addresses []string, retry, lostAfter time.Duration) *route {
	every := lostAfter
	if every < time.Second {
		every = time.Second
	}
	return &route{addresses: addresses, retry: retry, every: every, pause: every, probeAt: never}
}

func (r *route) address() string { return r.addresses[r.present] }

// branches reports whether there is more than one address.
func (r *route) branches() bool { return len(r.addresses) > 1 }

// joined records that a session has begun.
func (r *route) joined(now time.Duration) {
	if r.inside {
		return
	}
	r.inside, r.insideAt = true, now
	if r.present > 0 {
		r.probeAt = now + r.pause
	}
}

// failed moves on to the next address. It returns the time to wait before that address is tried: 0,
// or a pause after each round of failures. A session that ends at once is a failure, too: else a
// publisher that hangs up on everyone would be dialled without a pause.
func (r *route) failed(now time.Duration) (wait time.Duration) {
	if r.inside && now-r.insideAt >= r.retry {
		r.failures = 0
	}
	if r.present == 0 {
		r.judgeReturn(now)
	}
	if r.failures++; r.failures%len(r.addresses) == 0 {
		wait = r.retry
	}
	r.turn((r.present+1)%len(r.addresses), now+wait)
	return wait
}

// judgeReturn sets the pause before the next probe when the worker leaves the first address: longer
// after a return that was in vain, as at first after a session that lasted.
func (r *route) judgeReturn(now time.Duration) {
	switch {
	case r.inside && now-r.movedAt >= r.every:
		r.pause = r.every
	case r.returned && r.pause < probePauseMax:
		if r.pause *= 2; r.pause > probePauseMax {
			r.pause = probePauseMax
		}
	}
}

func (r *route) turn(to int, at time.Duration) {
	r.present, r.movedAt, r.inside, r.returned, r.probeAt = to, at, false, false, never
}

// probes reports whether to probe the first address now. Until probed, it does not say so again.
func (r *route) probes(now time.Duration) bool {
	if now < r.probeAt {
		return false
	}
	r.probeAt = never
	return true
}

// probed records the outcome of a probe. It reports whether to return to the first address, and
// then moves there.
func (r *route) probed(answers bool, now time.Duration) (back bool) {
	switch {
	case r.present == 0 || !r.inside:
	case answers:
		r.turn(0, now)
		r.returned = true
		return true
	default:
		r.probeAt = now + r.pause
	}
	return false
}
