package wbp

import "time"

// ages is how old the publishers are whose weights run at a worker, or may yet be applied there, by
// epoch.
//
// A publisher tells its age, and a worker tells other publishers how old that one is by now: the
// younger of two started later, whatever their clocks say.
type ages map[int64]age

type age struct {
	ms int64
	at time.Duration // when it was that
}

// heard notes the age of the publisher of an epoch; weights of the epoch applied run here.
func (a ages) heard(epoch, ms, applied int64, now time.Duration) {
	if known := a.of(epoch, now); known > ms {
		ms = known
	}
	delete(a, epoch)
	var last int64
	for known := range a {
		if known < applied {
			delete(a, known)
		} else if known > last {
			last = known
		}
	}
	if len(a) >= EpochsKept {
		delete(a, last)
	}
	a[epoch] = age{ms, now}
}

// of returns for how many milliseconds, at least, the publisher of an epoch has run.
func (a ages) of(epoch int64, now time.Duration) int64 {
	known, ok := a[epoch]
	if !ok {
		return 0
	}
	if ms := known.ms + int64((now-known.at)/time.Millisecond); ms < IntegerMax {
		return ms
	}
	return IntegerMax
}
