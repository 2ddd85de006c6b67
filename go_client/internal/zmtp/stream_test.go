package zmtp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand"
	"strings"
	"testing"
)

var testLimits = Limits{Header: 65536, Payload: 1 << 20}

// greetingOf returns the greeting of a peer.
func greetingOf(mechanism string) []byte {
	greeting := append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1}, mechanism...)
	return append(greeting, make([]byte, 64-len(greeting))...)
}

func frameOf(flags byte, body []byte) []byte {
	if len(body) < 256 {
		return append([]byte{flags, byte(len(body))}, body...)
	}
	head := make([]byte, 9)
	head[0] = flags | flagLong
	binary.BigEndian.PutUint64(head[1:], uint64(len(body)))
	return append(head, body...)
}

func readyOf(kind string) []byte {
	body := append([]byte("\x05READY\x0bSocket-Type\x00\x00\x00"), byte(len(kind)))
	return frameOf(flagCommand, append(body, kind...))
}

func messageOf(frames ...[]byte) (out []byte) {
	for i, frame := range frames {
		flags := byte(flagMore)
		if i == len(frames)-1 {
			flags = 0
		}
		out = append(out, frameOf(flags, frame)...)
	}
	return out
}

// A memory is a Place with its own memory.
type memory struct {
	bytes    []byte
	have     int
	cancel   bool
	unwanted bool
}

func (m *memory) Room() []byte {
	if m.unwanted {
		return nil
	}
	return m.bytes[m.have:]
}
func (m *memory) Received(n int) { m.have += n }
func (m *memory) Payload() []byte {
	if m.unwanted {
		return nil
	}
	return m.bytes
}
func (m *memory) Cancel() { m.cancel = true }

// wanted returns a place for every payload.
func wanted(_ [][]byte, size int) Buffer { return &memory{bytes: make([]byte, size)} }

// receive feeds a stream in pieces. most returns the largest size of the next piece.
func receive(s *Stream, in []byte, most func() int) (messages []Message, err error) {
	for len(in) > 0 && err == nil {
		room := s.Room()
		if len(room) == 0 {
			return messages, errors.New("there is no room")
		}
		if n := most(); n < len(room) {
			room = room[:n]
		}
		n := copy(room, in)
		in = in[n:]
		var more []Message
		more, err = complete(s, n)
		messages = append(messages, more...)
	}
	return messages, err
}

// complete returns the messages that n bytes have completed.
func complete(s *Stream, n int) ([]Message, error) {
	messages, err := s.Received(n)
	for err == nil && s.Pending {
		var more []Message
		more, err = s.Received(0)
		messages = append(messages, more...)
	}
	return messages, err
}

func all() int { return 1 << 30 }

func text(messages []Message) string {
	var out strings.Builder
	for _, m := range messages {
		for _, frame := range m.Frames {
			fmt.Fprintf(&out, "%q ", frame)
		}
		out.WriteString("\n")
	}
	return out.String()
}

func opened(t testing.TB, kind Kind, place func([][]byte, int) Buffer) *Stream {
	s := NewStream(kind, testLimits, place)
	peer := "ROUTER"
	if kind.Name == "SUB" {
		peer = "XPUB"
	}
	if _, err := receive(s, append(greetingOf("NULL"), readyOf(peer)...), all); err != nil || !s.Open() {
		t.Fatalf("open: %v, %v", s.Open(), err)
	}
	s.Outgoing = nil
	return s
}

// The messages do not depend on how the bytes are split.
func TestCuts(t *testing.T) {
	rng := rand.New(rand.NewSource(1))
	for round := 0; round < 300; round++ {
		in := append(greetingOf("NULL"), readyOf("XPUB")...)
		var want [][][]byte
		for n := 0; n < 1+rng.Intn(5); n++ {
			frames := [][]byte{[]byte("m/dat"), []byte("header")}
			for len(frames) < 2+rng.Intn(3) {
				payload := make([]byte, rng.Intn(20000))
				rng.Read(payload)
				frames = append(frames, payload)
			}
			in = append(in, messageOf(frames...)...)
			want = append(want, frames)
		}
		for _, most := range []func() int{all, func() int { return 1 + rng.Intn(4000) }} {
			s := NewStream(Sub, testLimits, wanted)
			messages, err := receive(s, in, most)
			if err != nil || len(messages) != len(want) {
				t.Fatalf("round %d: %v, %d messages", round, err, len(messages))
			}
			for i, m := range messages {
				checkFrames(t, m.Frames, want[i])
			}
		}
	}
}

// checkFrames compares frames; a second payload may be empty, since it gets no place.
func checkFrames(t *testing.T, got, want [][]byte) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d frames, not %d", len(got), len(want))
	}
	for i := range got {
		if !bytes.Equal(got[i], want[i]) && !(i > Sub.Payload && len(got[i]) == 0) {
			t.Fatalf("frame %d: %.40q, not %.40q", i, got[i], want[i])
		}
	}
}

func TestSubscriptions(t *testing.T) {
	s := NewStream(Sub, testLimits, wanted)
	s.Subscribe("before", true)
	if _, err := receive(s, append(greetingOf("NULL"), readyOf("PUB")...), all); err != nil {
		t.Fatal(err)
	}
	s.Subscribe("after", true)
	s.Subscribe("after", true)
	s.Subscribe("before", false)
	want := string(frameOf(0, []byte("\x01before"))) + string(frameOf(0, []byte("\x01after"))) + string(frameOf(0, []byte("\x00before")))
	if !strings.HasSuffix(string(s.Outgoing), want) {
		t.Fatalf("%q does not end with %q", s.Outgoing, want)
	}
}

func TestPong(t *testing.T) {
	s := opened(t, Dealer, wanted)
	if _, err := receive(s, frameOf(flagCommand, []byte("\x04PING\x00\x10context")), all); err != nil {
		t.Fatal(err)
	}
	if want := frameOf(flagCommand, []byte("\x04PONGcontext")); !bytes.Equal(s.Outgoing, want) {
		t.Fatalf("%q, not %q", s.Outgoing, want)
	}
}

func TestLongFramesOut(t *testing.T) {
	s := opened(t, Dealer, wanted)
	s.Send(bytes.Repeat([]byte("x"), 300))
	if !bytes.Equal(s.Outgoing, frameOf(0, bytes.Repeat([]byte("x"), 300))) {
		t.Fatalf("%q", s.Outgoing)
	}
}

func TestErrors(t *testing.T) {
	huge := []byte{flagLong, 0, 0, 0, 0, 0xff, 0, 0, 0}
	open := append(greetingOf("NULL"), readyOf("ROUTER")...)
	for name, in := range map[string][]byte{
		"HTTP":                     []byte(strings.Repeat("HTTP/1.1 400 Bad Request\r\n", 4)),
		"CURVE":                    greetingOf("CURVE"),
		"the wrong socket":         append(greetingOf("NULL"), readyOf("PUB")...),
		"a message before READY":   append(greetingOf("NULL"), messageOf([]byte("x"))...),
		"ERROR":                    append(greetingOf("NULL"), frameOf(flagCommand, []byte("\x05ERROR\x04nope"))...),
		"a frame beyond the limit": append(append([]byte{}, open...), huge...),
		"unknown flags":            append(append([]byte{}, open...), 8, 0),
		"an empty command":         append(append([]byte{}, open...), frameOf(flagCommand, nil)...),
		"frames without end":       append(append([]byte{}, open...), bytes.Repeat([]byte{flagMore, 0}, 20)...),
	} {
		s := NewStream(Dealer, testLimits, wanted)
		_, err := receive(s, in, all)
		var broken Error
		if !errors.As(err, &broken) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOnlyAWholeSocketTypeOpensAConnection(t *testing.T) {
	for kind, opens := range map[string]bool{"PUB": true, "XPUB": true, "": false, "UB": false, " ": false, "PUB XPUB": false} {
		s := NewStream(Sub, testLimits, wanted)
		_, err := receive(s, append(greetingOf("NULL"), readyOf(kind)...), all)
		if (err == nil) != opens || s.Open() != opens {
			t.Errorf("%q: %v", kind, err)
		}
	}
}

// A name may have 255 bytes. The name and its length byte are then more than a byte can count.
func TestTheLongestNames(t *testing.T) {
	name := "\xff" + strings.Repeat("n", 255)
	for _, kind := range []Kind{Dealer, keyed(newServer().public)} {
		s := NewStream(kind, testLimits, wanted)
		in := append(greetingOf(s.mechanism()), frameOf(flagCommand, []byte(name))...)
		if _, err := receive(s, in, all); (err != nil) != (kind.Keys != nil) {
			t.Fatal(err)
		}
	}
	ready := append([]byte("\x05READY"+name+"\x00\x00\x00\x01v"), readyOf("ROUTER")[2+6:]...)
	s := NewStream(Dealer, testLimits, wanted)
	if _, err := receive(s, append(greetingOf("NULL"), frameOf(flagCommand, ready)...), all); err != nil || !s.Open() {
		t.Fatal(err)
	}
}

func TestAPayloadThatIsCutOffIsCancelled(t *testing.T) {
	place := &memory{bytes: make([]byte, 10000)}
	s := opened(t, Dealer, func([][]byte, int) Buffer { return place })
	in := messageOf([]byte("header"), make([]byte, 10000))
	if _, err := receive(s, in[:5000], all); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if !place.cancel {
		t.Fatal("it was not cancelled")
	}
}

// An announcement and the first chunk of its version can arrive in one read.
func TestAPayloadGetsItsPlaceAfterWhatCameBeforeItWasDealtWith(t *testing.T) {
	asked := 0
	s := opened(t, Sub, func(frames [][]byte, size int) Buffer {
		asked++
		return wanted(frames, size)
	})
	payload := bytes.Repeat([]byte("x"), 2*scratchBytes)
	in := append(messageOf([]byte("a"), []byte("announce")), messageOf([]byte("b"), []byte("chunk"), payload)...)
	n := copy(s.Room(), in)
	messages, err := s.Received(n)
	if err != nil || text(messages) != "\"a\" \"announce\" \n" || !s.Pending || asked != 0 {
		t.Fatalf("%v, held %v, asked %d times: %s", err, s.Pending, asked, text(messages))
	}
	if messages, err = s.Received(0); err != nil || len(messages) != 0 || s.Pending || asked != 1 {
		t.Fatalf("%v, held %v, asked %d times: %s", err, s.Pending, asked, text(messages))
	}
	if messages, err = receive(s, in[n:], all); err != nil || len(messages) != 1 || !bytes.Equal(messages[0].Frames[2], payload) {
		t.Fatalf("%v, %d messages", err, len(messages))
	}
}

func TestAPayloadThatIsNoLongerWanted(t *testing.T) {
	place := &memory{bytes: make([]byte, 10000)}
	s := opened(t, Dealer, func([][]byte, int) Buffer { return place })
	in := messageOf([]byte("header"), make([]byte, 10000))
	if _, err := receive(s, in[:5000], all); err != nil {
		t.Fatal(err)
	}
	place.unwanted = true
	messages, err := receive(s, append(in[5000:], messageOf([]byte("next"))...), all)
	if err != nil || text(messages) != "\"header\" \"\" \n\"next\" \n" {
		t.Fatalf("%v: %s", err, text(messages))
	}
}

// Any bytes, split in any way, give messages or an Error, and the stream's memory is bounded.
func FuzzStream(f *testing.F) {
	open := append(greetingOf("NULL"), readyOf("XPUB")...)
	f.Add(append(append([]byte{}, open...), messageOf([]byte("m/ctl"), []byte(`{"wbp":1}`))...), int64(1))
	f.Add(append(append([]byte{}, open...), messageOf([]byte("m/dat"), []byte(`{}`), make([]byte, 9000))...), int64(2))
	f.Add(append(append([]byte{}, open...), frameOf(flagCommand, []byte("\x04PING\x00\x10abc"))...), int64(3))
	f.Add(greetingOf("CURVE"), int64(4))
	f.Add(append(greetingOf("NULL"), readyOf("ROUTER")...), int64(5))
	f.Fuzz(func(t *testing.T, in []byte, seed int64) {
		rng := rand.New(rand.NewSource(seed))
		for _, kind := range []Kind{Sub, Dealer} {
			largest := 0
			s := NewStream(kind, Limits{Header: 70000, Payload: 100000}, func(frames [][]byte, size int) Buffer {
				if len(frames) != kind.Payload {
					t.Fatalf("a place was asked for after %d frames", len(frames))
				}
				largest = size
				return wanted(frames, size)
			})
			messages, err := receive(s, in, func() int { return 1 + rng.Intn(1+len(in)) })
			var broken Error
			if err != nil && !errors.As(err, &broken) {
				t.Fatal(err)
			}
			if largest > 100000 || len(s.Outgoing) > 200+len(in)*4 {
				t.Fatalf("a payload of %d bytes, %d to send", largest, len(s.Outgoing))
			}
			for _, m := range messages {
				if len(m.Frames) == 0 || len(m.Frames) > framesMax {
					t.Fatalf("%d frames", len(m.Frames))
				}
			}
			s.Close()
		}
	})
}
