package weightbus

import (
	"context"
	"sync"
)

// A guard is a lock for many readers or one writer that waits no longer than a context. A writer
// that waits goes before readers that come later, else a stream of readers would keep it out.
type guard struct {
	mu      sync.Mutex
	readers int
	writing bool
	writers int           // that wait
	changed chan struct{} // closed when somebody leaves; nil if nobody waits
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

// wait tries to enter until it succeeds or the context is done. Who is let in at once is let in
// even if it is.
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

func (g *guard) leave(what func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	what()
	if g.changed != nil {
		close(g.changed)
		g.changed = nil
	}
}
