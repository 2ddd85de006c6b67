package weightbus

import (
	"context"
	"sync"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

const errorsMax = 64 // queued errors; the oldest are dropped first

// A group has versions of different models that are applied as one.
type group []*wbp.StagedVersion

// has reports whether the group has a version of this model.
func (g group) has(model string) bool {
	for _, v := range g {
		if v.Model == model {
			return true
		}
	}
	return false
}

// split returns the versions of the group whose models other has, too, and the remaining versions.
func (g group) split(other group) (common, remaining group) {
	for _, v := range g {
		if other.has(v.Model) {
			common = append(common, v)
		} else {
			remaining = append(remaining, v)
		}
	}
	return common, remaining
}

// A readyQueue passes ready versions and errors from the loop to Receive. It holds at most one
// version of each model: a newer version replaces an older one. If the older version belongs to a
// group, the rest of that group joins the newer version's group, so that no model of a group lags behind another.
type readyQueue struct {
	mu       sync.Mutex
	changed  chan struct{} // closed, and replaced, when anything changes
	ready    []group
	decides  bool            // the user has set BeforeApply or Apply
	busy     map[string]bool // models whose user functions run: take returns no version of these
	applied  []Update        // applied versions that Receive has not returned yet
	errors   []error
	rejected []rejection // the latest rejections, so that each is returned once
	refusal  *RefusedError
	epoch    int64 // of the session; 0 before it, and after a refusal
	closed   bool
}

type rejection struct {
	model string
	key   wbp.Key
	code  Code
}

// A queueItem is the result of take: versions to apply as one, or the Update of a version that was
// applied already.
type queueItem struct {
	versions group
	update   *Update
}

func newReadyQueue(decides bool) *readyQueue {
	return &readyQueue{changed: make(chan struct{}), decides: decides, busy: map[string]bool{}}
}

// update calls change under the lock, and wakes all waiting goroutines.
func (q *readyQueue) update(change func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	change()
	close(q.changed)
	q.changed = make(chan struct{})
}

// put adds versions, and returns the older versions that they replace.
func (q *readyQueue) put(versions group) (older group) {
	q.update(func() {
		var remaining group
		older, remaining = q.remove(versions).split(versions)
		q.ready = append(q.ready, append(remaining, versions...))
	})
	return older
}

// putBack puts taken versions back into the queue, except versions of models of which the queue has
// a newer version by now. It returns these exceptions.
func (q *readyQueue) putBack(versions group) (dropped group) {
	q.update(func() {
		newer := q.remove(versions)
		var remaining group
		dropped, remaining = versions.split(newer)
		q.ready = append(q.ready, append(newer, remaining...))
	})
	return dropped
}

// remove removes each group that has a model in common with versions, and returns the versions of
// the removed groups. The caller holds the lock.
func (q *readyQueue) remove(versions group) (removed group) {
	var remaining []group
	for _, queued := range q.ready {
		if common, _ := queued.split(versions); len(common) > 0 {
			removed = append(removed, queued...)
		} else {
			remaining = append(remaining, queued)
		}
	}
	q.ready = remaining
	return removed
}

// reject queues an error for a rejected version, once for each version and code.
func (q *readyQueue) reject(what rejection, err error) {
	q.update(func() {
		for _, known := range q.rejected {
			if known == what {
				return
			}
		}
		q.rejected = append(q.rejected, what)
		q.errors = append(q.errors, err)
		if len(q.rejected) > errorsMax {
			q.rejected = q.rejected[1:]
		}
		if len(q.errors) > errorsMax {
			q.errors = q.errors[1:]
		}
	})
}

// refuse records that the publisher refused the worker.
func (q *readyQueue) refuse(err *RefusedError) {
	q.update(func() { q.refusal, q.epoch = err, 0 })
}

// join records that the publisher has accepted the worker.
func (q *readyQueue) join(epoch int64) {
	q.update(func() { q.refusal, q.epoch = nil, epoch })
}

// close makes all current and later waits return ErrClosed.
func (q *readyQueue) close() {
	q.update(func() { q.closed = true })
}

// release records that a model's user functions have returned, so that take may return the model's
// next version.
func (q *readyQueue) release(model string) { q.update(func() { delete(q.busy, model) }) }

// finish queues applied versions for Receive.
func (q *readyQueue) finish(updates []Update) {
	q.update(func() { q.applied = append(q.applied, updates...) })
}

// take waits for the Update of an applied version, an error or a ready version, and returns it. It
// returns each of these once.
func (q *readyQueue) take(ctx context.Context) (queueItem, error) {
	var taken queueItem
	err := q.wait(ctx, func() (bool, error) {
		switch {
		case q.closed:
			return true, ErrClosed
		case len(q.applied) > 0:
			taken.update = &q.applied[0]
			q.applied = q.applied[1:]
			return true, nil
		case len(q.errors) > 0:
			err := q.errors[0]
			q.errors = q.errors[1:]
			return true, err
		case q.takeReady(&taken):
			return true, nil
		case q.refusal != nil:
			err := q.refusal
			q.refusal = nil
			return true, err
		}
		return false, nil
	})
	return taken, err
}

// takeReady moves the first group without a busy model into taken, and reports whether there is
// one. It marks the group's models as busy if user functions decide. The caller holds the lock.
func (q *readyQueue) takeReady(taken *queueItem) bool {
	for i, versions := range q.ready {
		if q.anyBusy(versions) {
			continue
		}
		for _, v := range versions {
			q.busy[v.Model] = q.decides
		}
		taken.versions = versions
		q.ready = append(q.ready[:i], q.ready[i+1:]...)
		return true
	}
	return false
}

// anyBusy reports whether the model of any of these versions is busy. The caller holds the lock.
func (q *readyQueue) anyBusy(versions group) bool {
	for _, v := range versions {
		if q.busy[v.Model] {
			return true
		}
	}
	return false
}

// waitJoined waits until the publisher has accepted the worker, and returns the epoch of the session.
func (q *readyQueue) waitJoined(ctx context.Context) (epoch int64, err error) {
	err = q.wait(ctx, func() (bool, error) {
		switch {
		case q.closed:
			return true, ErrClosed
		case q.refusal != nil:
			return true, q.refusal
		}
		epoch = q.epoch
		return epoch > 0, nil
	})
	return epoch, err
}

// wait calls check under the lock, and again after each change, until check returns done or ctx
// ends. It returns the error of check or of ctx.
func (q *readyQueue) wait(ctx context.Context, check func() (done bool, err error)) error {
	for {
		q.mu.Lock()
		done, err := check()
		changed := q.changed
		q.mu.Unlock()
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
