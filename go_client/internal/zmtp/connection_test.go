package zmtp

import (
	"bytes"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// A peer is the other end of a connection, controlled by the test.
type peer struct {
	t    *testing.T
	conn net.Conn
}

// accept accepts the next connection, and completes its handshake.
func accept(t *testing.T, listener net.Listener) *peer { return acceptAs(t, listener, "ROUTER") }

func acceptAs(t *testing.T, listener net.Listener, kind string) *peer {
	t.Helper()
	_ = listener.(*net.TCPListener).SetDeadline(time.Now().Add(20 * time.Second))
	conn, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	p := &peer{t, conn}
	p.send(append(greetingOf("NULL"), readyOf(kind)...))
	p.expect(64)
	p.frame()
	return p
}

func (p *peer) send(in []byte) {
	if _, err := p.conn.Write(in); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) expect(n int) []byte {
	p.t.Helper()
	in := make([]byte, n)
	if _, err := io.ReadFull(p.conn, in); err != nil {
		p.t.Fatal(err)
	}
	return in
}

// frame returns the next short frame.
func (p *peer) frame() (flags byte, body string) {
	head := p.expect(2)
	return head[0], string(p.expect(int(head[1])))
}

// A heard is an owner that records its calls.
type heard struct {
	sync.Mutex
	opened   chan struct{}
	messages chan Message
	closed   chan error
	place    func(frames [][]byte, size int) Buffer
}

func (h *heard) owner() Owner {
	return Owner{
		Lock:      h,
		Opened:    func() { h.opened <- struct{}{} },
		BufferFor: func(frames [][]byte, size int) Buffer { return h.place(frames, size) },
		Received:  func(m Message) { h.messages <- m },
		Closed:    func(err error) { h.closed <- err },
	}
}

func dial(t *testing.T) (*heard, *Connection, net.Listener) { return dialAs(t, Dealer) }

func dialAs(t *testing.T, kind Kind) (*heard, *Connection, net.Listener) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &heard{opened: make(chan struct{}, 9), messages: make(chan Message, 9), closed: make(chan error, 99), place: wanted}
	c := Dial("tcp", listener.Addr().String(), nil, kind, testLimits, h.owner())
	t.Cleanup(func() { listener.Close(); c.Close(0); c.Wait() })
	return h, c, listener
}

func await[T any](t *testing.T, what string, from <-chan T) T {
	t.Helper()
	select {
	case value := <-from:
		return value
	case <-time.After(20 * time.Second):
		t.Fatalf("%s did not come", what)
		panic("")
	}
}

func TestMessagesBothWays(t *testing.T) {
	h, c, listener := dial(t)
	p := accept(t, listener)
	await(t, "opened", h.opened)
	p.send(messageOf([]byte("header"), make([]byte, 300000)))
	if m := await(t, "a message", h.messages); len(m.Frames) != 2 || len(m.Frames[1]) != 300000 || m.Buffer == nil {
		t.Fatalf("%d frames", len(m.Frames))
	}
	h.Lock()
	sent := c.Send([]byte("hello"))
	h.Unlock()
	if flags, body := p.frame(); !sent || flags != 0 || body != "hello" {
		t.Fatalf("%v %d %q", sent, flags, body)
	}
}

func TestAConnectionThatBreaksIsMadeAgain(t *testing.T) {
	h, c, listener := dial(t)
	for round := 0; round < 3; round++ {
		p := accept(t, listener)
		await(t, "opened", h.opened)
		_ = p.conn.Close()
		await(t, "closed", h.closed)
	}
	h.Lock()
	defer h.Unlock()
	if c.Send([]byte("x")) {
		t.Fatal("sent to nobody")
	}
}

func TestAConnectionIsMadeAnewWhenAsked(t *testing.T) {
	h, c, listener := dial(t)
	for round := 0; round < 3; round++ {
		p := accept(t, listener)
		await(t, "opened", h.opened)
		h.Lock()
		c.Redial()
		h.Unlock()
		if _, err := p.conn.Read(make([]byte, 1)); err != io.EOF {
			t.Fatal(err)
		}
	}
	accept(t, listener)
	await(t, "opened", h.opened)
	if len(h.closed) != 0 {
		t.Fatalf("told as broken: %v", <-h.closed)
	}
}

// A ticket is sent first, and serves one connection. Without another ticket the next connection
// waits.
func TestAConnectionShowsItsTicketFirst(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &heard{opened: make(chan struct{}, 9), closed: make(chan error, 99), place: wanted}
	h.Lock()
	c := Dial("tcp", listener.Addr().String(), nil, Dealer, testLimits, h.owner())
	t.Cleanup(func() { listener.Close(); c.Close(0); c.Wait() })
	c.Subscribe("topic", true)
	for _, ticket := range []string{"\x03one", "\x03two"} {
		c.SetTicket([]byte(ticket))
		h.Unlock()
		p := accept(t, listener)
		_, first := p.frame()
		if _, then := p.frame(); first != ticket || then != "\x01topic" {
			t.Fatalf("%q, then %q", first, then)
		}
		_ = p.conn.Close()
		await(t, "closed", h.closed)
		for h.Lock(); !c.AwaitsTicket(); h.Lock() {
			h.Unlock()
			runtime.Gosched()
		}
	}
	c.Redial()
	c.SetTicket(nil)
	h.Unlock()
	if _, first := accept(t, listener).frame(); first != "\x01topic" {
		t.Fatalf("%q", first)
	}
}

func TestAPeerThatBreaksZMTPIsLeft(t *testing.T) {
	h, _, listener := dial(t)
	p := accept(t, listener)
	await(t, "opened", h.opened)
	p.send([]byte{0xff, 0xff})
	if _, ok := await(t, "closed", h.closed).(Error); !ok {
		t.Fatal("another error")
	}
	accept(t, listener)
	await(t, "opened", h.opened)
}

func TestThePlaceOfAPayloadIsAskedForAfterTheMessagesBeforeIt(t *testing.T) {
	h, _, listener := dial(t)
	p := accept(t, listener)
	await(t, "opened", h.opened)
	before := make(chan int, 1)
	h.Lock()
	h.place = func(frames [][]byte, size int) Buffer {
		before <- len(h.messages)
		return wanted(frames, size)
	}
	h.Unlock()
	p.send(append(messageOf([]byte("announce")), messageOf([]byte("chunk"), make([]byte, 3*scratchBytes))...))
	if known := await(t, "a place", before); known != 1 {
		t.Fatalf("%d messages were handed over before", known)
	}
}

// A slow is a place that reports the bytes it receives.
type slow struct {
	memory
	pieces chan int
}

func (s *slow) Received(n int) { s.memory.Received(n); s.pieces <- n }

// Tick makes the reader read bytes that are too few to wake it.
func TestWhatComesSlowlyIsTakenPieceByPiece(t *testing.T) {
	h, c, listener := dial(t)
	p := accept(t, listener)
	await(t, "opened", h.opened)
	pieces := make(chan int, 1000)
	h.Lock()
	h.place = func(_ [][]byte, size int) Buffer { return &slow{memory{bytes: make([]byte, size)}, pieces} }
	h.Unlock()
	in := messageOf([]byte("chunk"), make([]byte, 1<<20))
	sent, taken := 0, len(in)-(1<<20) // all bytes before the payload
	for round := 0; round < 10; round++ {
		p.send(in[sent : sent+10000])
		for sent += 10000; taken < sent; {
			taken += awaitTicking(t, c, h, pieces)
		}
	}
}

// awaitTicking waits for a piece, and calls Tick meanwhile as a worker does.
func awaitTicking(t *testing.T, c *Connection, h *heard, pieces <-chan int) int {
	t.Helper()
	clock := time.NewTicker(5 * time.Millisecond)
	defer clock.Stop()
	for late := time.After(20 * time.Second); ; {
		select {
		case n := <-pieces:
			return n
		case now := <-clock.C:
			h.Lock()
			c.Tick(now)
			h.Unlock()
		case <-late:
			t.Fatal("what is here is not taken")
		}
	}
}

// A PING of ZMTP may abort the publisher's process if the control connection breaks.
func TestNoPingsOnControl(t *testing.T) {
	h, c, listener := dial(t)
	p := accept(t, listener)
	await(t, "opened", h.opened)
	h.Lock()
	c.Tick(time.Now().Add(pingInterval))
	c.Tick(time.Now().Add(silenceMax))
	c.Send([]byte("said"))
	h.Unlock()
	if flags, body := p.frame(); flags != 0 || body != "said" {
		t.Fatalf("%d %q", flags, body)
	}
}

func TestPingsAndSilence(t *testing.T) {
	h, c, listener := dialAs(t, Sub)
	p := acceptAs(t, listener, "PUB")
	await(t, "opened", h.opened)
	h.Lock()
	c.Tick(time.Now().Add(pingInterval))
	h.Unlock()
	if flags, body := p.frame(); flags != flagCommand || body != "\x04PING\x01\x2c" {
		t.Fatalf("%d %q", flags, body)
	}
	h.Lock()
	c.Tick(time.Now().Add(silenceMax))
	h.Unlock()
	await(t, "closed", h.closed)
}

func TestWhatIsHeldForAPeerThatDoesNotReadIsBounded(t *testing.T) {
	h, c, listener := dial(t)
	accept(t, listener)
	await(t, "opened", h.opened)
	h.Lock()
	defer h.Unlock()
	refused := 0
	for i := 0; i < 100; i++ {
		if !c.Send(make([]byte, 60000)) {
			refused++
		}
	}
	if refused == 0 || len(c.stream.Outgoing) > outgoingMax+100 {
		t.Fatalf("%d refused, %d bytes held", refused, len(c.stream.Outgoing))
	}
}

func TestCloseSendsWhatIsThere(t *testing.T) {
	h, c, listener := dial(t)
	p := accept(t, listener)
	await(t, "opened", h.opened)
	h.Lock()
	c.Send([]byte("bye"))
	h.Unlock()
	c.Close(10 * time.Second)
	if _, body := p.frame(); body != "bye" {
		t.Fatalf("%q", body)
	}
	if _, err := p.conn.Read(make([]byte, 1)); err != io.EOF {
		t.Fatal(err)
	}
}

var ping = append([]byte{flagCommand, 7}, "\x04PING\x00\x00"...)

func TestMoreCommandsThanAPublisherHas(t *testing.T) {
	h, _, listener := dialAs(t, Sub)
	for round, count := range []int{commandsBurst - 2, commandsBurst + 2} {
		p := acceptAs(t, listener, "XPUB")
		await(t, "opened", h.opened)
		// All in one write, since the worker may close the connection before the last message.
		p.send(append(bytes.Repeat(ping, count), messageOf([]byte("topic"), []byte("header"))...))
		if round == 0 {
			await(t, "a message", h.messages)
			_ = p.conn.Close()
			await(t, "closed", h.closed)
		} else if err := await(t, "closed", h.closed); !strings.Contains(err.Error(), "commands at once") {
			t.Error(err)
		}
	}
}

// A connection with only PINGs stays alive, but not for ever.
func TestPingsAloneAreNoSignOfLifeForEver(t *testing.T) {
	h, c, listener := dialAs(t, Sub)
	for _, alive := range []bool{true, false} {
		p := acceptAs(t, listener, "XPUB")
		await(t, "opened", h.opened)
		h.Lock()
		now := time.Now()
		c.receivedAt = now
		c.messageAt = now.Add(-pingsMax)
		h.Unlock()
		if alive {
			p.send(messageOf([]byte("topic"), []byte("header")))
			await(t, "a message", h.messages)
		} else {
			p.send(ping)
			p.frame() // the answer
		}
		h.Lock()
		c.Tick(now)
		h.Unlock()
		if alive {
			p.send(messageOf([]byte("topic"), []byte("header")))
			await(t, "another message", h.messages)
			_ = p.conn.Close()
		}
		await(t, "closed", h.closed)
	}
}

// A peer that does not read the answers to its PINGs is disconnected before many are queued.
func TestAnswersThatNobodyReads(t *testing.T) {
	c := &Connection{kind: Sub, stream: NewStream(Sub, testLimits, wanted), wakeWriter: make(chan struct{}, 1),
		bucket: newTokenBucket(time.Now()), owner: Owner{Opened: func() {}}}
	take := func(in []byte) error { return c.received(copy(c.stream.Room(), in)) }
	if err := take(append(greetingOf("NULL"), readyOf("XPUB")...)); err != nil {
		t.Fatal(err)
	}
	c.stream.Outgoing = make([]byte, pongsMax-100)
	if err := take(ping); err != nil {
		t.Fatal(err)
	}
	c.stream.Outgoing = make([]byte, pongsMax)
	if err := take(ping); err == nil || !strings.Contains(err.Error(), "has not read") {
		t.Error(err)
	}
}

// A complete payload is cancelled if its message is never completed.
func TestAPlaceIsGivenBackWithItsMessage(t *testing.T) {
	given := &memory{bytes: make([]byte, 10000)}
	s := NewStream(Sub, testLimits, func([][]byte, int) Buffer { return given })
	in := append(append(greetingOf("NULL"), readyOf("XPUB")...), messageOf([]byte("t"), []byte("h"), given.bytes, []byte("more"))...)
	for in = in[:len(in)-6]; len(in) > 0; {
		n := copy(s.Room(), in)
		if _, err := s.Received(n); err != nil {
			t.Fatal(err)
		}
		in = in[n:]
	}
	if s.message.Buffer == nil || given.cancel {
		t.Fatal("the payload is not here")
	}
	if s.Close(); !given.cancel {
		t.Error("it is kept")
	}
}
