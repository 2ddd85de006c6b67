package zmtp

import (
	"context"
	"net"
	"time"
)

const probeTimeout = time.Second // for a whole probe

// signature is the beginning of every ZMTP greeting.
var signature = []byte{0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f}

// Answers reports whether a ZMTP peer answers at an endpoint. It waits at most probeTimeout. It sends
// the beginning of a greeting, and checks only the first byte of the answer.
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
