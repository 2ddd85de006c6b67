package weightbus

import (
	"context"
	"errors"
	"fmt"
	"net"
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
		"a negative size":   {"tcp://a:1", func(o *Options) { o.Models["m"] = Tensors{"w": F32(nil, -1)} }, "not a valid shape"},
		"an unknown dtype":  {"tcp://a:1", func(o *Options) { o.Models["m"] = Tensors{"w": Bits("F33", nil, 1)} }, "not a valid dtype"},
		"an empty tensor":   {"tcp://a:1", func(o *Options) { o.Models["m"] = Tensors{"w": {}} }, "empty Tensor"},
		"no deadline":       {"tcp://a:1", func(o *Options) { o.ApplyTimeout = -1 }, "above zero"},
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
	for _, c := range []struct {
		data, control, want, within string
		anyHost                     bool
	}{
		{data: "tcp://*:7", control: "tcp://host:5", want: "host:7"},
		{data: "tcp://0.0.0.0:7", control: "tcp://host:5", want: "host:7"},
		{data: "tcp://[::]:7", control: "tcp://[::1]:5", want: "[::1]:7"},
		{data: "tcp://Host:7", control: "tcp://host:5", want: "Host:7"},
		{data: "tcp://other:7", control: "tcp://host:5", want: "other:7", within: "host"},
		{data: "tcp://10.0.0.5:7", control: "tcp://host:5", want: "10.0.0.5:7", within: "host"},
		{data: "tcp://host:7", control: "tcp://10.0.0.5:5", want: "host:7", within: "10.0.0.5"},
		{data: "tcp://[::ffff:10.0.0.5]:7", control: "tcp://10.0.0.5:5", want: "[::ffff:10.0.0.5]:7"},
		{data: "tcp://127.0.0.1:7", control: "tcp://localhost:5", want: "127.0.0.1:7"},
		{data: "tcp://[::1]:7", control: "tcp://127.0.0.2:5", want: "[::1]:7"},
		{data: "tcp://10.0.0.6:7", control: "tcp://10.0.0.5:5"},
		{data: "tcp://10.0.0.6:7", control: "tcp://10.0.0.5:5", anyHost: true, want: "10.0.0.6:7"},
		{data: "tcp://127.0.0.1:7", control: "tcp://10.0.0.5:5"},
		{data: "tcp://other:7", control: "ipc:///a"},
		{data: "tcp://other:7", control: "ipc:///a", anyHost: true, want: "other:7"},
		{data: "ipc:///a/b", control: "tcp://host:5"},
		{data: "ipc:///a/c.data", control: "ipc:///a/c", want: "/a/c.data"},
		{data: "ipc:///a/b", control: "ipc:///a/c"},
		{data: "ipc:///a/c/../b", control: "ipc:///a/c"},
		{data: "ipc:///a/b", control: "ipc:///a/c", anyHost: true, want: "/a/b"},
		{data: "tcp://*:7", control: "ipc:///a", anyHost: true}, {data: "tcp://*:0", control: "tcp://host:5"},
		{data: "nonsense", control: "tcp://host:5", anyHost: true},
	} {
		got, err := dataEndpoint(c.data, c.control, c.anyHost)
		if got.address != c.want || (err == nil) != (c.want != "") || got.within != c.within {
			t.Errorf("%v: %v %v", c, got, err)
		}
	}
}

// Whether two names belong to one host is known only after a lookup.
func TestNamesOfOneHost(t *testing.T) {
	hosts := map[string][]net.IP{"trainer": {net.IPv4(10, 0, 0, 5), net.IPv6loopback}, "elsewhere": {net.IPv4(10, 0, 0, 6)},
		"alias": {net.IPv4(10, 9, 9, 9), net.IPv4(10, 0, 0, 5)}, "10.0.0.5": {net.IPv4(10, 0, 0, 5)}}
	find := func(_ context.Context, host string) ([]net.IP, error) {
		if found := hosts[host]; found != nil {
			return found, nil
		}
		return nil, errors.New("there is no " + host)
	}
	for _, c := range []struct{ host, within, want, says string }{
		{"alias", "trainer", "[10.0.0.5:7]", ""}, {"10.0.0.5", "alias", "[10.0.0.5:7]", ""},
		{"elsewhere", "trainer", "[]", "Options.AnyDataHost"}, {"nobody", "trainer", "[]", "no nobody"},
		{"trainer", "nobody", "[]", "no nobody"},
	} {
		end := endpoint{network: "tcp", address: c.host + ":7", within: c.within}
		got, err := end.resolver(find)(context.Background())
		if fmt.Sprint(got) != c.want || (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v: %v %v", c, got, err)
		}
	}
	if (endpoint{network: "tcp", address: "host:7"}).resolver(find) != nil {
		t.Error("it is looked up though nothing is to be compared")
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
	err = &RefusedError{Address: "tcp://a:1", Name: "w", Code: CodeNameTaken, Text: "another lives"}
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
	if err := g.lockRead(context.Background()); err != nil { // the writer that timed out blocks no reader
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

// Readers never see a partial write under the guard.
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
