package wbp

import "time"

// ages maps an epoch to the age of its publisher, for publishers whose versions run here or may
// still be applied.
//
// A publisher sends its age. The worker's next hello has this age, increased by the time since then.
// So the publisher that receives it knows which of the two started first, even if their hosts' clocks differ.
type ages map[int64]age

type age struct {
	ms int64
	at time.Duration // when the age was ms milliseconds
}

// record records the age in milliseconds of an epoch's publisher. It forgets the epochs before
// applied, which is the latest epoch of applied versions.
func (a ages) record(epoch, ms, applied int64, now time.Duration) {
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

// of returns the least age in milliseconds that an epoch's publisher can have at now; 0 if the age is unknown.
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
