package weightbus

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

// deciding calls each with a worker that has these options, with registered memory and without.
func deciding(t *testing.T, options Options, each func(t *testing.T, s *stage, inPlace bool)) {
	for name, tensors := range map[string]Tensors{"in place": {"w": U8(make([]byte, 1), 1)}, "snapshots": nil} {
		tensors := tensors
		t.Run(name, func(t *testing.T) {
			options.Models = map[string]Tensors{"m": tensors}
			each(t, performWith(t, options, nil), tensors != nil)
		})
	}
}

// value returns the value that readers of the model see; -1 if no version runs.
func (s *stage) value() int {
	value := -1
	err := s.worker.Read(within(s.t, 10*time.Second), "m", func(v View) {
		w, _ := v.Tensor("w")
		value = int(w.Bytes()[0])
		if int64(value) != v.Version {
			s.t.Errorf("%d in version %d", value, v.Version)
		}
	})
	if err != nil && !errors.Is(err, ErrNoVersion) {
		s.t.Fatal(err)
	}
	return value
}

// failed returns the latest failed message.
func (s *stage) failed() *wbp.Failed {
	s.loop.Lock()
	defer s.loop.Unlock()
	return s.failure
}

func odd(_ context.Context, v View) error {
	if w, _ := v.Tensor("w"); w.Bytes()[0] != byte(v.Version) || v.Names()[0] != "w" || v.Model != "m" {
		return fmt.Errorf("version %d has %v", v.Version, w.Bytes())
	}
	if v.Version%2 == 0 {
		return fmt.Errorf("I do not like %d", v.Version)
	}
	return nil
}

// A version is applied if Apply accepts it. Otherwise the version fails with Apply's error.
func TestTheUserDecides(t *testing.T) {
	deciding(t, Options{Apply: odd}, func(t *testing.T, s *stage, inPlace bool) {
		s.version(1, []byte{1})
		if update, err := s.worker.Receive(within(t, 10*time.Second)); err != nil || update.Version != 1 || s.value() != 1 {
			t.Fatalf("%+v %v", update, err)
		}
		s.version(2, []byte{2})
		_, err := s.worker.Receive(within(t, 10*time.Second))
		if !errors.Is(err, CodeApply) || !strings.Contains(err.Error(), "I do not like 2") {
			t.Fatal(err)
		}
		failed, left := s.failed(), 1
		if inPlace {
			left = -1
		}
		if s.counted("applied") != 1 || *failed.Intact == inPlace || failed.Text != "I do not like 2" || s.value() != left {
			t.Fatalf("%v %+v, %d", s.sent, failed, s.value())
		}
		s.version(3, []byte{3})
		if update, err := s.worker.Receive(within(t, 10*time.Second)); err != nil || update.Version != 3 || s.value() != 3 {
			t.Fatalf("%+v %v", update, err)
		}
		if stats := s.worker.Stats(); stats != (Stats{Applied: 2, Failed: 1, NetworkBytes: 2}) {
			t.Fatalf("%+v", stats)
		}
	})
}

// A version that BeforeApply rejects leaves everything as it was.
func TestAVersionIsTurnedDownBefore(t *testing.T) {
	called := 0
	before := func(_ context.Context, next Update) error {
		if called++; next.Model != "m" || next.Epoch != 7 || next.Bytes != 1 || next.Digest == "" {
			return fmt.Errorf("%+v", next)
		}
		if next.Version == 2 {
			return errors.New("not today")
		}
		return nil
	}
	deciding(t, Options{BeforeApply: before}, func(t *testing.T, s *stage, _ bool) {
		called = 0
		for v := int64(1); v <= 3; v++ {
			s.version(v, []byte{byte(v)})
			update, err := s.worker.Receive(within(t, 10*time.Second))
			if v == 2 && (!errors.Is(err, CodeApply) || s.value() != 1 || !*s.failed().Intact || s.failed().Text != "not today") {
				t.Fatalf("%v, %d: %+v", err, s.value(), s.failed())
			}
			if v != 2 && (err != nil || update.Version != v || s.value() != int(v)) {
				t.Fatalf("%+v %v", update, err)
			}
		}
		if called != 3 {
			t.Fatalf("called %d times", called)
		}
	})
}

// A panic is a failure like an error, and so is the end of the function's goroutine.
func TestTheUsersPanicIsCaught(t *testing.T) {
	apply := func(_ context.Context, v View) error {
		if v.Version == 1 {
			panic("no such device")
		}
		runtime.Goexit()
		return nil
	}
	deciding(t, Options{Apply: apply}, func(t *testing.T, s *stage, _ bool) {
		for v, says := range map[int64]string{1: "Apply panicked: no such device", 2: "Apply ended its goroutine"} {
			s.epoch = 7
			s.version(v, []byte{byte(v)})
			if _, err := s.worker.Receive(within(t, 10*time.Second)); !errors.Is(err, CodeApply) || !strings.Contains(err.Error(), says) {
				t.Fatal(err)
			}
		}
		for event := range s.worker.Events() {
			if event.Kind == Panicked {
				if !strings.Contains(event.Text, "decide_test.go") {
					t.Fatal(event.Text)
				}
				break
			}
		}
	})
}

// A function that hangs fails its version at the deadline. Meanwhile pings are answered, and the
// model takes no other version until the function has returned. The function's result is ignored.
func TestTheUserHangs(t *testing.T) {
	var calls int32
	var leave chan struct{}
	apply := func(_ context.Context, v View) error {
		if atomic.AddInt32(&calls, 1) == 1 {
			<-leave
		}
		return nil
	}
	deciding(t, Options{Apply: apply, ApplyTimeout: 20 * time.Millisecond}, func(t *testing.T, s *stage, inPlace bool) {
		atomic.StoreInt32(&calls, 0)
		leave = make(chan struct{})
		s.version(1, []byte{1})
		_, err := s.worker.Receive(within(t, 10*time.Second))
		if !errors.Is(err, CodeApply) || !strings.Contains(err.Error(), "Apply did not return within 0.02 s") || s.value() != -1 {
			t.Fatal(err)
		}
		s.control(&wbp.Ping{Token: 5})
		if s.counted("pong") != 1 || *s.failed().Intact == inPlace {
			t.Fatalf("%v %+v", s.sent, s.failed())
		}
		s.version(2, []byte{2})
		soon, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		defer cancel()
		if update, err := s.worker.Receive(soon); !errors.Is(err, context.DeadlineExceeded) || atomic.LoadInt32(&calls) != 1 {
			t.Fatalf("%+v %v", update, err)
		}
		close(leave)
		if update, err := s.worker.Receive(within(t, 10*time.Second)); err != nil || update.Version != 2 || s.value() != 2 {
			t.Fatalf("%+v %v", update, err)
		}
		late := 0
		for event := range s.worker.Events() {
			if event.Kind == Late {
				late++
				break
			}
		}
		if s.counted("applied") != 1 || late != 1 {
			t.Fatalf("%v", s.sent)
		}
	})
}

// A Receive whose context ends does not stop Apply. A later Receive returns the result.
func TestReceiveIsLeftWhileTheUserDecides(t *testing.T) {
	var called, leave chan struct{}
	apply := func(context.Context, View) error { close(called); <-leave; return nil }
	deciding(t, Options{Apply: apply}, func(t *testing.T, s *stage, inPlace bool) {
		called, leave = make(chan struct{}), make(chan struct{})
		s.version(1, []byte{1})
		ctx, cancel := context.WithCancel(context.Background())
		go func() { <-called; cancel() }()
		if _, err := s.worker.Receive(ctx); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		if !inPlace && s.value() != -1 { // readers see the previous version
			t.Fatal("it runs before the user has decided")
		}
		close(leave)
		if update, err := s.worker.Receive(within(t, 10*time.Second)); err != nil || update.Version != 1 || s.value() != 1 {
			t.Fatalf("%+v %v", update, err)
		}
	})
}

// Close does not wait for a function that hangs. The function's version is not reported any more.
func TestCloseWhileTheUserHangs(t *testing.T) {
	var called chan struct{}
	leave := make(chan struct{})
	defer close(leave)
	ended := make(chan struct{}, 2)
	apply := func(ctx context.Context, _ View) error {
		close(called)
		<-ctx.Done()
		ended <- struct{}{}
		<-leave
		return nil
	}
	deciding(t, Options{Apply: apply}, func(t *testing.T, s *stage, _ bool) {
		called = make(chan struct{})
		s.version(1, []byte{1})
		received := make(chan error)
		go func() { _, err := s.worker.Receive(context.Background()); received <- err }()
		<-called
		begun := time.Now()
		s.worker.Close()
		if err := <-received; !errors.Is(err, ErrClosed) || time.Since(begun) > 5*time.Second {
			t.Fatal(err, time.Since(begun))
		}
		<-ended
		if s.counted("failed")+s.counted("applied") != 0 {
			t.Fatalf("%v", s.sent)
		}
	})
}

// A failed copy into the spare memory changes nothing.
func TestATornCopyBeside(t *testing.T) {
	opens := func(*wbp.Shared, int64) wbp.Segment { return overwritten{} }
	s := performWith(t, Options{Models: map[string]Tensors{"m": nil}, Apply: odd}, opens)
	s.version(1, []byte{1})
	if _, err := s.worker.Receive(within(t, 10*time.Second)); err != nil {
		t.Fatal(err)
	}
	shared := &wbp.Shared{Path: "/proc/1/fd/1", Token: strings.Repeat("0", 32)}
	s.epoch = 8
	s.control(&wbp.Welcome{Epoch: 8, Data: "tcp://*:6", PingMS: 1000, LostMS: 5000, Models: map[string]int64{}, Shared: shared,
		Features: []string{}})
	s.versionIn(3, []byte{3}, shared)
	soon, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if update, err := s.worker.Receive(soon); !errors.Is(err, context.DeadlineExceeded) || s.value() != 1 || s.counted("failed") != 0 {
		t.Fatalf("%+v %v", update, err)
	}
	s.versionIn(3, []byte{3}, shared)
	if update, err := s.worker.Receive(within(t, 10*time.Second)); err != nil || update.Version != 3 || s.value() != 3 {
		t.Fatalf("%+v %v", update, err)
	}
}

// A target may have fewer tensors than are published, and other dtypes.
func TestPartialTargetsAndCasts(t *testing.T) {
	text := `{"critic":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"actor":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}`
	layout, err := wbp.ParseLayout(append([]byte{byte(len(text)), 0, 0, 0, 0, 0, 0, 0}, text...))
	if err != nil {
		t.Fatal(err)
	}
	half := make([]uint16, 2)
	for _, c := range []struct {
		tensors Tensors
		allowed wbp.Lenience
		says    string
	}{
		{Tensors{"actor": F32(make([]float32, 2), 2)}, wbp.Lenience{}, "critic: published as F32 [1], not in the target"},
		{Tensors{"actor": BF16(half, 2)}, wbp.Lenience{Partial: true}, "actor: dtype F32 published, BF16 here"},
		{Tensors{"actor": I32(make([]int32, 2), 2)}, wbp.Lenience{Partial: true, Cast: true}, "actor: dtype F32 published, I32 here"},
		{Tensors{"actor": BF16(half, 2)}, wbp.Lenience{Cast: true}, "critic: published as F32 [1], not in the target"},
		{Tensors{"actor": BF16(half, 2), "x": U8(nil, 0)}, wbp.Lenience{Partial: true, Cast: true}, "x: U8 [0] in the target, not published"},
		{Tensors{"actor": BF16(half[:1], 1)}, wbp.Lenience{Partial: true, Cast: true}, "actor: shape [2] published, [1] here"},
	} {
		if says := newModel(c.tensors, c.allowed).mismatch(layout); says != c.says {
			t.Errorf("%v %+v: %q", c.tensors, c.allowed, says)
		}
	}
	m := newModel(Tensors{"actor": BF16(half, 2)}, wbp.Lenience{Partial: true, Cast: true})
	if says := m.mismatch(layout); says != "" || m.bytes() != 0 {
		t.Fatal(says)
	}
	m.prepare(layout)
	m.write([]byte{0, 0, 0, 0, 0, 0, 0x80, 0x3f, 0, 0x80, 0x80, 0x3f}) // 0, 1 and 1.00390625: half-way, to even
	view := m.snapshot(Update{Version: 1})
	actor, _ := view.Tensor("actor")
	if _, there := view.Tensor("critic"); there || half[0] != 0x3f80 || half[1] != 0x3f80 || actor.DType() != "BF16" ||
		fmt.Sprint(view.Names()) != "[actor]" {
		t.Fatalf("%x %v %v", half, actor, view.Names())
	}
}
