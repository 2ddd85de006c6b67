package weightbus

import (
	"context"
	"sync"
)

// A guard is a readers-writer lock whose methods wait at most until a context ends. A waiting
// writer has priority over later readers, so that a stream of readers cannot keep the writer out.
type guard struct {
	mu      sync.Mutex
	readers int
	writing bool
	writers int           // number of waiting writers
	changed chan struct{} // closed when the lock is released; nil if no goroutine waits
}

func (g *guard) lockRead(ctx context.Context) error {
	return g.wait(ctx, func() bool {
		if g.writing || g.writers > 0 {
			return false
		}
		g.readers++
		return true
	})
}

func (g *guard) unlockRead() { g.leave(func() { g.readers-- }) }

func (g *guard) lockWrite(ctx context.Context) error {
	g.mu.Lock()
	g.writers++
	g.mu.Unlock()
	err := g.wait(ctx, func() bool {
		if g.writing || g.readers > 0 {
			return false
		}
		g.writing = true
		return true
	})
	g.leave(func() { g.writers-- })
	return err
}

func (g *guard) unlockWrite() { g.leave(func() { g.writing = false }) }

// wait calls enter, and again after each release, until enter returns true or ctx ends. It calls
// enter at least once.
func (g *guard) wait(ctx context.Context, enter func() bool) error {
	for {
		g.mu.Lock()
		entered := enter()
		if !entered && g.changed == nil {
			g.changed = make(chan struct{})
		}
		changed := g.changed
		g.mu.Unlock()
		if entered {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// leave changes the state by what, and wakes all waiting goroutines.
func (g *guard) leave(what func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	what()
	if g.changed != nil {
		close(g.changed)
		g.changed = nil
	}
}
