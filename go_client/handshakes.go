package weightbus

import (
	"errors"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/zmtp"
)

// The peer must abort this many handshakes in a row, over at least LostAfter, before keys are
// reported as the cause: a publisher that stops may abort one, and an overloaded publisher several.
const abortsMin = 3

const (
	notAllowed = "the publisher does not allow this worker's key: add the file allowed/NAME.json that `weightbus keygen` " +
		"made for it to the publisher's folder of keys"
	publisherWithoutKeys = "the publisher speaks without keys, and this worker has some, which it does not give up: start the " +
		"publisher with keys=, or the worker without"
	workerWithoutKeys = "the publisher asks for keys, and this worker has none: give it Options.Keys, from a file that " +
		"`weightbus keygen` makes"
	anotherKey = "the other side closes the connection in the handshake: most likely the publisher has another key than the one that " +
		"this worker's file names, or speaks without keys; or a proxy answers in its place"
)

// A handshakes counts the failed handshakes with one publisher, and infers from the way they end
// whether keys are the reason: ZMTP sends no reason. (K5)
type handshakes struct {
	keyed     bool // the worker has keys
	lostAfter time.Duration
	aborted   int           // aborted handshakes in a row
	since     time.Duration // when the first of them was aborted
}

// succeeded records a successful handshake.
func (h *handshakes) succeeded() { h.aborted = 0 }

// keyFault records that a handshake failed with err. It returns a text on the keys if they are the
// cause, otherwise "".
func (h *handshakes) keyFault(err error, now time.Duration) string {
	switch {
	case errors.Is(err, zmtp.NotAllowed):
		return notAllowed
	case errors.Is(err, zmtp.PeerWithoutKeys):
		return publisherWithoutKeys
	case errors.Is(err, zmtp.PeerWithKeys):
		return workerWithoutKeys
	}
	var hungUp *zmtp.HungUpError
	if !h.keyed || !errors.As(err, &hungUp) {
		return ""
	}
	if h.aborted++; h.aborted == 1 {
		h.since = now
	}
	if h.aborted >= abortsMin && now-h.since >= h.lostAfter {
		return anotherKey
	}
	return ""
}
