// Package zmtp speaks the connecting side of ZMTP 3 (ZeroMQ RFC 23) for the two sockets of a worker: a
// DEALER and a SUB, without security (NULL), or with that of RFC 26 (CURVE).
//
// A ZeroMQ library receives each message into memory of its own: fresh pages to touch, a
// hand-over between threads, and a copy to where the bytes belong, which together cost more than
// the network does. Here the bulk of a payload goes from the kernel straight to its place.
package zmtp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
)

// Flags of a frame.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

const (
	scratchBytes = 8192 // read ahead; of a payload, at most so much is copied twice
	framesMax    = 8    // of a message; a later protocol may have more than one payload
	commandMax   = 4096 // bytes of a command: READY with its properties is the longest
	roomBehind   = 16   // bytes of memory behind a payload, for the tag of whoever opens it
)

// A Kind is a type of socket.
type Kind struct {
	Name    string // as READY says it
	Payload int    // the index of a message's payload: before it stand topic and header, or the header
	Peers   string // what may be at the other end
	Keys    *Keys  // nil: there is no security
	Pings   bool   // by ZMTP, and is given up if nothing answers
}

// Dealer and Sub are the sockets of a worker.
//
// On the control channel the protocol has pings of its own. And at its other end is libzmq: up to 4.3.5 it
// aborts its process if a connection breaks that it does not read for now, and a ping is in what it has read ahead.
var (
	Dealer = Kind{Name: "DEALER", Payload: 1, Peers: "ROUTER"}
	Sub    = Kind{Name: "SUB", Payload: 2, Peers: "PUB XPUB", Pings: true}
)

// Limits are the bytes that a frame may have, as ZMQ_MAXMSGSIZE bounds them.
type Limits struct{ Header, Payload int }

// A Place is memory into which a payload is received, piece by piece.
type Place interface {
	Room() []byte    // where the next bytes go; nil if nobody wants them any more
	Received(n int)  // so many bytes are in Room
	Payload() []byte // all of it, once it is complete; nil if nobody wants it any more
	Cancel()         // the rest will never come
}

// A Message is its frames, and the place that the payload was received into, if there was one.
type Message struct {
	Frames [][]byte
	Place  Place
}

// An Error says how the other side breaks ZMTP; the connection is of no use then.
type Error string

func (e Error) Error() string { return "zmtp: " + string(e) }

type state int

const (
	greeting state = iota // nothing is known of the other side
	ready                 // its greeting is here, its READY is not (of CURVE: nor what comes before that)
	open
)

// A Stream is one connection without its socket: put what arrives into Room and say so by
// Received, send what is in Outgoing.
//
//	greeting (64 bytes) ──> READY ──> messages and commands
//
//	a frame:  ┌───────┬──────────────┬──── ··· ────┐   flags: 1 more follow, 2 long size, 4 command
//	          │ flags │ size, 1 or 8 │    body     │
//	          └───────┴──────────────┴──── ··· ────┘
//
// With CURVE a frame carries a frame, whose flags are inside (curve.go).
type Stream struct {
	Outgoing []byte
	Held     bool   // a payload in the scratch waits until the messages before it are dealt with
	First    []byte // a message to say before all others
	Commands int    // that have come
	Messages int    // that have come, and pieces of payloads

	kind    Kind
	limits  Limits
	place   func(frames [][]byte, size int) Place
	state   state
	curve   *curve // nil: there is no security
	scratch [scratchBytes]byte
	have    int // bytes in the scratch
	message Message
	body    *body // a frame too long for the scratch
	topics  map[string]bool
}

// A body is a frame too long for the scratch, on its way; missing bytes are to come.
type body struct {
	flags   byte
	missing int
	own     []byte // of a frame that is no payload
	have    int    // bytes in own
	place   Place  // of a payload; nil: it is read and forgotten
}

// NewStream begins a connection. place is given the frames before a payload and the payload's
// size, and says where it goes; nil: nowhere, the frame is then empty.
func NewStream(kind Kind, limits Limits, place func(frames [][]byte, size int) Place) *Stream {
	s := &Stream{kind: kind, limits: limits, place: place, topics: map[string]bool{}}
	if kind.Keys != nil {
		s.curve = &curve{keys: kind.Keys}
	}
	// Signature and version; the rest once the other side's mechanism is known: libzmq hangs up on one that is
	// not its own before it has told that.
	s.Outgoing = append(s.Outgoing, 0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0)
	return s
}

func (s *Stream) mechanism() string {
	if s.kind.Keys != nil {
		return "CURVE"
	}
	return "NULL"
}

// Open tells whether messages can be sent.
func (s *Stream) Open() bool { return s.state == open }

// Send sends a message of one frame. It is lost if the connection is not open.
func (s *Stream) Send(frame []byte) {
	if s.state == open {
		s.say(0, frame)
	}
}

// Ping asks the other side for a sign of life; if it hears nothing for ttl tenths of a second, it
// may give the connection up.
func (s *Stream) Ping(ttl uint16) {
	if s.state == open {
		s.say(flagCommand, []byte{4, 'P', 'I', 'N', 'G', byte(ttl >> 8), byte(ttl)})
	}
}

// Subscribe asks for a topic, or no longer; asking twice is asking once.
func (s *Stream) Subscribe(topic string, on bool) {
	if s.topics[topic] == on {
		return
	}
	s.topics[topic] = on
	if s.state == open {
		s.subscription(topic, on)
	}
}

func (s *Stream) subscription(topic string, on bool) {
	first := byte(0)
	if on {
		first = 1
	}
	s.say(0, append([]byte{first}, topic...))
}

// say sends a frame of its own, once the connection is open.
func (s *Stream) say(flags byte, body []byte) {
	if s.curve == nil {
		s.frame(flags, body)
		return
	}
	s.frame(0, s.curve.message(flags, body))
}

func (s *Stream) frame(flags byte, body []byte) {
	if len(body) < 256 {
		s.Outgoing = append(s.Outgoing, flags, byte(len(body)))
	} else {
		s.Outgoing = append(s.Outgoing, flags|flagLong)
		s.Outgoing = append(s.Outgoing, make([]byte, 8)...)
		binary.BigEndian.PutUint64(s.Outgoing[len(s.Outgoing)-8:], uint64(len(body)))
	}
	s.Outgoing = append(s.Outgoing, body...)
}

// Room returns where the next bytes go. It is never empty.
func (s *Stream) Room() []byte {
	if s.body == nil {
		return s.scratch[s.have:]
	}
	if room := s.body.room(); room != nil {
		return room
	}
	if s.body.missing < len(s.scratch) {
		return s.scratch[:s.body.missing]
	}
	return s.scratch[:]
}

// Missing is how many bytes must come before anything can be done with them, at least 1.
func (s *Stream) Missing() int {
	if s.body == nil {
		return 1
	}
	return s.body.missing
}

// Received takes note of so many bytes in Room, and returns the messages that are now complete. If
// Held is true then, call it again with 0 once these were dealt with, before Room. After an error the
// connection is to be closed.
func (s *Stream) Received(n int) (messages []Message, err error) {
	if s.body != nil {
		b := s.body
		b.received(n)
		if b.own == nil { // else it may be a command
			s.Messages++
		}
		if b.missing > 0 {
			return nil, nil
		}
		s.body = nil
		return s.take(b.flags, b.whole(), b.place, nil)
	}
	s.have += n
	s.Held = false
	at := 0
	for {
		size := 0
		size, messages, err = s.parse(s.scratch[at:s.have], messages)
		at += size
		if size == 0 || err != nil {
			break
		}
	}
	copy(s.scratch[:], s.scratch[at:s.have])
	s.have -= at
	return messages, err
}

// Close says that the connection is gone, perhaps in the middle of a payload.
func (s *Stream) Close() {
	if s.body != nil && s.body.place != nil {
		s.body.place.Cancel()
	}
	if s.message.Place != nil { // the payload was here, and the end of its message is not
		s.message.Place.Cancel()
	}
	s.body, s.message = nil, Message{}
}

// parse takes what the bytes begin with, and returns its size; 0 if more must come first.
func (s *Stream) parse(in []byte, messages []Message) (int, []Message, error) {
	if s.state == greeting {
		size, err := s.greet(in)
		return size, messages, err
	}
	if len(in) < 2 {
		return 0, messages, nil
	}
	flags, head := in[0], 2
	if flags > flagMore|flagLong|flagCommand {
		return 0, messages, Error(fmt.Sprintf("a frame with flags %#x", flags))
	}
	if flags&flagLong != 0 {
		head = 9
	}
	if len(in) < head {
		return 0, messages, nil
	}
	size, err := s.size(flags, in[1:head])
	if err != nil {
		return 0, messages, err
	}
	end := head + size
	if end <= len(in) {
		messages, err = s.take(flags, append([]byte{}, in[head:end]...), nil, messages)
		return end, messages, err
	}
	if end <= scratchBytes && !s.isPayload(flags) {
		return 0, messages, nil
	}
	if len(messages) > 0 && s.isPayload(flags) { // they may decide on its place
		s.Held = true
		return 0, messages, nil
	}
	s.begin(flags, size, in[head:])
	return len(in), messages, nil
}

// size reads the length of a frame, and holds it against the limits.
func (s *Stream) size(flags byte, digits []byte) (int, error) {
	var size uint64
	for _, digit := range digits {
		size = size<<8 | uint64(digit)
	}
	most := s.limits.Header
	if flags&flagCommand != 0 {
		most = commandMax
	} else if s.isPayload(flags) {
		most = s.limits.Payload
	}
	if s.encrypted() {
		most += overheadBytes
	}
	if size > uint64(most) {
		return 0, Error(fmt.Sprintf("a frame of %d bytes; at most %d are taken", size, most))
	}
	return int(size), nil
}

func (s *Stream) greet(in []byte) (int, error) {
	if len(in) < 64 {
		return 0, nil
	}
	if in[0] != 0xff || in[9] != 0x7f || in[10] < 3 {
		return 0, Error("the other side does not speak ZMTP 3")
	}
	if err := s.agrees(string(bytes.TrimRight(in[12:32], "\x00"))); err != nil {
		return 0, err
	}
	s.state = ready
	mechanism := make([]byte, 20+32)
	copy(mechanism, s.mechanism())
	s.Outgoing = append(s.Outgoing, mechanism...)
	if s.curve == nil {
		s.frame(flagCommand, append([]byte("\x05READY"), s.metadata()...))
		return 64, nil
	}
	hello, err := s.curve.hello()
	if err == nil {
		s.frame(flagCommand, hello)
	}
	return 64, err
}

// agrees holds the other side's mechanism against ours. There is no other way to connect. (K1)
func (s *Stream) agrees(mechanism string) error {
	switch {
	case mechanism == s.mechanism():
		return nil
	case mechanism == "CURVE":
		return NoKeysHere
	case s.curve != nil && mechanism == "NULL":
		return NoKeysThere
	}
	return Error(fmt.Sprintf("the other side asks for %q security; this one speaks %s", mechanism, s.mechanism()))
}

func (s *Stream) metadata() []byte {
	out := append([]byte("\x0bSocket-Type\x00\x00\x00"), byte(len(s.kind.Name)))
	return append(append(out, s.kind.Name...), "\x08Identity\x00\x00\x00\x00"...)
}

// encrypted tells whether frames are carried inside others.
func (s *Stream) encrypted() bool { return s.curve != nil && s.state == open }

func (s *Stream) isPayload(flags byte) bool {
	return flags&flagCommand == 0 && len(s.message.Frames) >= s.kind.Payload
}

// begin finds a place for a frame that the scratch does not hold, of which these bytes are here.
func (s *Stream) begin(flags byte, size int, in []byte) {
	b := &body{flags: flags, missing: size}
	if s.encrypted() || !s.isPayload(flags) {
		b.own = make([]byte, size, size+roomBehind)
	} else if len(s.message.Frames) == s.kind.Payload && s.state == open {
		b.place = s.place(s.message.Frames, size)
	}
	s.body = b
	for len(in) > 0 {
		n := len(in)
		if room := b.room(); room != nil {
			n = copy(room, in)
		}
		b.received(n)
		in = in[n:]
	}
}

// take takes a frame that is complete.
func (s *Stream) take(flags byte, frame []byte, place Place, messages []Message) ([]Message, error) {
	if s.encrypted() {
		var err error
		if flags, frame, err = s.curve.carried(frame); err != nil {
			return messages, err
		}
	}
	if flags&flagCommand != 0 {
		return messages, s.command(frame)
	}
	if s.state != open {
		return messages, Error("a message before READY")
	}
	if len(s.message.Frames) >= framesMax {
		return messages, Error(fmt.Sprintf("a message of more than %d frames", framesMax))
	}
	if len(s.message.Frames) == s.kind.Payload {
		s.message.Place = place
	}
	s.message.Frames = append(s.message.Frames, frame)
	if flags&flagMore == 0 {
		messages = append(messages, s.message)
		s.Messages++
		s.message = Message{}
	}
	return messages, nil
}

func (s *Stream) command(in []byte) error {
	s.Commands++
	name, rest, ok := named(in)
	if !ok {
		return Error("a command without a name")
	}
	switch {
	case name == "ERROR" && s.curve != nil && string(rest) == denied:
		return NotAllowed
	case name == "ERROR":
		return Error(fmt.Sprintf("the other side says %.100q", rest))
	case s.curve != nil && s.state == ready:
		return s.handshake(name, rest)
	case name == "READY" && s.state == ready:
		return s.opens(rest)
	case name == "PING" && s.state == open && len(rest) >= 2 && len(rest) <= 2+16:
		s.say(flagCommand, append([]byte("\x04PONG"), rest[2:]...))
	}
	return nil // PONG, and what later versions may have
}

// handshake takes the server's commands of CURVE.
func (s *Stream) handshake(name string, rest []byte) error {
	switch name {
	case "WELCOME":
		initiate, err := s.curve.initiate(rest, s.metadata())
		if err == nil {
			s.frame(flagCommand, initiate)
		}
		return err
	case "READY":
		metadata, err := s.curve.ready(rest)
		if err == nil {
			err = s.opens(metadata)
		}
		return err
	}
	return Error(fmt.Sprintf("%.20q where CURVE has WELCOME and READY", name))
}

// opens takes the other side's metadata: from now on there are messages.
func (s *Stream) opens(metadata []byte) error {
	if peer := property(metadata, "Socket-Type"); !strings.Contains(s.kind.Peers, peer) {
		return Error(fmt.Sprintf("a %.40s is at the other end, not a %s: is this the right port?", peer, s.kind.Peers))
	}
	s.state = open
	if s.First != nil {
		s.say(0, s.First)
	}
	for topic, on := range s.topics {
		if on {
			s.subscription(topic, true)
		}
	}
	return nil
}

// property returns a value of READY's metadata, "" if it is not there.
func property(in []byte, name string) string {
	for {
		key, rest, ok := named(in)
		if !ok || len(rest) < 4 {
			return ""
		}
		size := uint64(binary.BigEndian.Uint32(rest))
		if size > uint64(len(rest)-4) {
			return ""
		}
		if strings.EqualFold(key, name) {
			return string(rest[4 : 4+size])
		}
		in = rest[4+size:]
	}
}

// named returns a name of at most 255 bytes, before which stands how many, and what follows it.
func named(in []byte) (name string, rest []byte, ok bool) {
	if len(in) == 0 {
		return "", nil, false
	}
	end := 1 + int(in[0])
	if end > len(in) {
		return "", nil, false
	}
	return string(in[1:end]), in[end:], true
}

func (b *body) room() []byte {
	if b.own != nil {
		return b.own[b.have:]
	}
	if b.place != nil {
		return b.place.Room()
	}
	return nil
}

func (b *body) received(n int) {
	b.missing -= n
	if b.own != nil {
		b.have += n
	} else if b.place != nil && b.place.Room() != nil {
		b.place.Received(n)
	}
}

func (b *body) whole() []byte {
	if b.own != nil {
		return b.own
	}
	if b.place != nil {
		return b.place.Payload()
	}
	return nil
}
