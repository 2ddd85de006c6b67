package zmtp

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/crypto/curve25519"
	"golang.org/x/crypto/nacl/secretbox"
)

// A server is the server side of CURVE, controlled by the test.
type server struct {
	public, secret       [32]byte // S
	ownPublic, ownSecret [32]byte // S'
	client               [32]byte // C'
	shared               [32]byte // C' and S'
	who                  [32]byte // C, once vouched for
	said, heard          uint64
}

func pairOf(seed byte) (public, secret [32]byte) {
	secret[0], secret[1] = seed, 7
	curve25519.ScalarBaseMult(&public, &secret)
	return public, secret
}

func newServer() *server {
	s := &server{}
	s.public, s.secret = pairOf(1)
	s.ownPublic, s.ownSecret = pairOf(2)
	return s
}

// keyed returns a DEALER that accepts only one server key.
func keyed(public [32]byte) Kind {
	kind := Dealer
	kind.Keys = &Keys{Server: public}
	kind.Keys.Public, kind.Keys.Secret = pairOf(3)
	return kind
}

var cookie = bytes.Repeat([]byte("c"), cookieBytes)

// welcome returns the answer to a HELLO. hello is the command without its name.
func (s *server) welcome(t testing.TB, hello []byte) []byte {
	copy(s.client[:], hello[74:])
	shared, err := sharedKey(&s.client, &s.secret)
	if err != nil || len(hello) != 194 || hello[0] != 1 {
		t.Fatalf("HELLO: %v, %d bytes", err, len(hello))
	}
	s.count(t, hello[106:])
	zeros, ok := secretbox.Open(nil, hello[114:], shortNonce("CurveZMQHELLO---", s.heard), &shared)
	if !ok || !bytes.Equal(zeros, make([]byte, 64)) {
		t.Fatal("HELLO proves nothing")
	}
	random := bytes.Repeat([]byte("r"), 16)
	plain := append(append([]byte{}, s.ownPublic[:]...), cookie...)
	return append([]byte("\x07WELCOME"), secretbox.Seal(random, plain, longNonce("WELCOME-", random), &shared)...)
}

// ready returns the answer to INITIATE.
func (s *server) ready(t testing.TB, initiate []byte, kind string) []byte {
	if !bytes.HasPrefix(initiate, cookie) {
		t.Fatal("INITIATE without the cookie")
	}
	s.shared, _ = sharedKey(&s.client, &s.ownSecret)
	s.count(t, initiate[96:])
	plain, ok := secretbox.Open(nil, initiate[104:], shortNonce("CurveZMQINITIATE", s.heard), &s.shared)
	if !ok || property(plain[128:], "socket-type") != "DEALER" {
		t.Fatal("INITIATE proves nothing")
	}
	copy(s.who[:], plain)
	vouched, _ := sharedKey(&s.who, &s.ownSecret)
	vouch, ok := secretbox.Open(nil, plain[48:128], longNonce("VOUCH---", plain[32:48]), &vouched)
	if !ok || !bytes.Equal(vouch, append(append([]byte{}, s.client[:]...), s.public[:]...)) {
		t.Fatal("nobody vouches")
	}
	return s.seal("\x05READY", "CurveZMQREADY---", readyOf(kind)[2+6:])
}

func (s *server) seal(name, prefix string, plain []byte) []byte {
	s.said++
	nonce := shortNonce(prefix, s.said)
	return secretbox.Seal(append([]byte(name), nonce[16:]...), plain, nonce, &s.shared)
}

// frame returns the bytes of a frame that carries an encrypted frame.
func (s *server) frame(flags byte, body []byte) []byte {
	return frameOf(0, s.seal(messageName, "CurveZMQMESSAGES", append([]byte{flags}, body...)))
}

func (s *server) message(frames ...[]byte) (out []byte) {
	for i, frame := range frames {
		more := byte(1)
		if i == len(frames)-1 {
			more = 0
		}
		out = append(out, s.frame(more, frame)...)
	}
	return out
}

// opened decrypts a frame of the client.
func (s *server) opened(t testing.TB, frame []byte) string {
	s.count(t, frame[8:])
	plain, ok := secretbox.Open(nil, frame[16:], shortNonce("CurveZMQMESSAGEC", s.heard), &s.shared)
	if !ok || string(frame[:8]) != messageName {
		t.Fatalf("%q is not a MESSAGE", frame)
	}
	return string(plain)
}

func (s *server) count(t testing.TB, in []byte) {
	count := binary.BigEndian.Uint64(in)
	if count != s.heard+1 {
		t.Fatalf("%d after %d", count, s.heard)
	}
	s.heard = count
}

// said removes and returns the next frame to be sent.
func said(t testing.TB, s *Stream) (flags byte, body []byte) {
	out := s.Outgoing
	if len(out) < 2 {
		t.Fatal("nothing is said")
	}
	head, size := 2, int(out[1])
	if out[0]&flagLong != 0 {
		head, size = 9, int(binary.BigEndian.Uint64(out[1:]))
	}
	s.Outgoing = out[head+size:]
	return out[0], out[head : head+size]
}

// shaken returns a stream and a server after the handshake.
func shaken(t testing.TB) (*Stream, *server) {
	other := newServer()
	s := greeted(t, other.public)
	for _, name := range []string{"\x05HELLO", "\x08INITIATE"} {
		flags, body := said(t, s)
		if flags&flagCommand == 0 || !strings.HasPrefix(string(body), name) {
			t.Fatalf("%d %q", flags, body)
		}
		answer := []byte(nil)
		if name == "\x05HELLO" {
			answer = other.welcome(t, body[6:])
		} else {
			answer = other.ready(t, body[9:], "ROUTER")
		}
		if _, err := receive(s, frameOf(flagCommand, answer), all); err != nil {
			t.Fatal(err)
		}
	}
	if !s.Open() {
		t.Fatal("it is not open")
	}
	return s, other
}

// greeted returns a stream that has sent HELLO to the owner of a key.
func greeted(t testing.TB, public [32]byte) *Stream {
	s := NewStream(keyed(public), testLimits, func([][]byte, int) Buffer {
		t.Fatal("what is encrypted has no place of its own")
		return nil
	})
	if _, err := receive(s, greetingOf("CURVE"), all); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(s.Outgoing[12:64], append([]byte("CURVE"), make([]byte, 47)...)) {
		t.Fatalf("%q", s.Outgoing)
	}
	s.Outgoing = s.Outgoing[64:]
	return s
}

func TestCurveCarriesMessagesBothWays(t *testing.T) {
	s, other := shaken(t)
	if public, _ := pairOf(3); other.who != public {
		t.Fatal("it vouches for somebody else")
	}
	rng := rand.New(rand.NewSource(1))
	for round := 0; round < 50; round++ {
		payload := make([]byte, rng.Intn(30000))
		rng.Read(payload)
		in := append(other.message([]byte("header"), payload), other.frame(2, []byte("\x04PING\x00\x01ctx"))...)
		messages, err := receive(s, in, func() int { return 1 + rng.Intn(9000) })
		if err != nil || len(messages) != 1 {
			t.Fatalf("%v, %d messages", err, len(messages))
		}
		checkFrames(t, messages[0].Frames, [][]byte{[]byte("header"), payload})
		if room := cap(messages[0].Frames[1]) - len(payload); len(payload) > scratchBytes && room < tagRoom {
			t.Fatalf("%d bytes behind a payload", room)
		}
		if flags, frame := said(t, s); flags&flagCommand != 0 || other.opened(t, frame) != "\x02\x04PONGctx" {
			t.Fatal("it does not answer a ping")
		}
		s.Send(payload)
		if _, frame := said(t, s); other.opened(t, frame) != "\x00"+string(payload) {
			t.Fatal("another message was sent")
		}
	}
}

func TestCurveTakesNothingThatIsForgedRepeatedOrCutShort(t *testing.T) {
	for name, spoil := range map[string]func(*server) []byte{
		"repeated": func(o *server) []byte { one := o.message([]byte("x")); return append(one, one...) },
		"late": func(o *server) []byte {
			one, two := o.message([]byte("x")), o.message([]byte("y"))
			return append(two, one...)
		},
		"damaged":       func(o *server) []byte { in := o.message([]byte("x")); in[len(in)-1] ^= 1; return in },
		"count changed": func(o *server) []byte { in := o.message([]byte("x")); in[17] ^= 4; return in },
		"cut short":     func(o *server) []byte { return frameOf(0, o.seal(messageName, "CurveZMQMESSAGES", nil)) },
		"no count":      func(o *server) []byte { return frameOf(0, []byte(messageName)) },
		"in the clear":  func(*server) []byte { return messageOf([]byte("header"), []byte("x")) },
		"own words":     func(o *server) []byte { return frameOf(0, o.seal(messageName, "CurveZMQMESSAGEC", []byte("\x00x"))) },
		"READY again":   func(o *server) []byte { return frameOf(flagCommand, o.seal("\x05READY", "CurveZMQREADY---", nil)) },
		"unknown flags": func(o *server) []byte { return o.frame(4, []byte("x")) },
		"both flags":    func(o *server) []byte { return o.frame(3, []byte("\x04PING\x00\x00")) },
		"frames without end": func(o *server) (in []byte) {
			for i := 0; i < 20; i++ {
				in = append(in, o.frame(1, nil)...)
			}
			return in
		},
		"beyond the limit": func(o *server) []byte { return o.message(make([]byte, testLimits.Header+1)) },
	} {
		s, other := shaken(t)
		_, err := receive(s, spoil(other), all)
		var broken Error
		if !errors.As(err, &broken) {
			t.Errorf("%s: %v", name, err)
		}
	}
	s, other := shaken(t)
	if messages, err := receive(s, other.message(make([]byte, testLimits.Header), make([]byte, testLimits.Payload)), all); err != nil || len(messages) != 1 {
		t.Fatalf("at the limits: %v", err)
	}
}

func TestHandshakesOfCurveThatFail(t *testing.T) {
	answers := func(t *testing.T, answer func(*server, []byte) []byte) error {
		other := newServer()
		s := greeted(t, other.public)
		_, hello := said(t, s)
		_, err := receive(s, frameOf(flagCommand, answer(other, hello[6:])), all)
		if err != nil || s.Open() {
			return err
		}
		if _, again := said(t, s); !bytes.HasPrefix(again, []byte("\x08INITIATE")) {
			t.Fatalf("%q", again)
		}
		_, err = receive(s, frameOf(flagCommand, answer(other, nil)), all)
		return err
	}
	for name, answer := range map[string]func(*server, []byte) []byte{
		"WELCOME of another key": func(o *server, hello []byte) []byte {
			o.secret[2]++
			copy(o.client[:], hello[74:])
			shared, _ := sharedKey(&o.client, &o.secret)
			random := make([]byte, 16)
			return append([]byte("\x07WELCOME"), secretbox.Seal(random, make([]byte, 128), longNonce("WELCOME-", random), &shared)...)
		},
		"WELCOME cut short": func(o *server, hello []byte) []byte { return o.welcome(t, hello)[:100] },
		"no WELCOME":        func(*server, []byte) []byte { return []byte("\x07WELCOME") },
		"READY at once":     func(o *server, _ []byte) []byte { return readyOf("ROUTER")[2:] },
		"READY sealed before WELCOME": func(o *server, hello []byte) []byte {
			copy(o.client[:], hello[74:])
			o.shared, _ = sharedKey(&o.client, &o.secret)
			return o.seal("\x05READY", "CurveZMQREADY---", readyOf("ROUTER")[2+6:])
		},
		"WELCOME twice": func(o *server, hello []byte) []byte {
			if hello != nil {
				cookies = o.welcome(t, hello)
			}
			return cookies
		},
		"READY in the clear": func(o *server, hello []byte) []byte {
			if hello != nil {
				return o.welcome(t, hello)
			}
			return readyOf("ROUTER")[2:]
		},
		"something else": func(*server, []byte) []byte { return []byte("\x04PING\x00\x00") },
	} {
		var broken Error
		if err := answers(t, answer); !errors.As(err, &broken) {
			t.Errorf("%s: %v", name, err)
		}
	}
	deny := func(*server, []byte) []byte { return []byte("\x05ERROR\x03400") }
	if err := answers(t, deny); err != NotAllowed {
		t.Errorf("ERROR 400: %v", err)
	}
	if err := answers(t, func(*server, []byte) []byte { return []byte("\x05ERROR\x03500") }); err == nil || err == error(NotAllowed) {
		t.Errorf("ERROR 500: %v", err)
	}
}

var cookies []byte // a WELCOME to be sent twice

func TestMechanismsThatDoNotFit(t *testing.T) {
	for mechanism, want := range map[string]error{"NULL": PeerWithoutKeys, "PLAIN": nil} {
		s := NewStream(keyed(newServer().public), testLimits, wanted)
		if _, err := receive(s, greetingOf(mechanism), all); err == nil || want != nil && err != want {
			t.Errorf("%s: %v", mechanism, err)
		}
		if len(s.Outgoing) != 12 {
			t.Errorf("%q was said to a stranger", s.Outgoing)
		}
	}
	if _, err := receive(NewStream(Dealer, testLimits, wanted), greetingOf("CURVE"), all); err != PeerWithKeys {
		t.Errorf("CURVE: %v", err)
	}
	s := NewStream(keyed([32]byte{}), testLimits, wanted)
	if _, err := receive(s, greetingOf("CURVE"), all); err == nil {
		t.Error("a public key of zeros was used")
	}
}

// A peer with the keys may send any bytes, in pieces of any size. Without keys nothing is accepted.
func FuzzCurve(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x05hello"), int64(1))
	f.Add([]byte("\x01\x00\x00\x01h\x00\x00\x20\x00payload"), int64(2))
	f.Add([]byte("\x02\x00\x00\x07\x04PING\x00\x01\x80\x00\x00\x04raw!"), int64(3))
	f.Add([]byte("\x80\x00\x00\x09\x05READY\x00\x00\x00"), int64(4))
	f.Fuzz(func(t *testing.T, in []byte, seed int64) {
		rng := rand.New(rand.NewSource(seed))
		s, other := shaken(t)
		var wire []byte
		for len(in) >= 4 { // flags, a size of 3 bytes, a body: sealed or not
			size := int(in[1])<<16 | int(in[2])<<8 | int(in[3])
			if size > len(in)-4 {
				size = len(in) - 4
			}
			if flags, body := in[0], in[4:4+size]; flags&0x80 != 0 {
				wire = append(wire, frameOf(flags&flagCommand, body)...)
			} else {
				wire = append(wire, other.frame(flags, body)...)
			}
			in = in[4+size:]
		}
		messages, err := receive(s, wire, func() int { return 1 + rng.Intn(1+len(wire)) })
		var broken Error
		if err != nil && !errors.As(err, &broken) {
			t.Fatal(err)
		}
		if len(s.Outgoing) > 200+len(wire)*4 {
			t.Fatalf("%d bytes to send", len(s.Outgoing))
		}
		for _, m := range messages {
			if len(m.Frames) == 0 || len(m.Frames) > framesMax {
				t.Fatalf("%d frames", len(m.Frames))
			}
		}
		s.Close()
	})
}

// FuzzHandshake feeds any bytes instead of WELCOME and READY.
func FuzzHandshake(f *testing.F) {
	f.Add([]byte("\x07WELCOME"), false)
	f.Add(readyOf("ROUTER")[2:], true)
	f.Add([]byte("\x05ERROR\x03400"), true)
	f.Fuzz(func(t *testing.T, in []byte, welcomed bool) {
		other := newServer()
		s := greeted(t, other.public)
		if welcomed {
			_, hello := said(t, s)
			if _, err := receive(s, frameOf(flagCommand, other.welcome(t, hello[6:])), all); err != nil {
				t.Fatal(err)
			}
		}
		messages, err := receive(s, frameOf(flagCommand, in), all)
		var broken Error
		if err == nil || !errors.As(err, &broken) || s.Open() || len(messages) > 0 {
			t.Fatalf("%q: %v", in, err)
		}
	})
}

// libzmq starts a server of libzmq in a separate process, whose ZAP handler answers with status.
func libzmq(t *testing.T, status string) (address string, public [32]byte) {
	python, err := filepath.Abs("../../../.venv/bin/python")
	if _, missing := os.Stat(python); err != nil || missing != nil {
		t.Skip("there is no ../.venv with pyzmq: run `make test` in the root once")
	}
	command := exec.Command(python, "testdata/curve.py", status)
	command.Stderr = os.Stderr
	out, _ := command.StdoutPipe()
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = command.Process.Kill(); _ = command.Wait() })
	var told struct {
		Port   json.Number
		Public string
	}
	if err := json.NewDecoder(out).Decode(&told); err != nil {
		t.Fatal(err)
	}
	if _, err := hex.Decode(public[:], []byte(told.Public)); err != nil {
		t.Fatal(err)
	}
	return "127.0.0.1:" + told.Port.String(), public
}

// reach connects to a server of libzmq.
func reach(t *testing.T, address string, public [32]byte) (*heard, *Connection) {
	h := &heard{opened: make(chan struct{}, 9), messages: make(chan Message, 9), closed: make(chan error, 99), place: wanted}
	c := Dial("tcp", address, nil, keyed(public), Limits{Header: 65536, Payload: 5 << 20}, h.owner())
	t.Cleanup(func() { c.Close(0); c.Wait() })
	return h, c
}

func TestCurveWithLibzmq(t *testing.T) {
	address, public := libzmq(t, "200")
	h, c := reach(t, address, public)
	await(t, "opened", h.opened)
	for _, said := range []string{"5 0", "100000 0", "5000000 0", "8160 600", "0 0"} { // bytes, milliseconds of pings
		h.Lock()
		sent := c.Send([]byte(said))
		c.stream.Ping(10)
		h.Unlock()
		m := await(t, "an echo", h.messages)
		var size int
		_ = json.Unmarshal([]byte(strings.Fields(said)[0]), &size)
		if !sent || string(m.Frames[0]) != said || len(m.Frames[1]) != size || !bytes.Equal(m.Frames[1], make([]byte, size)) {
			t.Fatalf("%q came back as %q and %d bytes", said, m.Frames[0], len(m.Frames[1]))
		}
	}
	if len(h.closed) > 0 {
		t.Fatal(<-h.closed)
	}
}

func TestLibzmqTurnsAKeyAway(t *testing.T) {
	address, public := libzmq(t, "400")
	h, _ := reach(t, address, public)
	for try := 0; try < 2; try++ { // it keeps trying
		if err := await(t, "a refusal", h.closed); err != NotAllowed {
			t.Fatal(err)
		}
	}
}

func TestLibzmqHasAnotherKey(t *testing.T) {
	address, _ := libzmq(t, "200")
	other, _ := pairOf(9)
	h, _ := reach(t, address, other)
	for try := 0; try < 2; try++ {
		var hungUp *HungUpError
		if err := await(t, "the end", h.closed); !errors.As(err, &hungUp) {
			t.Fatal(err)
		}
	}
	if len(h.opened) > 0 {
		t.Fatal("it is open")
	}
}
