package weightbus

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

// A stage is a worker on a transport that the test controls, without sockets and publisher.
type stage struct {
	t         *testing.T
	worker    *Worker
	loop      transportHandler
	epoch     int64
	sent      []string // types of messages, in order
	failure   *wbp.Failed
	failures  []*wbp.Failed
	data      endpoint
	topics    map[string]bool
	redialled int
	dialled   []string         // addresses after the first
	probes    []string         // addresses that were probed
	connected bool             // what tick returns
	keep      bool             // keep of announcements
	patches   []wbp.PatchOffer // patches of announcements
}

func (s *stage) send(header []byte) {
	var m struct{ Type string }
	_ = json.Unmarshal(header, &m)
	s.sent = append(s.sent, m.Type)
	if m.Type == "failed" {
		s.failure = &wbp.Failed{}
		_ = json.Unmarshal(header, s.failure)
		s.failures = append(s.failures, s.failure)
	}
}
func (s *stage) listen(data endpoint, _ string)  { s.data = data }
func (s *stage) wantsTicket() bool               { return false }
func (s *stage) redial()                         { s.redialled++ }
func (s *stage) leave()                          { s.connected = false }
func (s *stage) dial(to site)                    { s.dialled = append(s.dialled, to.address) }
func (s *stage) probe(of site)                   { s.probes = append(s.probes, of.address) }
func (s *stage) subscribe(topic string, on bool) { s.topics[topic] = on }
func (s *stage) tick(time.Time) (connected bool) { return s.connected }
func (s *stage) close()                          {}
func (s *stage) counted(kind string) (count int) {
	s.loop.Lock()
	defer s.loop.Unlock()
	for _, sent := range s.sent {
		if sent == kind {
			count++
		}
	}
	return count
}

// perform returns a stage whose worker has joined.
func perform(t *testing.T, models map[string]Tensors) *stage { return performIn(t, models, nil) }

// performIn returns a stage that opens shared memory with opens.
func performIn(t *testing.T, models map[string]Tensors, opens wbp.OpenSegment) *stage {
	return performWith(t, Options{Models: models}, opens)
}

// performWith returns a stage with options.
func performWith(t *testing.T, options Options, opens wbp.OpenSegment) *stage {
	s := begin(t, "tcp://host:5", options, opens)
	s.welcome()
	return s
}

// begin returns a stage whose worker has addresses, and has not joined.
func begin(t *testing.T, addresses string, options Options, opens wbp.OpenSegment) *stage {
	s := &stage{t: t, epoch: 7, topics: map[string]bool{}}
	options.Name = "w"
	sites, err := options.sites(addresses)
	if err != nil {
		t.Fatal(err)
	}
	worker, err := newWorker(sites, options, opens, func(c transportHandler) transport {
		s.loop = c
		return s
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { worker.Close() })
	s.worker = worker
	return s
}

func (s *stage) welcome() {
	s.control(&wbp.Welcome{Epoch: 7, Data: "tcp://*:6", PingMS: 1000, LostMS: 5000, Models: map[string]int64{}, Features: []string{}})
}

func (s *stage) control(m wbp.Message, payload ...[]byte) {
	s.loop.Lock()
	defer s.loop.Unlock()
	s.loop.received(append([][]byte{wbp.Encode(m)}, payload...), nil)
}

// version sends a version of one tensor of bytes to the worker.
func (s *stage) version(number int64, data []byte) { s.versionIn(number, data, nil) }

// versionIn sends a version that is in shared memory, too.
func (s *stage) versionIn(number int64, data []byte, shared *wbp.Shared) {
	layout := s.announceIn(number, data, shared)
	s.control(&wbp.Chunk{Model: "m", Epoch: s.epoch, Version: number, CRC: wbp.CRC32C(data)}, data)
	s.control(&wbp.End{Model: "m", Epoch: s.epoch, Version: number, Digest: wbp.DigestOf(layout, data, 100)})
}

// oneTensor returns the layout of one tensor of bytes.
func oneTensor(size int) []byte {
	text := fmt.Sprintf(`{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, size, size)
	layout := append(make([]byte, 8), text...)
	binary.LittleEndian.PutUint64(layout, uint64(len(text)))
	return layout
}

// announceIn announces a version, and returns the id of its layout.
func (s *stage) announceIn(number int64, data []byte, shared *wbp.Shared) string {
	layout := oneTensor(len(data))
	parsed, err := wbp.ParseLayout(layout)
	if err != nil {
		s.t.Fatal(err)
	}
	s.control(&wbp.Announce{Model: "m", Epoch: s.epoch, Version: number, Layout: parsed.ID, LayoutBytes: int64(len(layout)),
		Bytes: int64(len(data)), ChunkBytes: 100, Commit: "auto", Acknowledge: "applied", Encoding: "raw", Shared: shared,
		Keep: s.keep, Patches: s.patches}, layout)
	return parsed.ID
}

func TestAnotherTransport(t *testing.T) {
	memory := make([]byte, 3)
	s := perform(t, map[string]Tensors{"m": {"w": U8(memory, 3)}})
	if s.data.address != "host:6" || !s.topics["m/ctl"] || !s.topics["m/dat"] {
		t.Fatalf("%+v", s)
	}
	s.version(1, []byte{1, 2, 3})
	update, err := s.worker.Receive(within(t, 10*time.Second))
	if err != nil || update.Version != 1 || string(memory) != "\x01\x02\x03" || s.counted("applied") != 1 {
		t.Fatalf("%+v %v %v", update, err, memory)
	}
	s.worker.Close()
	if s.counted("bye") != 1 {
		t.Fatal("no goodbye")
	}
}

// An unresponsive publisher is reported as lost, and the worker reconnects.
func TestASilentPublisherIsCalledAgain(t *testing.T) {
	s := perform(t, map[string]Tensors{"m": nil})
	s.loop.Lock()
	defer s.loop.Unlock()
	s.worker.loop.perform(s.worker.loop.machine.Tick(s.worker.loop.now() + 5*time.Second))
	if s.redialled != 1 {
		t.Fatalf("redialled %d times", s.redialled)
	}
}

func TestTheNewestWaitsToBeApplied(t *testing.T) {
	s := perform(t, map[string]Tensors{"m": nil})
	for v := int64(1); v <= 5; v++ {
		s.version(v, []byte{byte(v)})
	}
	if update, err := s.worker.Receive(within(t, 10*time.Second)); err != nil || update.Version != 5 {
		t.Fatalf("%+v %v", update, err)
	}
	soon, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if update, err := s.worker.Receive(soon); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("%+v %v", update, err)
	}
}

// Of two receiving goroutines, the one that is late with an older version does not apply that
// version.
func TestNoStepBack(t *testing.T) {
	memory := make([]byte, 1)
	s := perform(t, map[string]Tensors{"m": {"w": U8(memory, 1)}})
	s.version(1, []byte{1})
	ctx := within(t, 10*time.Second)
	slow, err := s.worker.loop.queue.take(ctx)
	if err != nil {
		t.Fatal(err)
	}
	s.version(2, []byte{2})
	if update, err := s.worker.Receive(ctx); err != nil || update.Version != 2 {
		t.Fatalf("%+v %v", update, err)
	}
	if err := s.worker.apply(ctx, slow.versions); err != nil || memory[0] != 2 || s.counted("applied") != 1 {
		t.Fatalf("%v, %v", memory, err)
	}
}

// A version that cannot be applied because of a reader is left for the next call.
func TestReceiveWhileSomebodyReads(t *testing.T) {
	s := perform(t, map[string]Tensors{"m": nil})
	s.version(1, []byte{1})
	if _, err := s.worker.Receive(within(t, 10*time.Second)); err != nil {
		t.Fatal(err)
	}
	s.version(2, []byte{2})
	err := s.worker.Read(within(t, 10*time.Second), "m", func(v View) {
		soon, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		defer cancel()
		if update, err := s.worker.Receive(soon); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%+v %v", update, err)
		}
		if tensor, _ := v.Tensor("w"); v.Version != 1 || tensor.Bytes()[0] != 1 {
			t.Errorf("%+v", v)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if update, err := s.worker.Receive(within(t, 10*time.Second)); err != nil || update.Version != 2 {
		t.Fatalf("%+v %v", update, err)
	}
}

// Each failed version and each refusal is returned once, before anything later.
func TestErrorsAreToldOnce(t *testing.T) {
	s := perform(t, map[string]Tensors{"m": {"w": U8(make([]byte, 3), 3)}})
	for i := 0; i < 2; i++ {
		s.version(1, []byte{1})
		s.control(&wbp.Refuse{Code: "something-new", Text: "a code of tomorrow"})
	}
	var failed *ApplyError
	if _, err := s.worker.Receive(within(t, 10*time.Second)); !errors.As(err, &failed) || failed.Code != CodeLayoutMismatch {
		t.Fatal(err)
	}
	if _, err := s.worker.Receive(within(t, 10*time.Second)); !errors.Is(err, Code("something-new")) {
		t.Fatal(err)
	}
	s.version(2, []byte{1, 2, 3})
	if update, err := s.worker.Receive(within(t, 10*time.Second)); err != nil || update.Version != 2 {
		t.Fatalf("%+v %v", update, err)
	}
}

// A rename of the running version calls no user function, and readers see it at once.
func TestAnotherName(t *testing.T) {
	s := perform(t, map[string]Tensors{"m": nil})
	s.version(1, []byte{1})
	update, err := s.worker.Receive(within(t, 10*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	was := wbp.Running{Epoch: 7, Version: 1, Digest: update.Digest}
	err = s.worker.Read(within(t, 10*time.Second), "m", func(before View) {
		said := map[string]string{"step": "5"}
		s.control(&wbp.Rename{Model: "m", Epoch: 7, Version: 5, Was: was, Metadata: said}) // it does not wait for readers
		if before.Version != 1 {
			t.Errorf("%+v", before)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	view, err := s.worker.Snapshot(within(t, 10*time.Second), "m")
	if tensor, _ := view.Tensor("w"); err != nil || view.Version != 5 || view.Digest != update.Digest || tensor.Bytes()[0] != 1 {
		t.Fatalf("%+v %v", view, err)
	}
	if view.Metadata["step"] != "5" {
		t.Fatalf("%+v", view.Metadata)
	}
}

// overwritten is a segment that is overwritten by another version while it is copied.
type overwritten struct{}

func (overwritten) Copy(_ string, _ wbp.Key, copy func([]byte)) error {
	copy([]byte{1, 2})
	return wbp.ErrStale
}
func (overwritten) Prefault() {}
func (overwritten) Release()  {}

// After a copy that failed half-way no version runs, and the next version is received over the
// network.
func TestATornCopy(t *testing.T) {
	memory := make([]byte, 2)
	opens := func(*wbp.Shared, int64) wbp.Segment { return overwritten{} }
	s := performIn(t, map[string]Tensors{"m": {"w": U8(memory, 2)}}, opens)
	s.version(1, []byte{1, 1})
	if _, err := s.worker.Receive(within(t, 10*time.Second)); err != nil {
		t.Fatal(err)
	}
	shared := &wbp.Shared{Path: "/proc/1/fd/1", Token: strings.Repeat("0", 32)}
	s.epoch = 8
	s.control(&wbp.Welcome{Epoch: 8, Data: "tcp://*:6", PingMS: 1000, LostMS: 5000, Models: map[string]int64{}, Shared: shared,
		Features: []string{}})
	s.versionIn(2, []byte{2, 2}, shared)
	if _, err := s.worker.Receive(within(t, 10*time.Second)); !errors.Is(err, CodeApply) {
		t.Fatal(err)
	}
	if err := s.worker.Read(within(t, 10*time.Second), "m", func(View) {}); !errors.Is(err, ErrNoVersion) {
		t.Fatal(err)
	}
	if s.counted("failed") != 1 || s.counted("applied") != 1 {
		t.Fatalf("%v", s.sent)
	}
	s.versionIn(2, []byte{2, 2}, shared)
	if update, err := s.worker.Receive(within(t, 10*time.Second)); err != nil || update.Version != 2 || memory[0] != 2 {
		t.Fatalf("%+v %v %v", update, err, memory)
	}
}

// An unusable patch is reported, and pings are answered while a patch is decoded.
func TestAPatchOfNoUse(t *testing.T) {
	s := perform(t, map[string]Tensors{"m": nil})
	s.keep = true
	data := bytes.Repeat([]byte{1}, 100)
	s.version(1, data)
	update, err := s.worker.Receive(within(t, 10*time.Second))
	if err != nil || update.Encoding != "raw" {
		t.Fatalf("%+v %v", update, err)
	}
	id := wbp.PatchID{Encoding: wbp.Delta, Epoch: 7, Version: 1}
	s.patches = []wbp.PatchOffer{{PatchID: id, Digest: update.Digest, Bytes: 4}}
	s.announceIn(2, data, nil)
	s.control(&wbp.Chunk{Model: "m", Epoch: 7, Version: 2, CRC: wbp.CRC32C(data[:4]), Patch: &id}, data[:4])
	s.control(&wbp.End{Model: "m", Epoch: 7, Version: 2, Digest: update.Digest, Patch: &id})
	s.control(&wbp.Ping{Token: 9})
	for event := range s.worker.Events() {
		if event.Kind == Unpatched {
			break
		}
	}
	s.version(2, data)
	if update, err := s.worker.Receive(within(t, 10*time.Second)); err != nil || update.Version != 2 || update.Encoding != "raw" {
		t.Fatalf("%+v %v", update, err)
	}
	if s.counted("pong") != 1 {
		t.Fatal(s.sent)
	}
}

func TestMalformedMessagesAreCounted(t *testing.T) {
	s := perform(t, map[string]Tensors{"m": nil})
	s.control(&wbp.Ping{}, []byte("a payload too many"))
	if stats := s.worker.Stats(); stats.Malformed != 1 {
		t.Fatalf("%+v", stats)
	}
}

// Tied tensors are sent once, and may be registered under one or several of their names.
func TestAliases(t *testing.T) {
	text := `{"__metadata__":{"tied":"w"},"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`
	layout := append(make([]byte, 8), text...)
	binary.LittleEndian.PutUint64(layout, uint64(len(text)))
	parsed, err := wbp.ParseLayout(layout)
	if err != nil {
		t.Fatal(err)
	}
	for names, fits := range map[[2]string]bool{{"w", "w"}: true, {"tied", "tied"}: true, {"w", "tied"}: true, {"w", "x"}: false} {
		m := newModel(Tensors{}, wbp.Lenience{})
		for _, name := range names {
			m.tensors[name] = U8(make([]byte, 2), 2)
		}
		if wrong := m.mismatch(parsed); (wrong == "") != fits {
			t.Fatalf("%v: %q", names, wrong)
		} else if !fits {
			continue
		}
		m.prepare(parsed)
		m.write([]byte{4, 5})
		for _, name := range []string{"w", "tied"} {
			if tensor, ok := m.tensor(name); !ok || string(tensor.Bytes()) != "\x04\x05" {
				t.Fatalf("%v: %s is %v", names, name, tensor)
			}
		}
		for name, tensor := range m.tensors {
			if string(tensor.Bytes()) != "\x04\x05" {
				t.Fatalf("%v: %s was not written", names, name)
			}
		}
	}
}
