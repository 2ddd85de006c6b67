package weightbus

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
)

// decide applies versions as one on another goroutine, which calls BeforeApply and Apply. It returns
// when the versions are applied or rejected, or when ctx ends. The goroutine puts the result into
// the ready queue, for this call of Receive or a later one.
func (w *Worker) decide(ctx context.Context, versions group) error {
	decided := make(chan struct{})
	go func() {
		w.applyIfWanted(w.jobsFor(versions))
		close(decided)
		for _, v := range versions {
			m := w.models[v.Model]
			if m.overdue != nil {
				w.waitForOverdue(m)
			}
			w.loop.queue.release(v.Model)
		}
	}()
	select {
	case <-decided:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// waitForOverdue waits until a function that missed its deadline returns, or Close is called. If the
// function returns, waitForOverdue queues a Late event with the result, which has no other effect.
func (w *Worker) waitForOverdue(m *model) {
	select {
	case <-w.life.Done():
	case err := <-m.overdue:
		m.overdue = nil
		w.loop.lockAndQueueEvent(Event{Kind: Late, Text: fmt.Sprintf("a function that had missed its deadline has returned: %v", err)})
	}
}

// applyIfWanted applies those versions that are newer than the running ones, unless a user function
// rejects one of them: then it applies none.
func (w *Worker) applyIfWanted(jobs []*applyJob) {
	jobs = w.keepNewer(jobs)
	if len(jobs) == 0 || !w.forEach(jobs, w.callBeforeApply) {
		return
	}
	var inPlace, toSpare []*applyJob
	for _, job := range jobs {
		if job.model.tensors == nil {
			toSpare = append(toSpare, job)
		} else {
			inPlace = append(inPlace, job)
		}
	}
	if w.lockAll(w.life, inPlace) != nil {
		return
	}
	defer w.unlockAll(inPlace) // readers wait until the user's Options.Apply has returned
	if w.life.Err() != nil || !w.forEach(jobs, w.copyAhead) || !w.forEach(jobs, w.callApply) {
		return
	}
	if w.lockAll(w.life, toSpare) != nil {
		return
	}
	defer w.unlockAll(toSpare)
	for _, job := range toSpare {
		job.model.memory, job.model.spare = job.model.spare, job.model.memory
	}
	w.setRunning(jobs)
}

// copyAhead copies a version, before Apply is called, into registered memory, or into the spare
// memory. The spare memory is exchanged with the model's memory once Apply has accepted the version.
func (w *Worker) copyAhead(job *applyJob) *applyFault {
	m := job.model
	if m.tensors != nil {
		return w.copy(job, m.memory)
	}
	closed := &applyFault{text: ErrClosed.Error()}
	if m.guard.lockRead(w.life) != nil {
		return closed
	}
	defer m.guard.unlockRead() // the read lock keeps free() from releasing the staging memory
	if w.life.Err() != nil {
		return closed
	}
	return w.copy(job, m.spare)
}

func (w *Worker) callBeforeApply(job *applyJob) *applyFault {
	before := w.options.BeforeApply
	if before == nil {
		return nil
	}
	next := updateOf(job.version)
	return w.call(job.model, "BeforeApply", func(ctx context.Context) error { return before(ctx, next) })
}

func (w *Worker) callApply(job *applyJob) *applyFault {
	if w.options.Apply == nil {
		return nil
	}
	to := job.model.memory
	if job.model.tensors == nil {
		to = job.model.spare
	}
	v := to.view(job.update)
	return w.call(job.model, "Apply", func(ctx context.Context) error { return w.options.Apply(ctx, v) })
}

// call calls a user function. If the function returns an error or misses its deadline, call returns
// the reason why the version is not applied. The function runs on its own goroutine, since it may
// return late or never. After the deadline, m.overdue receives the function's result.
func (w *Worker) call(m *model, name string, fn func(ctx context.Context) error) *applyFault {
	ctx, cancel := context.WithTimeout(w.life, w.options.ApplyTimeout)
	defer cancel()
	answer := make(chan error, 1)
	go func() {
		err := errors.New(name + " ended its goroutine")
		defer func() {
			if cause := recover(); cause != nil {
				err = fmt.Errorf("%s panicked: %v", name, cause)
				w.loop.lockAndQueueEvent(Event{Kind: Panicked, Text: fmt.Sprintf("%v\n%s", err, debug.Stack())})
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
		return &applyFault{text: err.Error()}
	case <-ctx.Done():
		m.overdue = answer
		return &applyFault{text: fmt.Sprintf("%s did not return within %g s", name, w.options.ApplyTimeout.Seconds())}
	}
}
