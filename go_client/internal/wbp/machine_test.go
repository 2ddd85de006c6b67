package wbp

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// Announcements that arrive on two connections at once are received into separate memory.
func TestAnnouncementsShareNoMemory(t *testing.T) {
	m := fuzzedMachine(false)
	header := Encode(&Announce{Model: "m", Epoch: 7, Version: 1, Layout: strings.Repeat("0", 64), LayoutBytes: 10, Bytes: 1,
		ChunkBytes: 1, Commit: "auto", Acknowledge: "applied", Encoding: "raw"})
	for round := 0; round < 3; round++ {
		one, other := m.LeaseFor(header, 10), m.LeaseFor(header, 10)
		if &one.Room()[0] == &other.Room()[0] {
			t.Fatal("two payloads would be received into the same memory")
		}
		for _, lease := range []*Lease{one, other} {
			lease.Received(10)
			m.Receive([][]byte{header, lease.Payload()}, lease, time.Duration(round))
		}
	}
	if m.spare == nil {
		t.Fatal("the memory was not kept")
	}
}

// An unresponsive publisher is lost, and the worker repeats hello on new connections.
func TestWhoeverGetsNoAnswerCallsAgainOnNewConnections(t *testing.T) {
	m := fuzzedMachine(false)
	tick := func(at time.Duration, expected ...Effect) {
		t.Helper()
		if got := m.Tick(at * time.Millisecond); fmt.Sprintf("%#v", got) != fmt.Sprintf("%#v", expected) {
			t.Fatalf("at %d ms: %#v", at, got)
		}
	}
	tick(5000, Lost{}, Redial{})
	tick(100000) // not connected, so no hello was sent
	m.Connected(true, 200*time.Second)
	tick(204900)
	m.Connected(false, 204950*time.Millisecond) // another hello, but no answer
	tick(205000, Redial{})
	tick(211000) // not connected again yet
	m.Connected(true, 212*time.Second)
	m.Receive([][]byte{Encode(&Refuse{Code: CodeNameTaken, Text: "why"})}, nil, 213*time.Second)
	tick(217000) // the refusal is an answer
}

// After a late apply of a version from a later publisher than the current one, hello is repeated
// until the session ends (W3).
func TestWhatWasAppliedLateIsTold(t *testing.T) {
	m := fuzzedMachine(false)
	layout := []byte("\x36\x00\x00\x00\x00\x00\x00\x00" + `{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}` + " ")
	parsed, err := ParseLayout(layout)
	if err != nil {
		t.Fatal(err)
	}
	announce := &Announce{Model: "m", Epoch: 7, Version: 1, Layout: parsed.ID, LayoutBytes: int64(len(layout)), Bytes: 2,
		ChunkBytes: 2, Commit: "auto", Acknowledge: "applied", Encoding: "raw"}
	m.ReceivePublished([][]byte{nil, Encode(announce), layout}, nil, 0)
	payload := []byte{1, 2}
	chunk := &Chunk{Model: "m", Epoch: 7, Version: 1, CRC: CRC32C(payload)}
	m.ReceivePublished([][]byte{nil, Encode(chunk), payload}, nil, 0)
	end := &End{Model: "m", Epoch: 7, Version: 1, Digest: Digest(parsed.ID, 2, []uint32{CRC32C(payload)})}
	var version *StagedVersion
	for _, effect := range m.ReceivePublished([][]byte{nil, Encode(end)}, nil, 0) {
		if is, ok := effect.(Ready); ok {
			version = is.Version
		}
	}
	if version == nil {
		t.Fatal("the version is not ready")
	}
	m.ApplyStarted(version)
	welcome := func(epoch int64, now time.Duration) {
		m.Receive([][]byte{Encode(&Welcome{Epoch: epoch, Data: "tcp://*:9", PingMS: 1000, LostMS: 5000,
			Models: map[string]int64{}, Features: []string{}})}, nil, now)
	}
	now := time.Second
	hellos := func(effects []Effect) (said int) {
		for _, effect := range effects {
			if is, ok := effect.(Send); ok {
				if hello, ok := is.Message.(*Hello); ok && hello.Epoch == 7 {
					said++
				}
			}
		}
		return said
	}
	welcome(6, now)
	said := hellos(m.Applied(version, "", now))
	for until := now + time.Second; now < until; now += 100 * time.Millisecond {
		said += hellos(m.Tick(now)) // and all of them are lost
	}
	if said < 3 {
		t.Fatalf("%d were said", said)
	}
	welcome(8, now)
	if said := hellos(m.Tick(now + time.Second/2)); said != 0 {
		t.Fatalf("%d more were said", said)
	}
}

// A lack of published messages is reported once per session.
func TestNothingPublished(t *testing.T) {
	for _, heard := range []bool{false, true} {
		m, told := fuzzedMachine(false), 0
		if heard {
			m.ReceivePublished([][]byte{nil, Encode(&Beacon{Model: "m", Epoch: 7, Version: 0})}, nil, 0)
		}
		for now := time.Second; now < 20*time.Second; now += time.Second {
			m.Receive([][]byte{Encode(&Pong{Epoch: 7, Models: map[string]int64{}})}, nil, now)
			for _, effect := range m.Tick(now) {
				if _, ok := effect.(Unheard); ok {
					told++
				}
			}
		}
		if told > 1 || (told == 0) != heard {
			t.Fatalf("told %d times", told)
		}
	}
}

// A lying is a segment that holds the requested version, or another version if stale is true.
type lying struct {
	stale      bool
	prefaulted int
}

func (s *lying) Copy(_ string, _ Key, copy func([]byte)) error {
	if s.stale {
		return ErrStale
	}
	copy([]byte{1, 2})
	return nil
}
func (s *lying) Prefault() { s.prefaulted++ }
func (*lying) Release()    {}

// A version in a segment is ready as soon as it is announced, and dropped once the segment holds
// another one.
func TestSharedMemory(t *testing.T) {
	segment := &lying{}
	id := Identity{Name: "w", Instance: strings.Repeat("0", 32)}
	models := map[string]Model{"m": {Mismatch: func(*Layout) string { return "" }}}
	m := NewWorkerMachine(id, models, 100, TimingOf(time.Second, 5*time.Second), func(*Shared, int64) Segment { return segment })
	shared := &Shared{Path: "/proc/1/fd/1", Token: strings.Repeat("0", 32)}
	m.Receive([][]byte{Encode(&Welcome{Epoch: 7, Data: "tcp://*:9", PingMS: 1000, LostMS: 5000, Models: map[string]int64{},
		Shared: shared, Features: []string{}})}, nil, 0)
	for _, p := range []Prepare{
		{Model: "m", Epoch: 7, Bytes: 100, Shared: *shared}, {Model: "m", Epoch: 7, Bytes: 101, Shared: *shared},
		{Model: "m", Epoch: 8, Bytes: 100, Shared: *shared}, {Model: "x", Epoch: 7, Bytes: 100, Shared: *shared},
	} {
		m.Receive([][]byte{Encode(&p)}, nil, 0)
	}
	if segment.prefaulted != 1 {
		t.Fatalf("%d segments were mapped ahead, not the one that will be used", segment.prefaulted)
	}
	text := []byte("\x36\x00\x00\x00\x00\x00\x00\x00" + `{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}` + " ")
	layout, err := ParseLayout(text)
	if err != nil {
		t.Fatal(err)
	}
	announced := func(version int64) *StagedVersion {
		a := &Announce{Model: "m", Epoch: 7, Version: version, Layout: layout.ID, LayoutBytes: int64(len(text)), Bytes: 2,
			ChunkBytes: 2, Commit: "auto", Acknowledge: "applied", Encoding: "raw", Shared: shared}
		for _, effect := range m.ReceivePublished([][]byte{nil, Encode(a), text}, nil, time.Second) {
			if is, ok := effect.(Ready); ok {
				m.ApplyStarted(is.Version)
				return is.Version
			}
		}
		t.Fatalf("version %d is not ready", version)
		return nil
	}
	asks := func(effects []Effect) bool {
		for _, effect := range effects {
			if said, ok := effect.(Send); ok {
				if fetch, ok := said.Message.(*Fetch); ok && fetch.Version == 0 {
					return true
				}
			}
		}
		return false
	}
	m.Applied(announced(1), "", time.Second)
	if runs := m.followers["m"].running(); runs == nil || runs.Version != 1 {
		t.Fatalf("%v runs", runs)
	}
	if lacks := m.followers["m"].versions.inPhase(running).lacks; lacks != aSegment {
		t.Fatalf("it was read where it lay, and lacks a %s", lacks)
	}
	segment.stale = true
	if !asks(m.Stale(announced(2), time.Second)) {
		t.Fatal("the newest was not asked for")
	}
	if !asks(m.ReceivePublished([][]byte{nil, Encode(&Chunk{Model: "m", Epoch: 7, Version: 3}), {1}}, nil, 2*time.Second)) {
		t.Fatal("what is stale is waited for")
	}
	if !asks(m.ReceivePublished([][]byte{nil, Encode(&Beacon{Model: "m", Epoch: 7, Version: 2})}, nil, 3*time.Second)) {
		t.Fatal("what is stale is still here")
	}
}

// Announced sizes are checked before anything is allocated.
func TestPlacesAreBounded(t *testing.T) {
	m := fuzzedMachine(false)
	for _, header := range []string{
		`{"wbp":1,"type":"announce"}`, `{"wbp":1,"type":"ping"}`, `{`, "",
		string(Encode(&Chunk{Model: "m", Epoch: 7, Version: 1})), string(Encode(&Chunk{Model: "m", Epoch: 8, Version: 1})), string(Encode(&Chunk{Model: "x", Epoch: 7, Version: 1})),
	} {
		if lease := m.LeaseFor([]byte(header), 1<<26); lease != nil {
			t.Errorf("%s was given a place", header)
		}
	}
}

// The text of a failure is truncated to the protocol's limit of characters.
func TestLongReasons(t *testing.T) {
	s := newFollower("m", Model{Mismatch: func(*Layout) string { return strings.Repeat("ü", 5000) }}, 1, &Timing{}, nil, nil, false)
	send := s.fail(Key{1, 1}, CodeApply, s.acceptance.mismatch(nil), 0)[0].(Send)
	if got := len([]rune(send.Message.(*Failed).Text)); got != TextMax {
		t.Fatalf("%d characters", got)
	}
}

func TestDifferencesAreFew(t *testing.T) {
	target := map[string]Signature{}
	for i := 0; i < 30; i++ {
		target[fmt.Sprintf("w%02d", i)] = Signature{DType: "F32", Shape: []int64{4, 3}}
	}
	layout, err := ParseLayout([]byte("\x02\x00\x00\x00\x00\x00\x00\x00{}"))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(Difference(layout, target, Lenience{}), "\n")
	if len(lines) != differencesMax || lines[0] != "w00: F32 [4, 3] in the target, not published" || lines[19] != "... and 11 more" {
		t.Fatalf("%q", lines)
	}
}

// No transfer starts while all buffers are in use, over the network or from a segment.
func TestNothingBeginsWithoutABuffer(t *testing.T) {
	text := []byte("\x36\x00\x00\x00\x00\x00\x00\x00" + `{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}` + " ")
	layout, err := ParseLayout(text)
	if err != nil {
		t.Fatal(err)
	}
	for _, shared := range []bool{false, true} {
		timing := TimingOf(time.Second, 5*time.Second)
		openSegment := func(*Shared, int64) Segment { return &lying{} }
		s := newFollower("m", Model{Mismatch: func(*Layout) string { return "" }}, 100, &timing, openSegment, nil, false)
		s.shared = shared
		taken, err := s.versions.buffers.take(2)
		if err != nil {
			t.Fatal(err)
		}
		s.versions.buffers.taken = BuffersMax
		a := &Announce{Model: "m", Epoch: 7, Version: 1, Layout: layout.ID, LayoutBytes: int64(len(text)), Bytes: 2,
			ChunkBytes: 2, Commit: "together", Acknowledge: "staged", Encoding: "raw", Shared: &Shared{}}
		s.announced(a, text, true, 0)
		if v := s.versions.inPhase(announced); v == nil || v.lacks != aBuffer {
			t.Fatalf("%+v does not wait for a buffer", v)
		}
		s.versions.buffers.giveBack(taken)
		s.tick(time.Second)
		if v := s.versions.inPhase(arriving); v == nil || v.lacks != aMemory {
			t.Fatalf("%+v has not begun", v)
		}
		s.versions.free()
	}
}

// An announcement that is ignored has no effect: the newer one stays, and nothing fails.
func TestAnOlderAnnouncementDoesNotReplaceANewerOne(t *testing.T) {
	text := []byte("\x36\x00\x00\x00\x00\x00\x00\x00" + `{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}` + " ")
	layout, err := ParseLayout(text)
	if err != nil {
		t.Fatal(err)
	}
	timing := TimingOf(time.Second, 5*time.Second)
	openSegment := func(*Shared, int64) Segment { return nil }
	s := newFollower("m", Model{Mismatch: func(*Layout) string { return "" }}, 100, &timing, openSegment, nil, false)
	defer s.versions.free()
	announce := func(version int64) *Announce {
		return &Announce{Model: "m", Epoch: 7, Version: version, Layout: layout.ID, LayoutBytes: int64(len(text)), Bytes: 2,
			ChunkBytes: 2, Commit: "auto", Acknowledge: "applied", Encoding: "raw"}
	}
	s.announced(announce(2), nil, true, 0)
	for _, payload := range [][]byte{text, []byte("no layout")} {
		if effects := s.announced(announce(1), payload, true, 0); len(effects) > 0 {
			t.Fatalf("%+v", effects)
		}
	}
	if v := s.versions.inPhase(announced); v == nil || v.Key != (Key{7, 2}) {
		t.Fatalf("%+v", v)
	}
}
