package weightbus

import (
	"fmt"
	"testing"
	"time"
)

const second = time.Second

func routeOf(addresses ...string) *route { return newRoute(addresses, second/4, 5*second) }

// The order is that of the addresses, from the last to the first, with a pause after each round.
func TestARouteGoesRoundAndPausesAfterEachRound(t *testing.T) {
	r, now := routeOf("a", "b", "c"), 10*second
	var went []string
	for i := 0; i < 6; i++ {
		wait := r.failed(now)
		went = append(went, fmt.Sprint(r.address(), wait))
		now += wait
	}
	if fmt.Sprint(went) != "[b0s c0s a250ms b0s c0s a250ms]" {
		t.Fatal(went)
	}
}

// A round begins where a session has ended. A session that ends at once begins none.
func TestARoundBeginsWhereASessionHasEnded(t *testing.T) {
	for lasted, want := range map[time.Duration]string{second: "[0s 0s 250ms]", 0: "[0s 250ms 0s]"} {
		r, now := routeOf("a", "b", "c"), 10*second
		r.failed(now)
		r.joined(now)
		now += lasted
		waits := []time.Duration{r.failed(now), r.failed(now), r.failed(now)}
		if fmt.Sprint(waits) != want {
			t.Errorf("after a session of %v: %v", lasted, waits)
		}
	}
}

// The first address is probed in a session with another one only, and one probe at a time.
func TestTheFirstAddressIsProbed(t *testing.T) {
	r := routeOf("a", "b")
	r.joined(0)
	if r.probeIsDue(100 * second) {
		t.Fatal("it is with the first address")
	}
	r.failed(100 * second)
	if r.probeIsDue(200 * second) {
		t.Fatal("no session has begun")
	}
	r.joined(200 * second)
	for _, c := range []struct {
		at    time.Duration
		isDue bool
	}{{204 * second, false}, {205 * second, true}, {206 * second, false}} {
		if r.probeIsDue(c.at) != c.isDue {
			t.Fatalf("%+v", c)
		}
	}
	if r.probed(false, 206*second) || r.probeIsDue(210*second) || !r.probeIsDue(211*second) {
		t.Fatal("the pause begins when a probe has ended")
	}
	if !r.probed(true, 212*second) || r.address() != "a" || r.probeIsDue(300*second) {
		t.Fatal("it has not returned")
	}
	if r.probed(true, 212*second) {
		t.Fatal("it is there")
	}
	late := routeOf("a", "b")
	late.failed(0)
	if late.probed(true, second) {
		t.Fatal("it goes round anyway")
	}
}

// The pause between probes doubles with each return in vain, up to a minute. A session that lasts
// makes it short again.
func TestReturnsInVainAreRarer(t *testing.T) {
	r, now := routeOf("a", "b"), time.Duration(0)
	pause := func(session time.Duration) time.Duration { // of the first address, after a return
		t.Helper()
		if session > 0 {
			r.joined(now)
		}
		now += session
		r.failed(now)
		now += second
		r.joined(now)
		begun := now
		for !r.probeIsDue(now) {
			if now += second; now > begun+time.Hour {
				t.Fatal("it is never probed")
			}
		}
		if !r.probed(true, now) {
			t.Fatal("it does not return")
		}
		return now - begun
	}
	pauses := []time.Duration{pause(second), pause(0), pause(4 * second), pause(0), pause(0), pause(0), pause(5 * second), pause(0)}
	if fmt.Sprint(pauses) != "[5s 10s 20s 40s 1m0s 1m0s 5s 10s]" {
		t.Fatal(pauses)
	}
}
