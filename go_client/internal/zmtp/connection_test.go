package zmtp

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// A peer is the other end of a connection, in the hands of a test.
type peer struct {
	t    *testing.T
	conn net.Conn
}

// accept takes the next connection, and opens it.
func accept(t *testing.T, listener net.Listener) *peer {
	t.Helper()
	_ = listener.(*net.TCPListener).SetDeadline(time.Now().Add(20 * time.Second))
	conn, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	p := &peer{t, conn}
	p.send(append(greetingOf("NULL"), readyOf("ROUTER")...))
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

// A heard is an owner that keeps what it is told.
type heard struct {
	sync.Mutex
	opened   chan struct{}
	messages chan Message
	closed   chan error
}

func (h *heard) owner() Owner {
	return Owner{
		Lock:     h,
		Opened:   func() { h.opened <- struct{}{} },
		Place:    wanted,
		Received: func(m Message) { h.messages <- m },
		Closed:   func(err error) { h.closed <- err },
	}
}

func dial(t *testing.T) (*heard, *Connection, net.Listener) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &heard{opened: make(chan struct{}, 9), messages: make(chan Message, 9), closed: make(chan error, 99)}
	c := Dial("tcp", listener.Addr().String(), Dealer, testLimits, h.owner())
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
	if m := await(t, "a message", h.messages); len(m.Frames) != 2 || len(m.Frames[1]) != 300000 || m.Place == nil {
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

func TestPingsAndSilence(t *testing.T) {
	h, c, listener := dial(t)
	p := accept(t, listener)
	await(t, "opened", h.opened)
	h.Lock()
	c.Tick(time.Now().Add(pingEvery))
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
