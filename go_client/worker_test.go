package weightbus

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

func TestOptionsThatMakeNoSense(t *testing.T) {
	good := func() Options { return Options{Models: map[string]Tensors{"m": nil}} }
	for name, c := range map[string]struct {
		address string
		change  func(o *Options)
		says    string
	}{
		"no scheme":         {"localhost:5555", nil, "tcp://HOST:PORT"},
		"no port":           {"tcp://localhost", nil, "tcp://HOST:PORT"},
		"port 0":            {"tcp://localhost:0", nil, "1 to 65535"},
		"a large port":      {"tcp://localhost:65536", nil, "1 to 65535"},
		"a long path":       {"ipc:///" + strings.Repeat("x", 120), nil, "107 bytes"},
		"no models":         {"tcp://a:1", func(o *Options) { o.Models = nil }, "0 models"},
		"a model's name":    {"tcp://a:1", func(o *Options) { o.Models["a/b"] = nil }, `model "a/b"`},
		"a worker's name":   {"tcp://a:1", func(o *Options) { o.Name = "a b" }, `worker "a b"`},
		"too little memory": {"tcp://a:1", func(o *Options) { o.Models["m"] = Tensors{"w": F32(make([]float32, 11), 4, 3)} }, "F32 [4, 3] needs 12 elements, the slice has 11"},
		"a negative size":   {"tcp://a:1", func(o *Options) { o.Models["m"] = Tensors{"w": F32(nil, -1)} }, "no shape"},
		"an unknown dtype":  {"tcp://a:1", func(o *Options) { o.Models["m"] = Tensors{"w": Bits("F33", nil, 1)} }, "no dtype"},
		"an empty tensor":   {"tcp://a:1", func(o *Options) { o.Models["m"] = Tensors{"w": {}} }, "empty Tensor"},
		"no deadline":       {"tcp://a:1", func(o *Options) { o.ApplyTimeout = -1 }, "without a deadline"},
		"a long deadline":   {"tcp://a:1", func(o *Options) { o.ApplyTimeout = 25 * time.Hour }, "at most 24h"},
		"a short silence":   {"tcp://a:1", func(o *Options) { o.Ping, o.LostAfter = time.Second, time.Second }, "two chances"},
	} {
		options := good()
		if c.change != nil {
			c.change(&options)
		}
		_, err := New(c.address, options)
		var wrong OptionError
		if !errors.As(err, &wrong) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDataEndpoints(t *testing.T) {
	for _, c := range []struct{ data, control, want string }{
		{"tcp://*:7", "tcp://host:5", "host:7"}, {"tcp://0.0.0.0:7", "tcp://host:5", "host:7"},
		{"tcp://[::]:7", "tcp://[::1]:5", "[::1]:7"}, {"tcp://other:7", "tcp://host:5", "other:7"},
		{"ipc:///a/b", "tcp://host:5", "/a/b"}, {"tcp://other:7", "ipc:///a", "other:7"},
		{"tcp://*:7", "ipc:///a", ""}, {"tcp://*:0", "tcp://host:5", ""}, {"nonsense", "tcp://host:5", ""},
	} {
		if got, err := dataEndpoint(c.data, c.control); got.address != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%v: %v %v", c, got, err)
		}
	}
}

func TestNobodyThere(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, "ipc:///nonexistent/socket", Options{Models: map[string]Tensors{"m": nil}}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	w, err := New("ipc:///nonexistent/socket", Options{Models: map[string]Tensors{"m": nil}})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Read(context.Background(), "m", func(View) {}); !errors.Is(err, ErrNoVersion) {
		t.Fatal(err)
	}
	if err := w.Read(context.Background(), "other", func(View) {}); err == nil {
		t.Fatal("there is no such model")
	}
	waiting := make(chan error)
	go func() { _, err := w.Receive(context.Background()); waiting <- err }()
	w.Close()
	w.Close()
	if err := <-waiting; !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
}

func TestErrorsHaveCodes(t *testing.T) {
	var err error = &ApplyError{"m", 1, 2, CodeTooLarge, "9 bytes"}
	if !errors.Is(err, CodeTooLarge) || errors.Is(err, CodeApply) {
		t.Fatal(err)
	}
	err = &RefusedError{"tcp://a:1", "w", CodeNameTaken, "another lives"}
	if !errors.Is(err, CodeNameTaken) || !strings.Contains(err.Error(), "another lives") {
		t.Fatal(err)
	}
}

func TestGuard(t *testing.T) {
	var g guard
	soon, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	for i := 0; i < 2; i++ {
		if err := g.lockRead(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	if err := g.lockWrite(soon); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a writer came in: %v", err)
	}
	if err := g.lockRead(context.Background()); err != nil { // the writer that gave up stands in nobody's way
		t.Fatal(err)
	}
	entered := make(chan error)
	go func() { entered <- g.lockWrite(context.Background()) }()
	for i := 0; i < 3; i++ {
		g.unlockRead()
	}
	if err := <-entered; err != nil {
		t.Fatal(err)
	}
	if err := g.lockRead(soon); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a reader came in: %v", err)
	}
	g.unlockWrite()
	if err := g.lockRead(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// What is written under the guard is never seen half done.
func TestGuardKeepsReadersAndWritersApart(t *testing.T) {
	var g guard
	words := make([]int, 64)
	done := make(chan struct{})
	for r := 0; r < 3; r++ {
		go func() {
			defer func() { done <- struct{}{} }()
			for i := 0; i < 500; i++ {
				if err := g.lockRead(context.Background()); err != nil {
					t.Error(err)
					return
				}
				for _, word := range words {
					if word != words[0] {
						t.Error("torn")
					}
				}
				g.unlockRead()
			}
		}()
	}
	for i := 0; i < 500; i++ {
		if err := g.lockWrite(context.Background()); err != nil {
			t.Fatal(err)
		}
		for j := range words {
			words[j] = i
		}
		g.unlockWrite()
	}
	for r := 0; r < 3; r++ {
		<-done
	}
}
