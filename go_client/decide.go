package weightbus

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

// decide applies a version with BeforeApply and Apply on another goroutine, and waits for the end
// until ctx ends. The result is queued in the handoff, for this call of Receive or a later one.
func (w *Worker) decide(ctx context.Context, v *wbp.StagedVersion) error {
	decided := make(chan struct{})
	go func() {
		w.applyIfWanted(v)
		close(decided)
		m := w.models[v.Model]
		if m.late != nil {
			w.waitForLate(m)
		}
		w.loop.handoff.vacate(v.Model)
	}()
	select {
	case <-decided:
		return errNotApplied // if applied, the result is in the handoff
	case <-ctx.Done():
		return ctx.Err()
	}
}

// waitForLate waits until a function that missed its deadline returns, and queues a Late event. The
// function's result is ignored.
func (w *Worker) waitForLate(m *model) {
	select {
	case <-w.life.Done():
	case err := <-m.late:
		m.late = nil
		w.loop.say(Event{Kind: Late, Text: fmt.Sprintf("a function that had failed by its deadline has returned: %v", err)})
	}
}

// applyIfWanted applies a newer version, unless a user function rejects it.
func (w *Worker) applyIfWanted(v *wbp.StagedVersion) {
	if !w.keepIfNewer(v) {
		return
	}
	w.loop.taken(v)
	m := w.models[v.Model]
	if before := w.options.BeforeApply; before != nil {
		next := updateOf(v)
		if err := w.call(m, "BeforeApply", func(ctx context.Context) error { return before(ctx, next) }); err != nil {
			w.turnedDown(v, err, true)
			return
		}
	}
	if m.tensors == nil {
		w.applyBeside(m, v)
	} else {
		w.applyInPlace(m, v)
	}
}

// applyBeside copies a version into the spare memory, and exchanges that with the model's memory
// once Apply has accepted the version.
func (w *Worker) applyBeside(m *model, v *wbp.StagedVersion) {
	if m.guard.lockRead(w.life) != nil {
		return
	}
	update, err := Update{}, error(ErrClosed)
	if w.life.Err() == nil { // the read lock prevents that free releases the staging memory
		update, err = w.copy(v, m.spare)
	}
	m.guard.unlockRead()
	if err != nil {
		return
	}
	if err := w.callApply(m, m.spare.view(update)); err != nil {
		w.turnedDown(v, err, true)
		return
	}
	if m.guard.lockWrite(w.life) != nil {
		return
	}
	defer m.guard.unlockWrite()
	m.memory, m.spare = m.spare, m.memory
	w.markRunning(v, update)
	w.loop.handoff.finish(update)
}

// applyInPlace copies a version into registered memory. Readers wait until the user's Options.Apply
// has returned.
func (w *Worker) applyInPlace(m *model, v *wbp.StagedVersion) {
	if m.guard.lockWrite(w.life) != nil {
		return
	}
	defer m.guard.unlockWrite()
	if w.life.Err() != nil {
		return
	}
	update, err := w.copy(v, m.memory)
	if err != nil {
		return
	}
	if err := w.callApply(m, m.view(update)); err != nil {
		m.running.Store(nil)
		w.turnedDown(v, err, false)
		return
	}
	w.markRunning(v, update)
	w.loop.handoff.finish(update)
}

// callApply calls Apply, if it is set, and returns its error.
func (w *Worker) callApply(m *model, v View) error {
	if w.options.Apply == nil {
		return nil
	}
	return w.call(m, "Apply", func(ctx context.Context) error { return w.options.Apply(ctx, v) })
}

// turnedDown reports a version as failed, with the error of a user function. intact: the previous
// version still runs.
func (w *Worker) turnedDown(v *wbp.StagedVersion, err error, intact bool) {
	if w.life.Err() == nil {
		w.loop.failed(v, err.Error(), intact) // W24
	}
}

// call calls a user function and returns its error, or an error if the function misses its
// deadline. The function runs on its own goroutine, since it may return late or never. After the
// deadline, m.late receives the function's result.
func (w *Worker) call(m *model, name string, fn func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(w.life, w.options.ApplyTimeout)
	defer cancel()
	answer := make(chan error, 1)
	go func() {
		err := errors.New(name + " ended its goroutine")
		defer func() {
			if fault := recover(); fault != nil {
				err = fmt.Errorf("%s panicked: %v", name, fault)
				w.loop.say(Event{Kind: Panicked, Text: fmt.Sprintf("%v\n%s", err, debug.Stack())})
			}
			answer <- err
		}()
		err = fn(ctx)
	}()
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		m.late = answer
		return fmt.Errorf("%s did not return within %g s", name, w.options.ApplyTimeout.Seconds())
	}
}
