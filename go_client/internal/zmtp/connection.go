package zmtp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

const (
	dialTimeout  = 5 * time.Second       // for the host's address and the connection
	openTimeout  = 5 * time.Second       // for the handshake
	redialMin    = 50 * time.Millisecond // between two attempts; doubles
	redialMax    = time.Second
	pingEvery    = 5 * time.Second  // ZMTP's own pings, which tell whether the peer is there
	silenceMax   = 30 * time.Second // longer than a chunk of 1 MiB takes at 40 kB/s
	pingsMax     = 10 * silenceMax  // with commands alone: a publisher that has no version yet says nothing else
	receiveBytes = 1 << 18          // taken at once, while they are in the cache for the checksum
	outgoingMax  = 1 << 20          // bytes held for a peer that does not read
	pongsMax     = 1 << 16          // bytes held as that when another PING of the peer's comes
)

// An Owner has connections. Its lock guards all of their state: Opened, Place and Received are
// called while it is held, and every method of a Connection must be, but for Close and Wait.
type Owner struct {
	Lock     sync.Locker
	Opened   func()                                // messages can be sent
	Place    func(frames [][]byte, size int) Place // see NewStream
	Received func(m Message)                       // a message is complete
	Closed   func(err error)                       // it broke by itself, or could not be made; called without the lock
}

// A HungUpError says that the other side has hung up in the handshake, without a word.
type HungUpError struct{ Err error }

func (e *HungUpError) Error() string {
	return "the other side hangs up in the handshake: " + e.Err.Error()
}

// Unwrap returns what the network says.
func (e *HungUpError) Unwrap() error { return e.Err }

// A Connection reaches for an endpoint until it is closed: it dials, reads, and after a failure
// dials again, with a pause that doubles up to a second.
type Connection struct {
	owner   Owner
	kind    Kind
	limits  Limits
	network string
	address string
	resolve Resolve

	stream  *Stream
	conn    net.Conn // nil while there is none
	topics  map[string]bool
	ticket  []byte // what the next connection says first
	shows   bool   // whether each must say such a thing,
	barred  bool   // and there is none for want of it
	shown   chan struct{}
	heardAt time.Time // anything,
	spokeAt time.Time // and a message, or a piece of one
	allowed allowance // of commands
	pinged  time.Time
	since   time.Time
	kick    chan struct{} // there is something to write
	cancel  context.CancelFunc
	hangUp  context.CancelFunc // ends the connection, the attempt at one, or the pause after it
	done    chan struct{}
	receiver
}

// A Resolve returns the addresses of an endpoint, at least one, or why there is none to dial.
type Resolve func(ctx context.Context) (addresses []string, err error)

// Dial begins to reach for an endpoint (network "tcp" or "unix") and returns at once. If resolve is nil, the
// system looks the host up.
func Dial(network, address string, resolve Resolve, kind Kind, limits Limits, owner Owner) *Connection {
	ctx, cancel := context.WithCancel(context.Background())
	c := &Connection{
		owner: owner, kind: kind, limits: limits, network: network, address: address, resolve: resolve,
		topics: map[string]bool{}, kick: make(chan struct{}, 1), shown: make(chan struct{}, 1), cancel: cancel, hangUp: func() {},
		done: make(chan struct{}),
	}
	go c.run(ctx)
	return c
}

// Open tells whether messages can be sent.
func (c *Connection) Open() bool { return c.conn != nil && c.stream.Open() }

// Send sends a message of one frame, and tells whether it is on its way. While nobody is there, or
// if the peer has not read for long, it is not.
func (c *Connection) Send(frame []byte) bool {
	if !c.Open() || len(c.stream.Outgoing)+len(frame) > outgoingMax {
		return false
	}
	c.stream.Send(frame)
	c.flush()
	return true
}

// Subscribe asks for a topic, or no longer, on this connection and those that follow it.
func (c *Connection) Subscribe(topic string, on bool) {
	c.topics[topic] = on
	if c.conn != nil {
		c.stream.Subscribe(topic, on)
		c.flush()
	}
}

// Show gives the next connection something to say before all else, which counts once: from now on there
// is none without. nil: they need none.
func (c *Connection) Show(ticket []byte) {
	c.ticket, c.shows = ticket, ticket != nil
	select {
	case c.shown <- struct{}{}:
	default:
	}
}

// Barred tells whether there is no connection since there is nothing to show.
func (c *Connection) Barred() bool { return c.barred }

// Redial makes the connection anew, and at once: the one that there is may lead nowhere. What waits
// to be sent is lost.
func (c *Connection) Redial() { c.hangUp() }

// Tick is to be called about ten times a second. It sends pings when it is time, gives up a connection
// that is silent, and has what is here of a payload taken.
func (c *Connection) Tick(now time.Time) {
	if c.conn == nil {
		return
	}
	silent := c.kind.Pings && (now.Sub(c.heardAt) >= silenceMax || now.Sub(c.spokeAt) >= pingsMax)
	if silent || !c.stream.Open() && now.Sub(c.since) >= openTimeout {
		_ = c.conn.Close()
		return
	}
	if c.kind.Pings && now.Sub(c.pinged) >= pingEvery {
		c.pinged = now
		c.stream.Ping(uint16(silenceMax / (100 * time.Millisecond)))
		c.flush()
	}
	c.takeWhatIsHere()
}

// Close ends the connection; what is still to be sent gets a moment.
func (c *Connection) Close(linger time.Duration) {
	deadline := time.Now().Add(linger)
	for pause := 100 * time.Microsecond; c.unsent() && time.Now().Before(deadline); pause *= 2 {
		time.Sleep(pause)
	}
	c.cancel()
}

// Stop ends the connection at once.
func (c *Connection) Stop() { c.cancel() }

// Wait returns when nothing of the connection is left.
func (c *Connection) Wait() { <-c.done }

func (c *Connection) unsent() bool {
	c.owner.Lock.Lock()
	defer c.owner.Lock.Unlock()
	return c.Open() && len(c.stream.Outgoing) > 0
}

func (c *Connection) flush() {
	select {
	case c.kick <- struct{}{}:
	default:
	}
}

// run dials again and again.
func (c *Connection) run(ctx context.Context) {
	defer close(c.done)
	dialer := net.Dialer{Timeout: dialTimeout}
	for pause := redialMin; ctx.Err() == nil; {
		attempt := c.attempt(ctx)
		if !c.admitted(attempt) {
			continue
		}
		conn, err := c.dial(attempt, &dialer)
		opened, useful := false, false
		if err == nil {
			opened, useful, err = c.serve(attempt, conn)
			var broken Error
			if !opened && !errors.As(err, &broken) {
				err = &HungUpError{err}
			}
		}
		if useful { // to be let in does not show that the next attempt is worth it
			pause = redialMin
		}
		if attempt.Err() == nil { // else it ends since we want it to
			c.owner.Closed(err)
		}
		select {
		case <-attempt.Done():
			pause = redialMin
			continue
		case <-time.After(pause):
		}
		if pause *= 2; pause > redialMax {
			pause = redialMax
		}
	}
}

// dial connects to the first address that answers.
func (c *Connection) dial(ctx context.Context, dialer *net.Dialer) (conn net.Conn, err error) {
	if c.resolve == nil {
		return dialer.DialContext(ctx, c.network, c.address)
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	addresses, err := c.resolve(ctx)
	for _, address := range addresses {
		if conn, err = dialer.DialContext(ctx, c.network, address); err == nil {
			break
		}
	}
	return conn, err
}

// attempt begins another attempt, which hangUp ends.
func (c *Connection) attempt(ctx context.Context) context.Context {
	c.owner.Lock.Lock()
	defer c.owner.Lock.Unlock()
	c.hangUp() // of the attempt before: nothing of it is left
	ctx, c.hangUp = context.WithCancel(ctx)
	return ctx
}

// admitted waits until there is something to show, if there must be; false: the attempt is over.
func (c *Connection) admitted(attempt context.Context) bool {
	for {
		c.owner.Lock.Lock()
		c.barred = c.shows && c.ticket == nil
		barred := c.barred
		c.owner.Lock.Unlock()
		if !barred {
			return true
		}
		select {
		case <-attempt.Done():
			return false
		case <-c.shown:
		}
	}
}

// serve uses one connection until it breaks.
func (c *Connection) serve(ctx context.Context, conn net.Conn) (opened, useful bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c.begin(conn)
	var both sync.WaitGroup
	both.Add(2)
	go func() { defer both.Done(); c.write(ctx, conn) }()
	go func() { defer both.Done(); <-ctx.Done(); _ = conn.Close() }()
	err = c.read(conn)
	opened, useful = c.finish()
	cancel()
	both.Wait()
	return opened, useful, err
}

func (c *Connection) begin(conn net.Conn) {
	c.owner.Lock.Lock()
	defer c.owner.Lock.Unlock()
	c.stream = NewStream(c.kind, c.limits, c.owner.Place)
	c.stream.First, c.ticket = c.ticket, nil
	for topic, on := range c.topics {
		c.stream.Subscribe(topic, on)
	}
	now := time.Now()
	c.conn, c.heardAt, c.spokeAt, c.pinged, c.since, c.allowed = conn, now, now, now, now, newAllowance(now)
	c.flush()
}

func (c *Connection) finish() (opened, useful bool) {
	c.owner.Lock.Lock()
	defer c.owner.Lock.Unlock()
	opened, useful = c.stream.Open(), c.stream.Messages > 0
	c.stream.Close()
	c.conn, c.receiver = nil, receiver{}
	return opened, useful
}

// write sends what is to be sent.
func (c *Connection) write(ctx context.Context, conn net.Conn) {
	var spare []byte
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.kick:
		}
		c.owner.Lock.Lock()
		out := c.stream.Outgoing
		c.stream.Outgoing = spare[:0]
		c.owner.Lock.Unlock()
		_ = conn.SetWriteDeadline(time.Now().Add(silenceMax))
		if _, err := conn.Write(out); err != nil {
			_ = conn.Close() // the reader notices
			return
		}
		spare = out
	}
}

// received takes note of so many bytes in the stream's room.
func (c *Connection) received(n int) error {
	c.heardAt = time.Now()
	commands, messages := c.stream.Commands, c.stream.Messages
	err := c.deliver(n)
	for err == nil && c.stream.Held {
		err = c.deliver(0)
	}
	if c.stream.Messages > messages {
		c.spokeAt = c.heardAt
	}
	if err == nil {
		err = c.bears(c.stream.Commands - commands)
	}
	if len(c.stream.Outgoing) > 0 {
		c.flush()
	}
	if err == nil && len(c.stream.Outgoing) > 2*outgoingMax {
		err = Error("the other side does not read")
	}
	return err
}

// bears says why so many commands are more than a publisher has, or is answered.
func (c *Connection) bears(commands int) error {
	switch {
	case commands == 0:
	case len(c.stream.Outgoing) > pongsMax:
		return Error(fmt.Sprintf("the other side has not read %d bytes, and asks for more by PINGs", len(c.stream.Outgoing)))
	case !c.allowed.take(commands, c.heardAt):
		return Error(fmt.Sprintf("more than %d commands at once, or %d a second: a publisher sends a PING every few seconds",
			commandsBurst, commandsPerSecond))
	}
	return nil
}

// deliver hands over the messages that so many bytes have completed.
func (c *Connection) deliver(n int) error {
	wasOpen := c.stream.Open()
	messages, err := c.stream.Received(n)
	if !wasOpen && c.stream.Open() {
		c.owner.Opened()
	}
	for _, m := range messages {
		c.owner.Received(m)
	}
	return err
}
