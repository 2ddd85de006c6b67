//go:build !linux || portable

package zmtp

import "net"

// A receiver is woken for whatever is here.
type receiver struct{}

// read receives until the connection breaks. It waits without the owner's lock, and so receives into
// memory of its own: what the stream has room for may be taken away meanwhile.
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

// take gives the stream what has been received.
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

// takeWhatIsHere has nothing to do: it was taken as it came.
func (c *Connection) takeWhatIsHere() {}
