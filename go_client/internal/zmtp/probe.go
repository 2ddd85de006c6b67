package zmtp

import (
	"context"
	"net"
	"time"
)

const probeTimeout = time.Second // for a probe as a whole

// signature is how the greeting of every ZMTP peer begins.
var signature = []byte{0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f}

// Answers reports whether a ZMTP peer greets at an endpoint. It waits a second at most, and
// exchanges nothing but the beginning of the greeting.
func Answers(ctx context.Context, network, address string) bool {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return false
	}
	ended := make(chan struct{})
	go func() { defer close(ended); <-ctx.Done(); _ = conn.Close() }()
	defer func() { cancel(); <-ended }()
	first := make([]byte, 1)
	if _, err := conn.Write(signature); err != nil {
		return false
	}
	n, _ := conn.Read(first)
	return n == 1 && first[0] == signature[0]
}
