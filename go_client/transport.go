package weightbus

import (
	"context"
	"sync"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
	"github.com/weightbus/weightbus/go_client/internal/zmtp"
)

const linger = 200 * time.Millisecond // time to send queued messages, such as bye, at closing

// A transport carries frames between a worker and its publisher. The implementation below uses package
// zmtp; another implementation (such as libzmq by cgo) would have these methods and call the methods
// of a transportHandler. All methods but close are called with its lock held, and must not block.
type transport interface {
	// send sends a message to the publisher. It drops the message while not connected.
	send(header []byte)
	// listen connects to a data endpoint, and closes the connection to any other. If ticket is not
	// empty, the next connection sends it first, and each later connection needs another ticket.
	listen(data endpoint, ticket string)
	// wantsTicket reports whether the data connection waits for a ticket.
	wantsTicket() bool
	// redial reconnects both channels at once; messages queued on the old connections are lost.
	redial()
	// leave closes both channels. The control channel first sends queued messages for a short time.
	// Until dial is called, sent messages are dropped.
	leave()
	// dial connects to a control address. The caller has called leave before.
	dial(control site)
	// probe finds out in the background whether a publisher answers at an address, and calls probed.
	probe(control site)
	// subscribe subscribes to a topic, or unsubscribes if on is false. A repeated call has no effect.
	subscribe(topic string, on bool)
	// tick must be called ten times a second. It reports whether the control channel is connected.
	tick(now time.Time) bool
	// close sends queued messages for a short time, and returns when all goroutines have ended.
	close()
}

// A transportHandler handles the events of a transport. The transport calls all methods but probed
// with the lock held.
type transportHandler interface {
	sync.Locker
	// connected is called for each new control connection.
	connected()
	// leaseFor returns the memory to receive a payload into, given its header; nil to discard the payload.
	leaseFor(header []byte, size int) *wbp.Lease
	// received processes a control message: header, payload.
	received(frames [][]byte, lease *wbp.Lease)
	// published processes a published message: topic, header, payload.
	published(frames [][]byte, lease *wbp.Lease)
	// broke is called when the data connection broke, or an attempt to connect it failed.
	broke(err error)
	// disconnected is called when the control connection broke, or an attempt to connect it failed.
	disconnected(err error)
	// probed is called, without the lock, when a probe has ended.
	probed(answers bool)
}

var limits = zmtp.Limits{Header: wbp.HeaderBytesMax, Payload: wbp.MessageBytesMax}

// sockets is the transport with a DEALER socket and, once the data endpoint is known, a SUB socket.
type sockets struct {
	handler transportHandler
	control *zmtp.Connection // nil between leave and dial
	data    *zmtp.Connection
	ending  sync.WaitGroup // goroutines that end previous connections, and probes
	dataEnd endpoint
	topics  map[string]bool
	probing context.Context // ends with close, and ends all probes
	cancel  context.CancelFunc
}

// newSockets starts to connect to the publisher.
func newSockets(control site, handler transportHandler) *sockets {
	s := &sockets{handler: handler, topics: map[string]bool{}}
	s.probing, s.cancel = context.WithCancel(context.Background())
	s.dial(control)
	return s
}

func (s *sockets) dial(control site) {
	dealer := zmtp.Dealer
	dealer.Keys = control.keys // K1
	bufferFor := s.bufferFunc(0)
	var current *zmtp.Connection
	ifCurrent := func(do func()) {
		if s.control == current { // otherwise the worker has left this address
			do()
		}
	}
	current = zmtp.Dial(control.control.network, control.control.address, nil, dealer, limits, zmtp.Owner{
		Lock:   s.handler,
		Opened: func() { ifCurrent(s.handler.connected) },
		BufferFor: func(frames [][]byte, size int) zmtp.Buffer {
			if s.control != current {
				return nil
			}
			return bufferFor(frames, size)
		},
		Received: func(m zmtp.Message) {
			if lease := leaseOf(m); s.control == current {
				s.handler.received(m.Frames, lease)
			} else if lease != nil {
				lease.Cancel()
			}
		},
		Closed: func(err error) { ifCurrent(func() { s.handler.disconnected(err) }) },
	})
	s.control = current
}

func (s *sockets) leave() {
	control := s.control
	s.control = nil
	s.ending.Add(1)
	go func() { defer s.ending.Done(); control.Close(linger); control.Wait() }()
	if s.data != nil {
		s.stop(s.data)
	}
	s.data, s.dataEnd = nil, endpoint{}
}

func (s *sockets) probe(control site) {
	s.ending.Add(1)
	go func() {
		defer s.ending.Done()
		answers := zmtp.Answers(s.probing, control.control.network, control.control.address)
		s.handler.probed(answers)
	}()
}

func (s *sockets) listen(data endpoint, ticket string) {
	if data != s.dataEnd {
		s.dialData(data)
	}
	var first []byte
	if ticket != "" {
		first = append([]byte{3}, ticket...) // K7
	}
	s.data.SetTicket(first)
}

func (s *sockets) wantsTicket() bool { return s.data != nil && s.data.AwaitsTicket() }

// dialData starts to connect to a data endpoint. The caller holds the lock until it has set the
// connection's ticket, and the connection waits for the lock.
func (s *sockets) dialData(data endpoint) {
	if s.data != nil {
		s.stop(s.data)
	}
	s.dataEnd = data
	var current *zmtp.Connection
	current = zmtp.Dial(data.network, data.address, data.resolver(systemLookUp), zmtp.Sub, limits, zmtp.Owner{
		Lock:      s.handler,
		Opened:    func() {},
		BufferFor: s.bufferFunc(1),
		Received: func(m zmtp.Message) {
			if s.data == current { // otherwise the message is from a previous endpoint
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

// bufferFunc returns the function by which a connection gets the memory for a payload. header is the
// index of the header's frame.
func (s *sockets) bufferFunc(header int) func(frames [][]byte, size int) zmtp.Buffer {
	return func(frames [][]byte, size int) zmtp.Buffer {
		if lease := s.handler.leaseFor(frames[header], size); lease != nil {
			return lease
		}
		return nil // nil, not an interface that holds a nil pointer
	}
}

func leaseOf(m zmtp.Message) *wbp.Lease {
	lease, _ := m.Buffer.(*wbp.Lease)
	return lease
}

func (s *sockets) send(header []byte) {
	if s.control != nil {
		s.control.Send(header)
	}
}

func (s *sockets) subscribe(topic string, on bool) {
	s.topics[topic] = on
	if s.data != nil {
		s.data.Subscribe(topic, on)
	}
}

func (s *sockets) tick(now time.Time) bool {
	if s.data != nil {
		s.data.Tick(now)
	}
	if s.control == nil {
		return false
	}
	s.control.Tick(now)
	return s.control.Open()
}

func (s *sockets) close() {
	s.cancel()
	s.handler.Lock()
	if s.control != nil {
		s.leave()
	}
	s.handler.Unlock()
	s.ending.Wait()
}

// stop stops a data connection in the background.
func (s *sockets) stop(c *zmtp.Connection) {
	c.Stop()
	s.ending.Add(1)
	go func() { defer s.ending.Done(); c.Wait() }()
}
