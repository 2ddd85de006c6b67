package weightbus

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

// performThree returns a stage of models a and b in place, and c without registered memory.
func performThree(t *testing.T, options Options) *stage {
	options.Models = map[string]Tensors{"a": {"w": U8(make([]byte, 1), 1)}, "b": {"w": U8(make([]byte, 1), 1)}, "c": nil}
	return performWith(t, options, nil)
}

// asOne sends a version of each of three models, which are published as one.
func (s *stage) asOne(number int64) {
	layout, data := oneTensor(1), []byte{byte(number)}
	parsed, _ := wbp.ParseLayout(layout)
	for _, model := range []string{"c", "a", "b"} {
		beside := map[string]int64{"a": number, "b": number, "c": number}
		delete(beside, model)
		s.control(&wbp.Announce{Model: model, Epoch: s.epoch, Version: number, Layout: parsed.ID, LayoutBytes: int64(len(layout)),
			Bytes: 1, ChunkBytes: 100, Commit: "auto", Acknowledge: "applied", Encoding: "raw", Companions: beside}, layout)
		s.control(&wbp.Chunk{Model: model, Epoch: s.epoch, Version: number, CRC: wbp.CRC32C(data)}, data)
		s.control(&wbp.End{Model: model, Epoch: s.epoch, Version: number, Digest: wbp.DigestOf(parsed.ID, data, 100)})
	}
}

// running returns the versions that the models run; -1 if a model runs none.
func (s *stage) running() map[string]int64 {
	runs := map[string]int64{}
	for _, model := range []string{"a", "b", "c"} {
		runs[model] = -1
		err := s.worker.Read(within(s.t, 10*time.Second), model, func(v View) { runs[model] = v.Version })
		if err != nil && !errors.Is(err, ErrNoVersion) {
			s.t.Fatal(err)
		}
	}
	return runs
}

func all(number int64) map[string]int64 {
	return map[string]int64{"a": number, "b": number, "c": number}
}

func TestVersionsThatArePublishedAsOneAreAppliedByOneCall(t *testing.T) {
	var s *stage
	var called []string
	apply := func(_ context.Context, v View) error {
		called = append(called, fmt.Sprint(v.Model, s.counted("applied")))
		return nil
	}
	for name, options := range map[string]Options{"decides": {Apply: apply}, "does not": {}} {
		s, called = performThree(t, options), nil
		s.asOne(1)
		ctx, models := within(t, 10*time.Second), []string{}
		for i := 0; i < 3; i++ {
			update, err := s.worker.Receive(ctx)
			if err != nil || !reflect.DeepEqual(s.running(), all(1)) || s.counted("applied") != 3 {
				t.Fatalf("%s: %v %v %v", name, err, s.running(), s.sent)
			}
			models = append(models, update.Model)
		}
		if !reflect.DeepEqual(models, []string{"a", "b", "c"}) {
			t.Fatalf("%s: %v", name, models)
		}
		if options.Apply != nil && !reflect.DeepEqual(called, []string{"a0", "b0", "c0"}) {
			t.Fatalf("%v: the calls come one after another, before any report", called)
		}
	}
}

func TestOneThatIsRejectedTakesTheOthersWithIt(t *testing.T) {
	no := func(model string) error {
		if model == "b" {
			return errors.New("no")
		}
		return nil
	}
	before := Options{BeforeApply: func(_ context.Context, next Update) error { return no(next.Model) }}
	after := Options{Apply: func(_ context.Context, v View) error { return no(v.Model) }}
	for _, c := range []struct {
		options Options
		torn    int
	}{{before, 0}, {after, 2}} {
		s := performThree(t, c.options)
		s.asOne(1)
		_, err := s.worker.Receive(within(t, 10*time.Second))
		var failed *ApplyError
		if !errors.As(err, &failed) || failed.Model != "b" || !strings.Contains(err.Error(), "no") {
			t.Fatal(err)
		}
		if s.counted("failed") != 3 || s.counted("applied") != 0 || !reflect.DeepEqual(s.running(), all(-1)) {
			t.Fatalf("%v %v", s.sent, s.running())
		}
		torn := 0
		s.loop.Lock()
		for _, failure := range s.failures {
			if !*failure.Intact {
				torn++
			}
		}
		s.loop.Unlock()
		if torn != c.torn {
			t.Fatalf("%d models hold no version, not %d", torn, c.torn)
		}
	}
}

// A reader of one model keeps the versions of all from being applied.
func TestAReaderKeepsAllOfThemWaiting(t *testing.T) {
	s := performThree(t, Options{})
	s.asOne(1)
	over := make(chan struct{})
	if err := s.worker.models["b"].guard.lockRead(context.Background()); err != nil {
		t.Fatal(err)
	}
	go func() {
		_, _ = s.worker.Receive(within(t, 10*time.Second))
		close(over)
	}()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := s.worker.Receive(ctx); !errors.Is(err, context.DeadlineExceeded) || s.counted("applied") > 0 {
		t.Fatalf("%v %v", err, s.sent)
	}
	s.worker.models["b"].guard.unlockRead()
	<-over
	if !reflect.DeepEqual(s.running(), all(1)) {
		t.Fatal(s.running())
	}
}

// What is left of a group is applied at once with the newer version of the other model.
func TestWhatIsLeftOfAGroupIsTakenWithTheNewerVersion(t *testing.T) {
	of := func(model string, number int64) *wbp.StagedVersion {
		return &wbp.StagedVersion{Model: model, Key: wbp.Key{Epoch: 7, Version: number}}
	}
	names := func(versions group) (names []string) {
		for _, v := range versions {
			names = append(names, fmt.Sprint(v.Model, v.Key.Version))
		}
		return names
	}
	h := newReadyQueue(false)
	h.put(group{of("a", 1), of("b", 1)})
	if older := names(h.put(group{of("b", 2)})); !reflect.DeepEqual(older, []string{"b1"}) {
		t.Fatal(older)
	}
	taken, err := h.take(within(t, time.Second))
	if both := names(taken.versions); err != nil || !reflect.DeepEqual(both, []string{"a1", "b2"}) {
		t.Fatal(both, err)
	}
	h.put(group{of("b", 3)})
	if dropped := names(h.putBack(taken.versions)); !reflect.DeepEqual(dropped, []string{"b2"}) {
		t.Fatal(dropped)
	}
	taken, err = h.take(within(t, time.Second))
	if both := names(taken.versions); err != nil || !reflect.DeepEqual(both, []string{"b3", "a1"}) {
		t.Fatal(both, err)
	}
}
