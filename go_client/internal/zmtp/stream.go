// Package zmtp implements the connecting side of ZMTP 3 (ZeroMQ RFC 23) for the two sockets of a
// worker, a DEALER and a SUB. Connections are in the clear (NULL) or encrypted with CURVE (RFC 26).
//
// A ZeroMQ library receives each message into its own memory. The new pages, the hand-over between
// threads and the copy cost more time than the network. This package receives payloads from the
// kernel directly into their buffers.
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
	scratchBytes = 8192 // bytes to read ahead; the part of a payload among them is copied once more
	framesMax    = 8    // frames of a message; a later protocol may have several payloads
	commandMax   = 4096 // bytes of a command; READY with its properties is the longest
	tagRoom      = 16   // bytes of memory after a payload, for the authentication tag
)

// A Kind is a type of socket.
type Kind struct {
	Name    string   // in READY
	Payload int      // index of the payload frame: after the topic, if any, and the header
	Peers   []string // socket types that it may connect to
	Keys    *Keys    // nil without encryption
	Pings   bool     // send ZMTP pings, and close the connection if nothing is received
}

// Dealer and Sub are the sockets of a worker.
//
// Dealer sends no ZMTP pings, since WBP has its own pings on the control channel. Also, libzmq up to
// 4.3.5 at the other end aborts its process if a connection breaks while libzmq has paused reading
// from it and has a ping in its read buffer.
var (
	Dealer = Kind{Name: "DEALER", Payload: 1, Peers: []string{"ROUTER"}}
	Sub    = Kind{Name: "SUB", Payload: 2, Peers: []string{"PUB", "XPUB"}, Pings: true}
)

// Limits are the largest frames in bytes, like ZMQ_MAXMSGSIZE.
type Limits struct{ Header, Payload int }

// A Buffer is memory into which a payload is received in parts.
type Buffer interface {
	Room() []byte    // the memory for the next bytes; nil if the payload is no longer wanted
	Received(n int)  // n bytes were written into Room
	Payload() []byte // the complete payload; nil if it is no longer wanted
	Cancel()         // the payload will not be completed
}

// A Message has the frames of a message, and the Buffer into which its payload was received, if any.
type Message struct {
	Frames [][]byte
	Buffer Buffer
}

// An Error describes how the peer breaks ZMTP; the connection must be closed.
type Error string

func (e Error) Error() string { return "zmtp: " + string(e) }

type state int

const (
	greeting state = iota // no greeting received
	ready                 // greeting received; READY, or a command of CURVE before it, is expected
	open
)

// A Stream is one connection without its socket. The caller writes input into Room and calls
// Received, and sends the bytes in Outgoing.
//
//	greeting (64 bytes) ──> READY ──> messages and commands
//
//	a frame:  ┌───────┬──────────────┬──── ··· ────┐   flags: 1 not the last frame, 2 size of 8 bytes, 4 command
//	          │ flags │ size, 1 or 8 │    body     │
//	          └───────┴──────────────┴──── ··· ────┘
//
// With CURVE, each frame contains an encrypted frame with its flags (curve.go).
type Stream struct {
	Outgoing     []byte
	Pending      bool   // more input is in the scratch: call Received(0) after processing the messages
	FirstMessage []byte // a message to send before all others
	Commands     int    // number of received commands
	Messages     int    // number of received messages and parts of payloads

	kind      Kind
	limits    Limits
	bufferFor func(frames [][]byte, size int) Buffer
	state     state
	curve     *curve // nil without encryption
	scratch   [scratchBytes]byte
	have      int // number of bytes in the scratch
	message   Message
	body      *body // a frame too long for the scratch
	topics    map[string]bool
}

// A body is a frame too long for the scratch that is being received.
type body struct {
	flags   byte
	missing int    // number of bytes still to receive
	memory  []byte // of an encrypted frame, or of a frame that is not a payload
	have    int    // number of bytes in memory
	buffer  Buffer // of a payload; nil to discard the payload
}

// NewStream returns the Stream of a new connection. bufferFor returns the memory to receive a payload
// into, given the frames before the payload and the payload's size. If bufferFor returns nil, the
// payload is discarded, and its frame is empty.
func NewStream(kind Kind, limits Limits, bufferFor func(frames [][]byte, size int) Buffer) *Stream {
	s := &Stream{kind: kind, limits: limits, bufferFor: bufferFor, topics: map[string]bool{}}
	if kind.Keys != nil {
		s.curve = &curve{keys: kind.Keys}
	}
	// Send only the signature and version of the greeting. The rest follows once the peer's security
	// mechanism is known: if the mechanisms differ, libzmq closes the connection before it sends its own.
	s.Outgoing = append(s.Outgoing, 0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0)
	return s
}

func (s *Stream) mechanism() string {
	if s.kind.Keys != nil {
		return "CURVE"
	}
	return "NULL"
}

// Open reports whether the handshake is complete, so that messages can be sent.
func (s *Stream) Open() bool { return s.state == open }

// Send queues a message of one frame. It drops the message if the connection is not open.
func (s *Stream) Send(frame []byte) {
	if s.state == open {
		s.sendFrame(0, frame)
	}
}

// Ping sends a PING. The peer may close the connection after ttl tenths of a second without input.
func (s *Stream) Ping(ttl uint16) {
	if s.state == open {
		s.sendFrame(flagCommand, []byte{4, 'P', 'I', 'N', 'G', byte(ttl >> 8), byte(ttl)})
	}
}

// Subscribe subscribes to a topic, or unsubscribes if on is false. A repeated call has no effect.
func (s *Stream) Subscribe(topic string, on bool) {
	if s.topics[topic] == on {
		return
	}
	s.topics[topic] = on
	if s.state == open {
		s.sendSubscription(topic, on)
	}
}

func (s *Stream) sendSubscription(topic string, on bool) {
	first := byte(0)
	if on {
		first = 1
	}
	s.sendFrame(0, append([]byte{first}, topic...))
}

// sendFrame queues a frame on an open connection. With CURVE it encrypts the frame.
func (s *Stream) sendFrame(flags byte, body []byte) {
	if s.curve == nil {
		s.appendFrame(flags, body)
		return
	}
	s.appendFrame(0, s.curve.message(flags, body))
}

func (s *Stream) appendFrame(flags byte, body []byte) {
	if len(body) < 256 {
		s.Outgoing = append(s.Outgoing, flags, byte(len(body)))
	} else {
		s.Outgoing = append(s.Outgoing, flags|flagLong)
		s.Outgoing = append(s.Outgoing, make([]byte, 8)...)
		binary.BigEndian.PutUint64(s.Outgoing[len(s.Outgoing)-8:], uint64(len(body)))
	}
	s.Outgoing = append(s.Outgoing, body...)
}

// Room returns the memory for the next input, which is never empty.
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

// Missing returns the number of bytes, at least 1, that are missing from the current frame.
func (s *Stream) Missing() int {
	if s.body == nil {
		return 1
	}
	return s.body.missing
}

// Received processes n bytes that were written into Room, and returns the messages that are now
// complete. If Pending is true afterwards, the caller must process these messages, and then call
// Received(0) before the next call of Room. After an error the connection must be closed.
func (s *Stream) Received(n int) (messages []Message, err error) {
	if s.body != nil {
		b := s.body
		b.received(n)
		if b.memory == nil { // not a command
			s.Messages++
		}
		if b.missing > 0 {
			return nil, nil
		}
		s.body = nil
		return s.takeFrame(b.flags, b.payload(), b.buffer, nil)
	}
	s.have += n
	s.Pending = false
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

// Close must be called when the connection has closed. It cancels the payload that is being received.
func (s *Stream) Close() {
	if s.body != nil && s.body.buffer != nil {
		s.body.buffer.Cancel()
	}
	if s.message.Buffer != nil { // the payload is complete, but its message is not
		s.message.Buffer.Cancel()
	}
	s.body, s.message = nil, Message{}
}

// parse consumes a greeting or frame at the start of `in` and returns its size; 0 if incomplete.
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
	size, err := s.frameSize(flags, in[1:head])
	if err != nil {
		return 0, messages, err
	}
	end := head + size
	if end <= len(in) {
		messages, err = s.takeFrame(flags, append([]byte{}, in[head:end]...), nil, messages)
		return end, messages, err
	}
	if end <= scratchBytes && !s.isPayload(flags) {
		return 0, messages, nil
	}
	if len(messages) > 0 && s.isPayload(flags) { // its Buffer may depend on these messages
		s.Pending = true
		return 0, messages, nil
	}
	s.beginBody(flags, size, in[head:])
	return len(in), messages, nil
}

// frameSize returns the length of a frame, or an error if the length exceeds its limit.
func (s *Stream) frameSize(flags byte, raw []byte) (int, error) {
	var size uint64
	for _, digit := range raw {
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
		return 0, Error(fmt.Sprintf("a frame of %d bytes; at most %d are allowed", size, most))
	}
	return int(size), nil
}

// greet processes a greeting. It returns the number of bytes processed, or 0 if more are needed.
func (s *Stream) greet(in []byte) (int, error) {
	if len(in) < 64 {
		return 0, nil
	}
	if in[0] != 0xff || in[9] != 0x7f || in[10] < 3 {
		return 0, Error("the other side does not speak ZMTP 3")
	}
	if err := s.checkMechanism(string(bytes.TrimRight(in[12:32], "\x00"))); err != nil {
		return 0, err
	}
	s.state = ready
	mechanism := make([]byte, 20+32)
	copy(mechanism, s.mechanism())
	s.Outgoing = append(s.Outgoing, mechanism...)
	if s.curve == nil {
		s.appendFrame(flagCommand, append([]byte("\x05READY"), s.metadata()...))
		return 64, nil
	}
	hello, err := s.curve.hello()
	if err == nil {
		s.appendFrame(flagCommand, hello)
	}
	return 64, err
}

// checkMechanism returns an error unless both sides have the same mechanism: there is no fallback. (K1)
func (s *Stream) checkMechanism(mechanism string) error {
	switch {
	case mechanism == s.mechanism():
		return nil
	case mechanism == "CURVE":
		return PeerWithKeys
	case s.curve != nil && mechanism == "NULL":
		return PeerWithoutKeys
	}
	return Error(fmt.Sprintf("the other side requires the security mechanism %q, but this side uses %s", mechanism, s.mechanism()))
}

func (s *Stream) metadata() []byte {
	out := append([]byte("\x0bSocket-Type\x00\x00\x00"), byte(len(s.kind.Name)))
	return append(append(out, s.kind.Name...), "\x08Identity\x00\x00\x00\x00"...)
}

// encrypted reports whether frames are encrypted.
func (s *Stream) encrypted() bool { return s.curve != nil && s.state == open }

func (s *Stream) isPayload(flags byte) bool {
	return flags&flagCommand == 0 && len(s.message.Frames) >= s.kind.Payload
}

// beginBody chooses the memory for a frame of size bytes that is too long for the scratch. in is the
// received part of the frame.
func (s *Stream) beginBody(flags byte, size int, in []byte) {
	b := &body{flags: flags, missing: size}
	if s.encrypted() || !s.isPayload(flags) {
		b.memory = make([]byte, size, size+tagRoom)
	} else if len(s.message.Frames) == s.kind.Payload && s.state == open {
		b.buffer = s.bufferFor(s.message.Frames, size)
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

// takeFrame processes a complete frame.
func (s *Stream) takeFrame(flags byte, frame []byte, buffer Buffer, messages []Message) ([]Message, error) {
	if s.encrypted() {
		var err error
		if flags, frame, err = s.curve.openMessage(frame); err != nil {
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
		s.message.Buffer = buffer
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
	name, rest, ok := splitName(in)
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
		return s.finishHandshake(rest)
	case name == "PING" && s.state == open && len(rest) >= 2 && len(rest) <= 2+16:
		s.sendFrame(flagCommand, append([]byte("\x04PONG"), rest[2:]...))
	}
	return nil // PONG, or a command of a later version
}

// handshake processes the server's commands of the CURVE handshake.
func (s *Stream) handshake(name string, rest []byte) error {
	switch name {
	case "WELCOME":
		initiate, err := s.curve.initiate(rest, s.metadata())
		if err == nil {
			s.appendFrame(flagCommand, initiate)
		}
		return err
	case "READY":
		metadata, err := s.curve.ready(rest)
		if err == nil {
			err = s.finishHandshake(metadata)
		}
		return err
	}
	return Error(fmt.Sprintf("the command %.20q in a handshake of CURVE, instead of WELCOME or READY", name))
}

// finishHandshake checks the peer's metadata and opens the connection.
func (s *Stream) finishHandshake(metadata []byte) error {
	peer, known := property(metadata, "Socket-Type"), false
	for _, kind := range s.kind.Peers {
		known = known || kind == peer
	}
	if !known {
		wanted := strings.Join(s.kind.Peers, " or ")
		return Error(fmt.Sprintf("a %.40q is at the other end, not a %s: is this the right port?", peer, wanted))
	}
	s.state = open
	if s.FirstMessage != nil {
		s.sendFrame(0, s.FirstMessage)
	}
	for topic, on := range s.topics {
		if on {
			s.sendSubscription(topic, true)
		}
	}
	return nil
}

// property returns the value of a property of READY; "" if it is missing.
func property(in []byte, name string) string {
	for {
		key, rest, ok := splitName(in)
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

// splitName splits bytes that begin with the length of a name, in one byte, and the name. It returns
// the name and the bytes after it, or false if in is too short.
func splitName(in []byte) (name string, rest []byte, ok bool) {
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
	if b.memory != nil {
		return b.memory[b.have:]
	}
	if b.buffer != nil {
		return b.buffer.Room()
	}
	return nil
}

func (b *body) received(n int) {
	b.missing -= n
	if b.memory != nil {
		b.have += n
	} else if b.buffer != nil && b.buffer.Room() != nil {
		b.buffer.Received(n)
	}
}

func (b *body) payload() []byte {
	if b.memory != nil {
		return b.memory
	}
	if b.buffer != nil {
		return b.buffer.Payload()
	}
	return nil
}
