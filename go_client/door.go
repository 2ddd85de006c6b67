package weightbus

import (
	"errors"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/zmtp"
)

// Handshakes in a row that the publisher ends without a word. One that stops may cause one, and one to which
// many workers dial at once several: so they must have gone on for LostAfter as well.
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

// A door guesses from how handshakes end why a worker is not let in: a refusal carries no words. (K5)
type door struct {
	keyed    bool
	patience time.Duration
	hungUp   int // handshakes in a row,
	since    time.Duration
}

// opened takes note of a handshake that succeeds.
func (d *door) opened() { d.hungUp = 0 }

// why says why a connection could not be made, if that is a matter of keys.
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
