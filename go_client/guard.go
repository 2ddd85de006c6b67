package weightbus

import (
	"context"
	"sync"
)

// A guard is a readers-writer lock whose lock methods wait at most until a context ends. A waiting
// writer has priority over later readers, so that a stream of readers cannot keep the writer out.
type guard struct {
	mu             sync.Mutex
	readers        int
	writing        bool
	waitingWriters int
	changed        chan struct{} // closed when the state changes; nil if no goroutine waits
}

func (g *guard) lockRead(ctx context.Context) error {
	return g.wait(ctx, func() bool {
		if g.writing || g.waitingWriters > 0 {
			return false
		}
		g.readers++
		return true
	})
}

func (g *guard) unlockRead() { g.update(func() { g.readers-- }) }

func (g *guard) lockWrite(ctx context.Context) error {
	g.mu.Lock()
	g.waitingWriters++
	g.mu.Unlock()
	err := g.wait(ctx, func() bool {
		if g.writing || g.readers > 0 {
			return false
		}
		g.writing = true
		return true
	})
	g.update(func() { g.waitingWriters-- })
	return err
}

func (g *guard) unlockWrite() { g.update(func() { g.writing = false }) }

// wait calls enter, and again after each change of the state, until enter returns true or ctx ends.
// It calls enter at least once.
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

// update calls change under the mutex, and wakes all waiting goroutines.
func (g *guard) update(change func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	change()
	if g.changed != nil {
		close(g.changed)
		g.changed = nil
	}
}
