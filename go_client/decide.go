package weightbus

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
)

// decide applies versions at once with BeforeApply and Apply on another goroutine, and waits for the
// end until ctx ends. The result is queued in the handoff, for this call of Receive or a later one.
func (w *Worker) decide(ctx context.Context, versions group) error {
	decided := make(chan struct{})
	go func() {
		w.applyIfWanted(w.worksOf(versions))
		close(decided)
		for _, v := range versions {
			m := w.models[v.Model]
			if m.late != nil {
				w.waitForLate(m)
			}
			w.loop.handoff.vacate(v.Model)
		}
	}()
	select {
	case <-decided:
		return nil
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

// applyIfWanted applies newer versions, unless a user function rejects one of them.
func (w *Worker) applyIfWanted(works []*work) {
	works = w.taken(works)
	if len(works) == 0 || !w.each(works, w.callBeforeApply) {
		return
	}
	var inPlace, beside []*work
	for _, work := range works {
		if work.model.tensors == nil {
			beside = append(beside, work)
		} else {
			inPlace = append(inPlace, work)
		}
	}
	if w.lockAll(w.life, inPlace) != nil {
		return
	}
	defer w.unlockAll(inPlace) // readers wait until the user's Options.Apply has returned
	if w.life.Err() != nil || !w.each(works, w.copyAhead) || !w.each(works, w.callApply) {
		return
	}
	if w.lockAll(w.life, beside) != nil {
		return
	}
	defer w.unlockAll(beside)
	for _, work := range beside {
		work.model.memory, work.model.spare = work.model.spare, work.model.memory
	}
	w.runAtOnce(works)
}

// copyAhead copies a version into registered memory, or into the spare memory, which is exchanged
// with the model's memory once Apply has accepted the version.
func (w *Worker) copyAhead(work *work) *unapplied {
	m := work.model
	if m.tensors != nil {
		return w.copy(work, m.memory)
	}
	closed := &unapplied{text: ErrClosed.Error()}
	if m.guard.lockRead(w.life) != nil {
		return closed
	}
	defer m.guard.unlockRead() // the read lock prevents that free releases the staging memory
	if w.life.Err() != nil {
		return closed
	}
	return w.copy(work, m.spare)
}

func (w *Worker) callBeforeApply(work *work) *unapplied {
	before := w.options.BeforeApply
	if before == nil {
		return nil
	}
	next := updateOf(work.version)
	return w.call(work.model, "BeforeApply", func(ctx context.Context) error { return before(ctx, next) })
}

func (w *Worker) callApply(work *work) *unapplied {
	if w.options.Apply == nil {
		return nil
	}
	to := work.model.memory
	if work.model.tensors == nil {
		to = work.model.spare
	}
	v := to.view(work.update)
	return w.call(work.model, "Apply", func(ctx context.Context) error { return w.options.Apply(ctx, v) })
}

// call calls a user function and returns the reason that a version is not applied, if the function
// returns an error or misses its deadline. The function runs on its own goroutine, since it may return late or never. After the
// deadline, m.late receives the function's result.
func (w *Worker) call(m *model, name string, fn func(ctx context.Context) error) *unapplied {
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
		if err == nil {
			return nil
		}
		return &unapplied{text: err.Error()}
	case <-ctx.Done():
		m.late = answer
		return &unapplied{text: fmt.Sprintf("%s did not return within %g s", name, w.options.ApplyTimeout.Seconds())}
	}
}
