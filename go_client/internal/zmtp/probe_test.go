package zmtp

import (
	"context"
	"net"
	"testing"
	"time"
)

// A peer answers if it greets as ZMTP does. A listener that says nothing, or something else, does not.
func TestAProbeAsksForTheGreeting(t *testing.T) {
	for says, want := range map[string]bool{"\xff": true, "HTTP/1.1 400": false, "": false} {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		heard := make(chan []byte, 1)
		go func() {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
			_, _ = conn.Write([]byte(says))
			room, read := make([]byte, 64), 0
			for { // until the probe hangs up
				n, err := conn.Read(room[read:])
				if read += n; err != nil {
					heard <- room[:read]
					return
				}
			}
		}()
		if got := Answers(context.Background(), "tcp", listener.Addr().String()); got != want {
			t.Errorf("%q: %v", says, got)
		}
		if all := await(t, "the end", heard); string(all) != "\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f" {
			t.Errorf("it says %q", all)
		}
		listener.Close()
		if Answers(context.Background(), "tcp", listener.Addr().String()) {
			t.Error("nothing listens there")
		}
	}
}

func TestAProbeEndsWithItsContext(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan bool, 1)
	go func() { ended <- Answers(ctx, "tcp", listener.Addr().String()) }()
	conn, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	begun := time.Now()
	cancel()
	if await(t, "the end", ended) || time.Since(begun) >= probeTimeout {
		t.Fatal("it waits for its own deadline")
	}
}
