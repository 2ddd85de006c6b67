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
	dialTimeout  = 5 * time.Second       // for name lookup and connecting
	openTimeout  = 5 * time.Second       // for the handshake
	redialMin    = 50 * time.Millisecond // pause before the next attempt; doubles with each failure
	redialMax    = time.Second
	pingInterval = 5 * time.Second  // of ZMTP pings, which detect a dead peer
	silenceMax   = 30 * time.Second // without any byte; longer than 1 MiB takes at 40 kB/s
	pingsMax     = 10 * silenceMax  // with commands only: a publisher may have no version to send
	receiveBytes = 1 << 18          // bytes to read at once, so that they are in the cache for the checksum
	outgoingMax  = 1 << 20          // bytes to queue for a peer that does not read
	pongsMax     = 1 << 16          // queued bytes above which a PING is an error
)

// An Owner has the callbacks of the connections' user. Its Lock guards the whole state of the
// connections. A Connection holds Lock when it calls the functions. The owner must hold Lock when it
// calls any method of a Connection except Close, Stop and Wait.
type Owner struct {
	Lock      sync.Locker
	Opened    func()                                 // the handshake is complete: messages can be sent
	BufferFor func(frames [][]byte, size int) Buffer // see NewStream
	Received  func(m Message)                        // a message is complete
	Closed    func(err error)                        // the connection broke, or an attempt to connect failed
}

// A HungUpError means that the peer closed the connection during the handshake.
type HungUpError struct{ Err error }

func (e *HungUpError) Error() string {
	return "the other side closes the connection in the handshake: " + e.Err.Error()
}

// Unwrap returns the error of the network.
func (e *HungUpError) Unwrap() error { return e.Err }

// A Connection keeps a connection to an endpoint open until Close. After a failure it dials again,
// after a pause that doubles up to redialMax.
type Connection struct {
	owner   Owner
	kind    Kind
	limits  Limits
	network string
	address string
	resolve Resolve

	stream       *Stream
	conn         net.Conn // nil while not connected
	writing      bool     // bytes were taken from the stream, and are not written yet
	topics       map[string]bool
	ticket       []byte // the first message of the next connection
	needsTicket  bool   // each connection needs a ticket
	awaitsTicket bool   // the next attempt waits for a ticket
	ticketSet    chan struct{}
	receivedAt   time.Time   // when bytes were last received
	messageAt    time.Time   // when a message, or a part of one, was last received
	bucket       tokenBucket // of commands
	pingedAt     time.Time
	connectedAt  time.Time
	wakeWriter   chan struct{}
	cancel       context.CancelFunc
	abort        context.CancelFunc // aborts the connection, the attempt, or the pause after it
	done         chan struct{}
	receiver
}

// A Resolve returns at least one address of an endpoint, or an error.
type Resolve func(ctx context.Context) (addresses []string, err error)

// Dial starts to connect to an endpoint (network "tcp" or "unix") and returns at once. If resolve
// is nil, package net looks up the host.
func Dial(network, address string, resolve Resolve, kind Kind, limits Limits, owner Owner) *Connection {
	ctx, cancel := context.WithCancel(context.Background())
	c := &Connection{
		owner: owner, kind: kind, limits: limits, network: network, address: address, resolve: resolve,
		topics: map[string]bool{}, wakeWriter: make(chan struct{}, 1), ticketSet: make(chan struct{}, 1), cancel: cancel, abort: func() {},
		done: make(chan struct{}),
	}
	go c.run(ctx)
	return c
}

// Open reports whether the handshake is complete, so that messages can be sent.
func (c *Connection) Open() bool { return c.conn != nil && c.stream.Open() }

// Send queues a message of one frame. It drops the message and returns false if the connection is
// not open, or the peer has not read the messages before.
func (c *Connection) Send(frame []byte) bool {
	if !c.Open() || len(c.stream.Outgoing)+len(frame) > outgoingMax {
		return false
	}
	c.stream.Send(frame)
	c.flush()
	return true
}

// Subscribe subscribes to a topic, or unsubscribes, on this connection and later ones.
func (c *Connection) Subscribe(topic string, on bool) {
	c.topics[topic] = on
	if c.conn != nil {
		c.stream.Subscribe(topic, on)
		c.flush()
	}
}

// SetTicket sets the ticket that the next connection sends first. A ticket is valid for one connection, so
// each later connection waits for another call of SetTicket. After SetTicket(nil), connections need no ticket.
func (c *Connection) SetTicket(ticket []byte) {
	c.ticket, c.needsTicket = ticket, ticket != nil
	select {
	case c.ticketSet <- struct{}{}:
	default:
	}
}

// AwaitsTicket reports whether the connection waits for a ticket.
func (c *Connection) AwaitsTicket() bool { return c.awaitsTicket }

// Redial closes the current connection, which may be dead, and dials at once. Queued messages are lost.
func (c *Connection) Redial() { c.abort() }

// Tick must be called about ten times a second. It sends pings that are due, and closes a
// connection on which nothing has been received for too long. It also makes the reader read the part
// of a payload that has arrived.
func (c *Connection) Tick(now time.Time) {
	if c.conn == nil {
		return
	}
	isSilent := c.kind.Pings && (now.Sub(c.receivedAt) >= silenceMax || now.Sub(c.messageAt) >= pingsMax)
	if isSilent || !c.stream.Open() && now.Sub(c.connectedAt) >= openTimeout {
		_ = c.conn.Close()
		return
	}
	if c.kind.Pings && now.Sub(c.pingedAt) >= pingInterval {
		c.pingedAt = now
		c.stream.Ping(uint16(silenceMax / (100 * time.Millisecond)))
		c.flush()
	}
	c.readAvailable()
}

// Close closes the connection once queued bytes were sent, or after linger if they were not.
func (c *Connection) Close(linger time.Duration) {
	deadline := time.Now().Add(linger)
	for pause := 100 * time.Microsecond; c.unsent() && time.Now().Before(deadline); pause *= 2 {
		time.Sleep(pause)
	}
	c.cancel()
}

// Stop closes the connection at once.
func (c *Connection) Stop() { c.cancel() }

// Wait returns when the connection's goroutines have ended.
func (c *Connection) Wait() { <-c.done }

func (c *Connection) unsent() bool {
	c.owner.Lock.Lock()
	defer c.owner.Lock.Unlock()
	return c.Open() && (c.writing || len(c.stream.Outgoing) > 0)
}

func (c *Connection) flush() {
	select {
	case c.wakeWriter <- struct{}{}:
	default:
	}
}

// run dials and serves connections, one after another, until ctx ends.
func (c *Connection) run(ctx context.Context) {
	defer close(c.done)
	dialer := net.Dialer{Timeout: dialTimeout}
	for pause := redialMin; ctx.Err() == nil; {
		attempt := c.attempt(ctx)
		if !c.awaitTicket(attempt) {
			continue
		}
		conn, err := c.dial(attempt, &dialer)
		opened, gotMessage := false, false
		if err == nil {
			opened, gotMessage, err = c.serve(attempt, conn)
			var broken Error
			if !opened && !errors.As(err, &broken) {
				err = &HungUpError{err}
			}
		}
		if gotMessage { // a handshake is not enough: a peer may close each connection after it
			pause = redialMin
		}
		c.reportClosed(attempt, err)
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

// reportClosed calls Closed, unless this side has aborted the attempt.
func (c *Connection) reportClosed(attempt context.Context, err error) {
	c.owner.Lock.Lock()
	defer c.owner.Lock.Unlock()
	if attempt.Err() == nil {
		c.owner.Closed(err)
	}
}

// dial connects to the first address of the endpoint that accepts the connection.
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

// attempt returns the context of a new attempt, which abort cancels.
func (c *Connection) attempt(ctx context.Context) context.Context {
	c.owner.Lock.Lock()
	defer c.owner.Lock.Unlock()
	c.abort() // release the previous attempt's context
	ctx, c.abort = context.WithCancel(ctx)
	return ctx
}

// awaitTicket waits for a ticket if one is needed. It returns false if the attempt was aborted.
func (c *Connection) awaitTicket(attempt context.Context) bool {
	for {
		c.owner.Lock.Lock()
		c.awaitsTicket = c.needsTicket && c.ticket == nil
		barred := c.awaitsTicket
		c.owner.Lock.Unlock()
		if !barred {
			return true
		}
		select {
		case <-attempt.Done():
			return false
		case <-c.ticketSet:
		}
	}
}

// serve runs the protocol on conn until conn fails. opened is true if the handshake was completed,
// gotMessage if a message was received.
func (c *Connection) serve(ctx context.Context, conn net.Conn) (opened, gotMessage bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c.begin(conn)
	var goroutines sync.WaitGroup
	goroutines.Add(2)
	go func() { defer goroutines.Done(); c.write(ctx, conn) }()
	go func() { defer goroutines.Done(); <-ctx.Done(); _ = conn.Close() }()
	err = c.read(conn)
	opened, gotMessage = c.finish()
	cancel()
	goroutines.Wait()
	return opened, gotMessage, err
}

func (c *Connection) begin(conn net.Conn) {
	c.owner.Lock.Lock()
	defer c.owner.Lock.Unlock()
	c.stream = NewStream(c.kind, c.limits, c.owner.BufferFor)
	c.stream.FirstMessage, c.ticket = c.ticket, nil
	for topic, on := range c.topics {
		c.stream.Subscribe(topic, on)
	}
	now := time.Now()
	c.writing = false
	c.conn, c.receivedAt, c.messageAt, c.pingedAt, c.connectedAt, c.bucket = conn, now, now, now, now, newTokenBucket(now)
	c.flush()
}

func (c *Connection) finish() (opened, gotMessage bool) {
	c.owner.Lock.Lock()
	defer c.owner.Lock.Unlock()
	opened, gotMessage = c.stream.Open(), c.stream.Messages > 0
	c.stream.Close()
	c.conn, c.receiver = nil, receiver{}
	return opened, gotMessage
}

// write sends queued bytes until ctx ends.
func (c *Connection) write(ctx context.Context, conn net.Conn) {
	var spare []byte
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.wakeWriter:
		}
		c.owner.Lock.Lock()
		out := c.stream.Outgoing
		c.stream.Outgoing, c.writing = spare[:0], true
		c.owner.Lock.Unlock()
		_ = conn.SetWriteDeadline(time.Now().Add(silenceMax))
		if _, err := conn.Write(out); err != nil {
			_ = conn.Close() // then read returns, too
			return
		}
		spare = out
		c.owner.Lock.Lock()
		c.writing = false
		c.owner.Lock.Unlock()
	}
}

// received processes n bytes that were read into the stream's Room.
func (c *Connection) received(n int) error {
	c.receivedAt = time.Now()
	commands, messages := c.stream.Commands, c.stream.Messages
	err := c.deliver(n)
	for err == nil && c.stream.Pending {
		err = c.deliver(0)
	}
	if c.stream.Messages > messages {
		c.messageAt = c.receivedAt
	}
	if err == nil {
		err = c.checkCommands(c.stream.Commands - commands)
	}
	if len(c.stream.Outgoing) > 0 {
		c.flush()
	}
	if err == nil && len(c.stream.Outgoing) > 2*outgoingMax {
		err = Error("the other side does not read")
	}
	return err
}

// checkCommands returns an error if the peer exceeds the rate limit by sending this many further
// commands, or does not read the answers.
func (c *Connection) checkCommands(commands int) error {
	switch {
	case commands == 0:
	case len(c.stream.Outgoing) > pongsMax:
		return Error(fmt.Sprintf("the other side has not read %d bytes, but requests more with PINGs", len(c.stream.Outgoing)))
	case !c.bucket.take(commands, c.receivedAt):
		return Error(fmt.Sprintf("more than %d commands at once, or %d a second: a publisher sends a PING every few seconds",
			commandsBurst, commandsPerSecond))
	}
	return nil
}

// deliver processes n more bytes, and passes the messages that are now complete to the owner.
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
