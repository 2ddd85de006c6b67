package weightbus

import (
	"errors"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/zmtp"
)

// The peer must abort this many handshakes in a row before keys are reported as the cause. A
// publisher that stops may abort one, and an overloaded publisher several. So the aborts must also
// have gone on for LostAfter.
const hangUpsMin = 3

const (
	notAllowed = "the publisher does not allow this worker's key: add the file allowed/NAME.json that `weightbus keygen` " +
		"made for it to the publisher's folder of keys"
	noKeysThere = "the publisher speaks without keys, and this worker has some, which it does not give up: start the " +
		"publisher with keys=, or the worker without"
	noKeysHere = "the publisher asks for keys, and this worker has none: give it Options.Keys, from a file that " +
		"`weightbus keygen` makes"
	anotherKey = "the other side hangs up in the handshake: most likely the publisher has another key than the one that " +
		"this worker's file names, or speaks without keys; or a proxy answers in its place"
)

// A door infers the reason of failed handshakes from the way they end, since ZMTP sends no reason.
// (K5)
type door struct {
	keyed    bool
	patience time.Duration
	hungUp   int           // aborted handshakes in a row
	since    time.Duration // when the first of them was aborted
}

// opened records a successful handshake.
func (d *door) opened() { d.hungUp = 0 }

// why returns the reason that a handshake failed with err; "" unless keys are known to be the
// cause.
func (d *door) why(err error, now time.Duration) string {
	switch {
	case errors.Is(err, zmtp.NotAllowed):
		return notAllowed
	case errors.Is(err, zmtp.NoKeysThere):
		return noKeysThere
	case errors.Is(err, zmtp.NoKeysHere):
		return noKeysHere
	}
	var hungUp *zmtp.HungUpError
	if !d.keyed || !errors.As(err, &hungUp) {
		return ""
	}
	if d.hungUp++; d.hungUp == 1 {
		d.since = now
	}
	if d.hungUp >= hangUpsMin && now-d.since >= d.patience {
		return anotherKey
	}
	return ""
}
