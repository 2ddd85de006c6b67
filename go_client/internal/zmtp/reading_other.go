//go:build !linux || portable

package zmtp

import "net"

// A receiver has no state on this system.
type receiver struct{}

// read receives until the connection breaks. It reads without the owner's lock into memory of its
// own, since the lease of the stream's Room may end during the read.
func (c *Connection) read(conn net.Conn) error {
	memory := make([]byte, receiveBytes)
	for {
		n, err := conn.Read(memory)
		if failed := c.take(memory[:n]); failed != nil {
			return failed
		}
		if err != nil {
			return err
		}
	}
}

// take copies received bytes into the stream.
func (c *Connection) take(bytes []byte) error {
	c.owner.Lock.Lock()
	defer c.owner.Lock.Unlock()
	for len(bytes) > 0 {
		n := copy(c.stream.Room(), bytes)
		bytes = bytes[n:]
		if err := c.received(n); err != nil {
			return err
		}
	}
	return nil
}

// readAvailable does nothing: all bytes were read already.
func (c *Connection) readAvailable() {}
