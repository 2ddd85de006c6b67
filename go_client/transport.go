package weightbus

import (
	"sync"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
	"github.com/weightbus/weightbus/go_client/internal/zmtp"
)

const linger = 200 * time.Millisecond // time to send queued messages, such as bye, at closing

// A transport carries frames between a worker and its publisher. The implementation below uses
// package zmtp; another implementation (such as libzmq by cgo) would have these methods and call
// the methods of a transportHandler. All methods but close are called with its lock held, and must
// not block.
type transport interface {
	// send sends a message to the publisher. It drops the message while not connected.
	send(header []byte)
	// listen connects to a data endpoint instead of any other. If ticket is not empty, the next
	// connection sends it first, and each later connection needs another ticket.
	listen(data endpoint, ticket string)
	// wantsTicket reports whether the data connection waits for a ticket.
	wantsTicket() bool
	// redial reconnects both channels at once; messages queued on the old connections are lost.
	redial()
	// subscribe subscribes to a topic, or unsubscribes if on is false. A repeated call has no
	// effect.
	subscribe(topic string, on bool)
	// tick is called ten times a second. It reports whether messages can be sent.
	tick(now time.Time) bool
	// close sends queued messages for a short time, and returns when all goroutines have ended.
	close()
}

// A transportHandler handles the events of a transport, which calls the methods with the lock held,
// except as noted.
type transportHandler interface {
	sync.Locker
	// connected is called for each new control connection.
	connected()
	// place returns the memory to receive a payload into, given its header; nil to discard the
	// payload.
	place(header []byte, size int) *wbp.Lease
	// received processes a control message: header, payload.
	received(frames [][]byte, lease *wbp.Lease)
	// published processes a published message: topic, header, payload.
	published(frames [][]byte, lease *wbp.Lease)
	// broke is called, without the lock, when the data connection broke or an attempt failed.
	broke(err error)
	// disconnected is called, without the lock, when the control connection or an attempt failed.
	disconnected(err error)
}

var limits = zmtp.Limits{Header: wbp.HeaderBytesMax, Payload: wbp.MessageBytesMax}

// sockets is a transport with a DEALER socket and, once the data endpoint is known, a SUB socket.
type sockets struct {
	handler transportHandler
	control *zmtp.Connection
	data    *zmtp.Connection
	ending  sync.WaitGroup // previous data connections
	dataEnd endpoint
	topics  map[string]bool
}

// newSockets starts to connect to the publisher; keys may be nil.
func newSockets(control endpoint, keys *zmtp.Keys, c transportHandler) *sockets {
	s := &sockets{handler: c, topics: map[string]bool{}}
	dealer := zmtp.Dealer
	dealer.Keys = keys // K1
	s.control = zmtp.Dial(control.network, control.address, nil, dealer, limits, zmtp.Owner{
		Lock:     c,
		Opened:   c.connected,
		Place:    s.placing(0),
		Received: func(m zmtp.Message) { c.received(m.Frames, leaseOf(m)) },
		Closed:   c.disconnected,
	})
	return s
}

func (s *sockets) listen(data endpoint, ticket string) {
	if data != s.dataEnd {
		s.dial(data)
	}
	var first []byte
	if ticket != "" {
		first = append([]byte{3}, ticket...) // K7
	}
	s.data.Show(first)
}

func (s *sockets) wantsTicket() bool { return s.data != nil && s.data.Barred() }

// dial starts to connect to a data endpoint. The lock is held, so the connection waits until listen
// has set its ticket.
func (s *sockets) dial(data endpoint) {
	if s.data != nil {
		s.end(s.data)
	}
	s.dataEnd = data
	var current *zmtp.Connection
	current = zmtp.Dial(data.network, data.address, data.resolve(systemLookUp), zmtp.Sub, limits, zmtp.Owner{
		Lock:   s.handler,
		Opened: func() {},
		Place:  s.placing(1),
		Received: func(m zmtp.Message) {
			if s.data == current { // else the message is from a previous endpoint
				s.handler.published(m.Frames, leaseOf(m))
			}
		},
		Closed: s.handler.broke,
	})
	s.data = current
	for topic, on := range s.topics {
		current.Subscribe(topic, on)
	}
}

func (s *sockets) redial() {
	s.control.Redial()
	if s.data != nil {
		s.data.Redial()
	}
}

// placing returns the function by which a connection gets the Place of a payload. header is the
// index of the header's frame.
func (s *sockets) placing(header int) func(frames [][]byte, size int) zmtp.Place {
	return func(frames [][]byte, size int) zmtp.Place {
		if lease := s.handler.place(frames[header], size); lease != nil {
			return lease
		}
		return nil // nil, not an interface that holds a nil pointer
	}
}

func leaseOf(m zmtp.Message) *wbp.Lease {
	lease, _ := m.Place.(*wbp.Lease)
	return lease
}

func (s *sockets) send(header []byte) { s.control.Send(header) }

func (s *sockets) subscribe(topic string, on bool) {
	s.topics[topic] = on
	if s.data != nil {
		s.data.Subscribe(topic, on)
	}
}

func (s *sockets) tick(now time.Time) bool {
	s.control.Tick(now)
	if s.data != nil {
		s.data.Tick(now)
	}
	return s.control.Open()
}

func (s *sockets) close() {
	s.control.Close(linger)
	s.handler.Lock()
	if s.data != nil {
		s.end(s.data)
	}
	s.handler.Unlock()
	s.control.Wait()
	s.ending.Wait()
}

// end stops a data connection in the background.
func (s *sockets) end(c *zmtp.Connection) {
	c.Stop()
	s.ending.Add(1)
	go func() { defer s.ending.Done(); c.Wait() }()
}
