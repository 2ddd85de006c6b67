//go:build !portable

package zmtp

import (
	"errors"
	"net"
	"syscall"
)

const lowWaterMax = 1 << 18 // largest number of bytes to wait for before the kernel wakes the reader

// A receiver controls when the kernel wakes the reader.
type receiver struct {
	raw    syscall.RawConn
	expect int // the current SO_RCVLOWAT
}

// read receives until the connection breaks. It waits without the owner's lock, but holds the lock
// while it reads into a payload's memory, so that the memory's lease cannot end during the read.
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
			var wait bool
			wait, failed = c.receive(int(fd))
			return !wait
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

// receive reads available bytes once; wait is true if no bytes are available.
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

// expectBytes makes the kernel wake the reader once n bytes are available (at most lowWaterMax), not
// for each packet.
func (c *Connection) expectBytes(fd, n int) {
	if n > lowWaterMax {
		n = lowWaterMax
	}
	if n != c.expect && c.network == "tcp" {
		c.expect = n
		_ = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_RCVLOWAT, n)
	}
}

// readAvailable makes the reader read what has arrived of a payload, or else the payload's next packet,
// so that the lease shows the progress of a payload on a slow link.
func (c *Connection) readAvailable() {
	if c.expect > 1 { // otherwise the reader is woken for each packet anyway
		_ = c.raw.Control(func(fd uintptr) { c.expectBytes(int(fd), 1) }) // this wakes the reader
	}
}
