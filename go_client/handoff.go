package weightbus

import (
	"context"
	"sync"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

const errorsMax = 64 // errors that wait for somebody to receive them; the oldest go first

// A handoff is where the loop leaves versions that are ready, and users take them. At most one
// version of a model waits here: a newer one takes its place.
type handoff struct {
	mu      sync.Mutex
	changed chan struct{} // closed, and replaced, when anything changes
	ready   []*wbp.StagedVersion
	decides bool            // whether the user decides on each version,
	busy    map[string]bool // which he is doing on one of these models: they take no other
	applied []Update        // that nobody has received yet
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

// What somebody receives: a version to apply, or what was applied meanwhile.
type received struct {
	version *wbp.StagedVersion
	update  *Update
}

func newHandoff(decides bool) *handoff {
	return &handoff{changed: make(chan struct{}), decides: decides, busy: map[string]bool{}}
}

// change runs something under the lock, and wakes whoever waits.
func (h *handoff) change(what func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	what()
	close(h.changed)
	h.changed = make(chan struct{})
}

// put leaves a version, and returns the older one that it replaces, if any.
func (h *handoff) put(v *wbp.StagedVersion) (older *wbp.StagedVersion) {
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
func (h *handoff) putBack(v *wbp.StagedVersion) (left bool) {
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

// vacate lets a model take the next version: the user has decided on the one before.
func (h *handoff) vacate(model string) { h.change(func() { delete(h.busy, model) }) }

// finish leaves word that a version was applied.
func (h *handoff) finish(update Update) { h.change(func() { h.applied = append(h.applied, update) }) }

// take returns what was applied, what went wrong, or a version that is ready; each once.
func (h *handoff) take(ctx context.Context) (received, error) {
	var taken received
	err := h.wait(ctx, func() (bool, error) {
		switch {
		case h.closed:
			return true, ErrClosed
		case len(h.applied) > 0:
			taken.update = &h.applied[0]
			h.applied = h.applied[1:]
			return true, nil
		case len(h.errors) > 0:
			err := h.errors[0]
			h.errors = h.errors[1:]
			return true, err
		case h.takeReady(&taken):
			return true, nil
		case h.refusal != nil:
			err := h.refusal
			h.refusal = nil
			return true, err
		}
		return false, nil
	})
	return taken, err
}

// takeReady takes the first version whose model is free. The lock is held.
func (h *handoff) takeReady(taken *received) bool {
	for i, v := range h.ready {
		if !h.busy[v.Model] {
			taken.version, h.busy[v.Model] = v, h.decides
			h.ready = append(h.ready[:i], h.ready[i+1:]...)
			return true
		}
	}
	return false
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
