//go:build !portable

package zmtp

import (
	"errors"
	"net"
	"syscall"
)

const lowWater = 1 << 18 // bytes of a payload that must be here before we are woken to take them

// A receiver is how the kernel wakes us.
type receiver struct {
	raw    syscall.RawConn
	expect int // SO_RCVLOWAT as it is set
}

// read receives until the connection breaks. It waits without the owner's lock, and receives into
// memory that belongs to others with it: so nobody can take that memory away in between.
func (c *Connection) read(conn net.Conn) error {
	raw, err := conn.(syscall.Conn).SyscallConn()
	if err != nil {
		return err
	}
	c.owner.Lock.Lock()
	c.receiver = receiver{raw, 1}
	c.owner.Lock.Unlock()
	for {
		var failed error
		err := raw.Read(func(fd uintptr) bool {
			c.owner.Lock.Lock()
			defer c.owner.Lock.Unlock()
			var again bool
			again, failed = c.receive(int(fd))
			return !again
		})
		if failed != nil {
			return failed
		}
		if err != nil {
			return err
		}
	}
}

var errClosed = errors.New("the other side has closed the connection")

// receive takes what is there, once; wait says that there is nothing.
func (c *Connection) receive(fd int) (wait bool, err error) {
	room := c.stream.Room()
	if len(room) > receiveBytes {
		room = room[:receiveBytes]
	}
	n, err := syscall.Read(fd, room)
	switch {
	case err == syscall.EAGAIN:
		c.expectBytes(fd, c.stream.Missing())
		return true, nil
	case err == syscall.EINTR:
		return false, nil
	case err != nil:
		return false, err
	case n == 0:
		return false, errClosed
	}
	return false, c.received(n)
}

// expectBytes has the kernel wake us when so many bytes are here, rather than for each packet.
func (c *Connection) expectBytes(fd, n int) {
	if n > lowWater {
		n = lowWater
	}
	if n != c.expect && c.network == "tcp" {
		c.expect = n
		_ = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_RCVLOWAT, n)
	}
}

// takeWhatIsHere has the reader take what there is of a payload, or else the next packet of it: over a
// slow link a place that is filled bit by bit tells its owner that more will come.
func (c *Connection) takeWhatIsHere() {
	if c.expect > 1 { // else it takes everything at once anyway
		_ = c.raw.Control(func(fd uintptr) { c.expectBytes(int(fd), 1) }) // and this wakes it
	}
}
