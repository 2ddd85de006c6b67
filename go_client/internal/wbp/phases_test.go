package wbp

import (
	"os"
	"strings"
	"testing"
)

// TestMain first changes a transition if WEIGHTBUS_FLIP is set: tests must fail then.
func TestMain(m *testing.M) {
	if words := strings.Fields(os.Getenv("WEIGHTBUS_FLIP")); len(words) > 2 {
		arrowsOf, event := Tables[words[0]][State(words[1])], Event(words[2])
		delete(arrowsOf, event)
		if len(words) > 3 {
			arrowsOf[event] = State(words[3])
		}
	}
	os.Exit(m.Run())
}

// ways has the events that bring a version to each phase.
var ways = map[State][]Event{
	announced: {},
	arriving:  {begun},
	staged:    {begun, whole},
	ready:     {begun, whole, committed},
	applying:  {begun, whole, committed, taken},
	running:   {begun, whole, committed, taken, applied},
	dropped:   {newer},
	rejected:  {declined},
}

func heldAt(t *testing.T, h *versionStore, phase State) *versionEntry {
	a := &Announce{Model: "m", Epoch: 7, Version: 1, Bytes: 12, ChunkBytes: 4}
	v := h.expect(a)
	for _, event := range ways[phase] {
		var by interface{}
		if event == begun {
			if enough, err := h.takeMemory(v); !enough || err != nil {
				t.Fatal("no memory", err)
			}
			by = newTransfer(a, nil, v.buffer, "", 0, &Timing{})
		}
		if !h.move(v, event, by) {
			t.Fatalf("no arrow from %s for %s", v.phase, event)
		}
	}
	return v
}

// An event has a transition or changes nothing, and memory is returned once.
func TestEveryPair(t *testing.T) {
	events := map[Event]bool{}
	for _, arrowsOf := range versionTable {
		for event := range arrowsOf {
			events[event] = true
		}
	}
	for phase := range versionTable {
		for event := range events {
			h := &versionStore{}
			v := heldAt(t, h, phase)
			after, known := versionTable[phase][event]
			had := v.buffer != nil
			if !known {
				after = phase
			}
			if h.move(v, event) != known || v.phase != after {
				t.Errorf("%s --%s--> %s", phase, event, v.phase)
			}
			if live := after != dropped && after != rejected; live != (h.inPhase(after) == v) || len(h.live) > 1 {
				t.Errorf("%s --%s--> %s: %d are here", phase, event, after, len(h.live))
			}
			kept := had && phasesWithMemory[after]
			if (v.buffer != nil) != kept || (h.buffers.taken == 1) != kept {
				t.Errorf("%s --%s--> %s: %d buffers are taken", phase, event, after, h.buffers.taken)
			}
			if h.isRejected(v.Key) != (after == rejected) {
				t.Errorf("%s --%s--> %s: %v are rejected", phase, event, after, h.rejected)
			}
			h.free()
		}
	}
}
