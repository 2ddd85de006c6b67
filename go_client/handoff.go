package weightbus

import (
	"context"
	"sync"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

const errorsMax = 64 // queued errors; the oldest are dropped first

// A group has versions of different models that are applied at once.
type group []*wbp.StagedVersion

// concerns reports whether the group has a version of this model.
func (g group) concerns(model string) bool {
	for _, v := range g {
		if v.Model == model {
			return true
		}
	}
	return false
}

// split returns the versions of the group whose models other has, too, and those that are left.
func (g group) split(other group) (common, left group) {
	for _, v := range g {
		if other.concerns(v.Model) {
			common = append(common, v)
		} else {
			left = append(left, v)
		}
	}
	return common, left
}

// A handoff passes ready versions and errors from the loop to Receive. It holds at most one version
// of each model: a newer version replaces an older one. What is left of a group joins that of the
// newer version, so that no model of a group lags behind another.
type handoff struct {
	mu       sync.Mutex
	changed  chan struct{} // closed, and replaced, when anything changes
	ready    []group
	decides  bool            // the user has set BeforeApply or Apply
	busy     map[string]bool // models for which they run: take returns no other version
	applied  []Update        // applied versions that Receive has not returned yet
	errors   []error
	reported []rejection // the latest rejections, so that each is returned once
	refusal  *RefusedError
	joined   int64 // epoch of the session; 0 after a refusal
	closed   bool
}

type rejection struct {
	model string
	key   wbp.Key
	code  Code
}

// A received is the result of take: versions to apply at once, or the Update of a version that was
// applied already.
type received struct {
	versions group
	update   *Update
}

func newHandoff(decides bool) *handoff {
	return &handoff{changed: make(chan struct{}), decides: decides, busy: map[string]bool{}}
}

// change calls the function what under the lock, and wakes all waiting goroutines.
func (h *handoff) change(what func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	what()
	close(h.changed)
	h.changed = make(chan struct{})
}

// put adds versions, and returns the older ones that they replace.
func (h *handoff) put(versions group) (older group) {
	h.change(func() {
		var left group
		older, left = h.remove(versions).split(versions)
		h.ready = append(h.ready, append(left, versions...))
	})
	return older
}

// putBack puts taken versions back into the queue. It returns those of which a newer one is in the
// queue.
func (h *handoff) putBack(versions group) (dropped group) {
	h.change(func() {
		newer := h.remove(versions)
		var left group
		dropped, left = versions.split(newer)
		h.ready = append(h.ready, append(newer, left...))
	})
	return dropped
}

// remove removes the groups that have a version of one of these models, and returns their versions.
// The caller holds the lock.
func (h *handoff) remove(versions group) (removed group) {
	var others []group
	for _, known := range h.ready {
		if common, _ := known.split(versions); len(common) > 0 {
			removed = append(removed, known...)
		} else {
			others = append(others, known)
		}
	}
	h.ready = others
	return removed
}

// reject queues an error for a rejected version, once for each version and code.
func (h *handoff) reject(what rejection, err error) {
	h.change(func() {
		for _, known := range h.reported {
			if known == what {
				return
			}
		}
		h.reported = append(h.reported, what)
		h.errors = append(h.errors, err)
		if len(h.reported) > errorsMax {
			h.reported = h.reported[1:]
		}
		if len(h.errors) > errorsMax {
			h.errors = h.errors[1:]
		}
	})
}

// refuse records that the publisher refused the worker.
func (h *handoff) refuse(err *RefusedError) {
	h.change(func() { h.refusal, h.joined = err, 0 })
}

// join records that the publisher has accepted the worker.
func (h *handoff) join(epoch int64) {
	h.change(func() { h.refusal, h.joined = nil, epoch })
}

// close makes all current and later waits return ErrClosed.
func (h *handoff) close() {
	h.change(func() { h.closed = true })
}

// vacate records that a model's user functions have returned, so that take may return its next
// version.
func (h *handoff) vacate(model string) { h.change(func() { delete(h.busy, model) }) }

// finish queues applied versions for Receive.
func (h *handoff) finish(updates []Update) {
	h.change(func() { h.applied = append(h.applied, updates...) })
}

// take waits for the Update of an applied version, an error or a ready version, and returns it. It
// returns each of these once.
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

// takeReady moves the first versions whose models are not busy into taken, and reports whether
// there are any. The caller holds the lock.
func (h *handoff) takeReady(taken *received) bool {
	for i, versions := range h.ready {
		if h.isBusy(versions) {
			continue
		}
		for _, v := range versions {
			h.busy[v.Model] = h.decides
		}
		taken.versions = versions
		h.ready = append(h.ready[:i], h.ready[i+1:]...)
		return true
	}
	return false
}

// isBusy reports whether a model of these versions is busy. The caller holds the lock.
func (h *handoff) isBusy(versions group) bool {
	for _, v := range versions {
		if h.busy[v.Model] {
			return true
		}
	}
	return false
}

// waitJoined waits until the publisher has accepted the worker, and returns the epoch of the
// session.
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

// wait calls look under the lock, and again after each change, until look returns done or ctx ends.
// It returns the error of look or of ctx.
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
