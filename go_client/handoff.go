package weightbus

import (
	"context"
	"sync"

	"weightbus/internal/wbp"
)

const errorsMax = 64 // errors that wait for somebody to receive them; the oldest go first

// A handoff is where the loop leaves versions that are ready, and users take them. At most one
// version of a model waits here: a newer one takes its place.
type handoff struct {
	mu      sync.Mutex
	changed chan struct{} // closed, and replaced, when anything changes
	ready   []*wbp.Version
	errors  []error
	told    []rejection // the latest, so that each is told once
	refusal *RefusedError
	joined  int64 // the epoch of the session that began last
	closed  bool
}

type rejection struct {
	model string
	key   wbp.Key
	code  Code
}

func newHandoff() *handoff { return &handoff{changed: make(chan struct{})} }

// change runs something under the lock, and wakes whoever waits.
func (h *handoff) change(what func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	what()
	close(h.changed)
	h.changed = make(chan struct{})
}

// put leaves a version, and returns the older one that it replaces, if any.
func (h *handoff) put(v *wbp.Version) (older *wbp.Version) {
	h.change(func() {
		for i, known := range h.ready {
			if known.Model == v.Model {
				older = known
				h.ready = append(h.ready[:i], h.ready[i+1:]...)
				break
			}
		}
		h.ready = append(h.ready, v)
	})
	return older
}

// putBack leaves a version again that was taken, unless a newer one has come meanwhile.
func (h *handoff) putBack(v *wbp.Version) (left bool) {
	h.change(func() {
		for _, known := range h.ready {
			if known.Model == v.Model {
				return
			}
		}
		h.ready, left = append(h.ready, v), true
	})
	return left
}

// reject leaves word that a version could not be taken, once for each version and reason.
func (h *handoff) reject(what rejection, err error) {
	h.change(func() {
		for _, known := range h.told {
			if known == what {
				return
			}
		}
		h.told = append(h.told, what)
		h.errors = append(h.errors, err)
		if len(h.told) > errorsMax {
			h.told = h.told[1:]
		}
		if len(h.errors) > errorsMax {
			h.errors = h.errors[1:]
		}
	})
}

// refuse leaves word that the publisher refuses this worker.
func (h *handoff) refuse(err *RefusedError) {
	h.change(func() { h.refusal, h.joined = err, 0 })
}

// join takes note that the publisher has let this worker in.
func (h *handoff) join(epoch int64) {
	h.change(func() { h.refusal, h.joined = nil, epoch })
}

// close says that nothing more will come.
func (h *handoff) close() {
	h.change(func() { h.closed = true })
}

// take returns a version that is ready, or what went wrong; each once.
func (h *handoff) take(ctx context.Context) (*wbp.Version, error) {
	var taken *wbp.Version
	err := h.wait(ctx, func() (bool, error) {
		switch {
		case h.closed:
			return true, ErrClosed
		case len(h.ready) > 0:
			taken = h.ready[0]
			h.ready = h.ready[1:]
			return true, nil
		case len(h.errors) > 0:
			err := h.errors[0]
			h.errors = h.errors[1:]
			return true, err
		case h.refusal != nil:
			err := h.refusal
			h.refusal = nil
			return true, err
		}
		return false, nil
	})
	return taken, err
}

// waitJoined returns the epoch of the session once there is one.
func (h *handoff) waitJoined(ctx context.Context) (epoch int64, err error) {
	err = h.wait(ctx, func() (bool, error) {
		switch {
		case h.closed:
			return true, ErrClosed
		case h.refusal != nil:
			return true, h.refusal
		}
		epoch = h.joined
		return epoch > 0, nil
	})
	return epoch, err
}

// wait calls look under the lock until it is done; the context bounds how long.
func (h *handoff) wait(ctx context.Context, look func() (done bool, err error)) error {
	for {
		h.mu.Lock()
		done, err := look()
		changed := h.changed
		h.mu.Unlock()
		if done {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}
