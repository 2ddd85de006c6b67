package weightbus

import (
	"sync"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
	"github.com/weightbus/weightbus/go_client/internal/zmtp"
)

const linger = 200 * time.Millisecond // what is on its way when we close (a goodbye) gets this

// A transport carries frames between a worker and its publisher. The one below speaks ZMTP by
// itself; another one (libzmq by cgo, say) has these methods and makes the calls of a carried. All but close are called with the carried's lock held, and must not wait.
type transport interface {
	// send sends a message to the publisher; it is lost while nobody is there.
	send(header []byte)
	// listen takes published messages from this endpoint, in place of any before. With a ticket, which the
	// next connection shows first, each needs one.
	listen(data endpoint, ticket string)
	// wantsTicket tells whether there is no data connection for want of one.
	wantsTicket() bool
	// redial makes both connections anew, and at once; what waits to be sent on the old ones is lost.
	redial()
	// subscribe asks for a topic, or no longer; asking twice is asking once.
	subscribe(topic string, on bool)
	// tick is called ten times a second; it tells whether messages can be sent.
	tick(now time.Time) bool
	// close gives what is to be sent a moment, and returns when nothing is left.
	close()
}

// A carried is who a transport carries for. All of it is to be called with its lock held.
type carried interface {
	sync.Locker
	// connected says that there is a new connection to the publisher.
	connected()
	// place says where a payload goes of which the header is here; nil: nowhere, it is then empty.
	place(header []byte, size int) *wbp.Lease
	// received takes a control message: header, payload.
	received(frames [][]byte, lease *wbp.Lease)
	// published takes a published message: topic, header, payload.
	published(frames [][]byte, lease *wbp.Lease)
	// broke takes note of a data connection that broke, or could not be made. Without the lock.
	broke(err error)
	// turnedAway does of one to the publisher.
	turnedAway(err error)
}

var limits = zmtp.Limits{Header: wbp.HeaderBytesMax, Payload: wbp.MessageBytesMax}

// sockets are a DEALER and, once the publisher has said where, a SUB.
type sockets struct {
	carried carried
	control *zmtp.Connection
	data    *zmtp.Connection
	ending  sync.WaitGroup // data connections of before
	dataEnd endpoint
	topics  map[string]bool
}

// newSockets begins to reach for the publisher; without keys if they are nil.
func newSockets(control endpoint, keys *zmtp.Keys, c carried) *sockets {
	s := &sockets{carried: c, topics: map[string]bool{}}
	dealer := zmtp.Dealer
	dealer.Keys = keys // K1
	s.control = zmtp.Dial(control.network, control.address, nil, dealer, limits, zmtp.Owner{
		Lock:     c,
		Opened:   c.connected,
		Place:    s.placing(0),
		Received: func(m zmtp.Message) { c.received(m.Frames, leaseOf(m)) },
		Closed:   c.turnedAway,
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

// dial begins to reach for published messages. The lock is held, so that nothing is dialled before it is
// known what there is to show.
func (s *sockets) dial(data endpoint) {
	if s.data != nil {
		s.end(s.data)
	}
	s.dataEnd = data
	var current *zmtp.Connection
	current = zmtp.Dial(data.network, data.address, data.resolve(systemLookUp), zmtp.Sub, limits, zmtp.Owner{
		Lock:   s.carried,
		Opened: func() {},
		Place:  s.placing(1),
		Received: func(m zmtp.Message) {
			if s.data == current { // else a publisher of before
				s.carried.published(m.Frames, leaseOf(m))
			}
		},
		Closed: s.carried.broke,
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

// placing asks for the place of a payload; the header is the frame of this index.
func (s *sockets) placing(header int) func(frames [][]byte, size int) zmtp.Place {
	return func(frames [][]byte, size int) zmtp.Place {
		if lease := s.carried.place(frames[header], size); lease != nil {
			return lease
		}
		return nil // and no interface that holds a nil
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
	s.carried.Lock()
	if s.data != nil {
		s.end(s.data)
	}
	s.carried.Unlock()
	s.control.Wait()
	s.ending.Wait()
}

// end stops a data connection in the background.
func (s *sockets) end(c *zmtp.Connection) {
	c.Stop()
	s.ending.Add(1)
	go func() { defer s.ending.Done(); c.Wait() }()
}
