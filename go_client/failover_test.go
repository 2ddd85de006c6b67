package weightbus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
	"github.com/weightbus/weightbus/go_client/internal/zmtp"
)

var anyModel = Options{Models: map[string]Tensors{"m": nil}}

// after moves the clock on, and does the periodic work.
func (s *stage) after(d time.Duration) {
	s.loop.Lock()
	defer s.loop.Unlock()
	s.worker.loop.started = s.worker.loop.started.Add(-d)
	s.worker.loop.onTick(time.Now())
}

// fails has the connection to the present address fail.
func (s *stage) fails(err error) {
	s.loop.Lock()
	defer s.loop.Unlock()
	s.loop.disconnected(err)
}

// opens has the connection to the present address open.
func (s *stage) opens() {
	s.loop.Lock()
	defer s.loop.Unlock()
	s.connected = true
	s.loop.connected()
}

func (s *stage) went() string {
	s.loop.Lock()
	defer s.loop.Unlock()
	return fmt.Sprint(s.dialled)
}

func (s *stage) events() (kinds []EventKind) {
	for {
		select {
		case event := <-s.worker.Events():
			kinds = append(kinds, event.Kind)
		default:
			return kinds
		}
	}
}

var errReset = errors.New("reset")

// Chunks that came from one publisher are not fetched again from the next one of its epoch.
func TestAClosedConnectionIsChangedForTheNextAddressAtOnce(t *testing.T) {
	s := begin(t, "tcp://host:5,tcp://other:6", anyModel, nil)
	s.opens()
	s.welcome()
	data := append(make([]byte, 100), 1)
	layout := s.announceIn(1, data, nil)
	s.control(&wbp.Chunk{Model: "m", Epoch: 7, Version: 1, CRC: wbp.CRC32C(data[:100])}, data[:100])
	s.fails(errReset)
	if s.went() != "[tcp://other:6]" || s.worker.Address() != "tcp://other:6" {
		t.Fatal(s.went(), s.worker.Address())
	}
	s.opens()
	s.welcome()
	if s.data.address != "other:6" || s.counted("hello") != 2 {
		t.Fatalf("%v, %v", s.data, s.sent) // the data is at the host of the present address
	}
	s.control(&wbp.Chunk{Model: "m", Epoch: 7, Version: 1, Index: 1, CRC: wbp.CRC32C(data[100:])}, data[100:])
	s.control(&wbp.End{Model: "m", Epoch: 7, Version: 1, Digest: wbp.DigestOf(layout, data, 100)})
	if update, err := s.worker.Receive(within(t, 10*time.Second)); err != nil || update.Version != 1 {
		t.Fatalf("%+v %v", update, err)
	}
	if kinds := fmt.Sprint(s.events()); kinds != "[joined disconnected moved joined]" {
		t.Fatal(kinds)
	}
}

func TestDeadAddressesAreTriedInRounds(t *testing.T) {
	s := begin(t, "tcp://a:1,tcp://b:2", anyModel, nil)
	s.fails(errReset)
	s.fails(errReset)
	if s.went() != "[tcp://b:2]" {
		t.Fatal(s.went(), "there is no pause after a round")
	}
	s.after(time.Second)
	if s.went() != "[tcp://b:2 tcp://a:1]" {
		t.Fatal(s.went())
	}
	s.after(5 * time.Second) // no answer at all
	if s.went() != "[tcp://b:2 tcp://a:1 tcp://b:2]" {
		t.Fatal(s.went())
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if err := s.worker.Join(ctx); err == nil || !strings.Contains(err.Error(), "tcp://a:1, tcp://b:2") {
		t.Fatal(err)
	}
}

func TestASilentPublisherIsLeftForTheNextAddress(t *testing.T) {
	s := begin(t, "tcp://a:1,tcp://b:2", anyModel, nil)
	s.opens()
	s.welcome()
	s.after(5 * time.Second)
	if s.went() != "[tcp://b:2]" || s.redialled != 0 {
		t.Fatal(s.went(), s.redialled)
	}
	s.opens()
	s.after(5 * time.Second) // hello is not answered
	s.after(time.Second)
	if s.went() != "[tcp://b:2 tcp://a:1]" {
		t.Fatal(s.went())
	}
}

// A refusal, and a welcome of an earlier epoch, send the worker to the next address. Receive and
// Join return an error only if no address accepts the worker.
func TestARefusalSendsTheWorkerToTheNextAddress(t *testing.T) {
	s := begin(t, "tcp://a:1,tcp://b:2", anyModel, nil)
	s.control(&wbp.Refuse{Code: CodeNameTaken, Text: "another lives"})
	s.opens()
	s.welcome()
	if err := s.worker.Join(within(t, time.Second)); err != nil || s.went() != "[tcp://b:2]" {
		t.Fatal(err, s.went())
	}
	s.version(1, []byte{1})
	if update, err := s.worker.Receive(within(t, 10*time.Second)); err != nil || update.Epoch != 7 {
		t.Fatalf("%+v %v", update, err)
	}
	s.after(time.Second)
	s.fails(errReset)
	s.control(&wbp.Welcome{Epoch: 6, Data: "tcp://*:6", PingMS: 1000, LostMS: 5000, Models: map[string]int64{}, Features: []string{}})
	s.after(time.Second)
	s.fails(zmtp.NotAllowed)
	if s.went() != "[tcp://b:2 tcp://a:1 tcp://b:2 tcp://a:1]" {
		t.Fatal(s.went())
	}
	s.after(time.Second)
	var refused *RefusedError
	_, err := s.worker.Receive(within(t, time.Second))
	if !errors.As(err, &refused) || !strings.Contains(err.Error(), "tcp://a:1, tcp://b:2") {
		t.Fatal(err)
	}
	if kinds := fmt.Sprint(s.events()); strings.Count(kinds, "refused") != 3 {
		t.Fatal(kinds)
	}
}

func TestTheWorkerReturnsToTheFirstAddress(t *testing.T) {
	s := begin(t, "tcp://a:1,tcp://b:2", anyModel, nil)
	s.fails(errReset)
	s.opens()
	s.welcome()
	for _, answers := range []bool{false, true} {
		for waited := time.Duration(0); waited < 5*time.Second; waited += time.Second {
			s.control(&wbp.Pong{Epoch: 7, Models: map[string]int64{}}) // the session goes on
			s.after(time.Second)
		}
		s.worker.loop.probed(answers)
	}
	s.loop.Lock()
	probes := fmt.Sprint(s.probes)
	s.loop.Unlock()
	if probes != "[tcp://a:1 tcp://a:1]" || s.went() != "[tcp://b:2 tcp://a:1]" || s.counted("bye") != 1 {
		t.Fatal(probes, s.went(), s.sent)
	}
	s.worker.loop.probed(true) // late
	if s.worker.Address() != "tcp://a:1" || s.went() != "[tcp://b:2 tcp://a:1]" {
		t.Fatal(s.went())
	}
}

func TestSeveralAddresses(t *testing.T) {
	for text, want := range map[string]string{
		"tcp://a:1":                         `["tcp://a:1"]`,
		"tcp://a:1, ipc:///x,tcp://[::1]:2": `["tcp://a:1" "ipc:///x" "tcp://[::1]:2"]`,
		"ipc:///a,b,ipc:///c":               `["ipc:///a,b" "ipc:///c"]`,
		"tcp://a:1,b:2":                     `["tcp://a:1,b:2"]`,
	} {
		if got := fmt.Sprintf("%q", splitAddresses(text)); got != want {
			t.Errorf("%q: %s", text, got)
		}
	}
	good, models := sampleKeys(), map[string]Tensors{"m": nil}
	other := good
	other.Publisher = sampleSecret // any other key
	both := Options{Models: models, KeysOfEach: []*Keys{&good, &other}}
	sites, err := both.sites("tcp://a:1,tcp://b:2")
	if err != nil || sites[0].keys.Server == sites[1].keys.Server || both.Keys != &good {
		t.Fatal(sites, err)
	}
	one := Options{Models: models, Keys: &good}
	if sites, err = one.sites("tcp://a:1,tcp://b:2"); err != nil || sites[1].keys.Server != sites[0].keys.Server {
		t.Fatal(sites, err)
	}
	for name, c := range map[string]struct {
		addresses string
		options   Options
		says      string
	}{
		"an invalid one":   {"tcp://a:1,tcp://b", Options{}, `"tcp://b"`},
		"an empty one":     {"tcp://a:1,", Options{}, "tcp://HOST:PORT"},
		"too few keys":     {"tcp://a:1,tcp://b:2", Options{KeysOfEach: []*Keys{&good}}, "1 keys for 2 addresses"},
		"both":             {"tcp://a:1", Options{Keys: &good, KeysOfEach: []*Keys{&good}}, "set only Keys"},
		"none for one":     {"tcp://a:1,tcp://b:2", Options{KeysOfEach: []*Keys{&good, nil}}, "no keys for tcp://b:2"},
		"half of the keys": {"tcp://a:1,tcp://b:2", Options{KeysOfEach: []*Keys{&good, {Name: "w"}}}, "for tcp://b:2"},
	} {
		c.options.Models = models
		if _, err := New(c.addresses, c.options); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// awaitEvent reads the worker's events until one is of a kind.
func awaitEvent(t *testing.T, w *Worker, kind EventKind) Event {
	t.Helper()
	for deadline := time.After(60 * time.Second); ; {
		select {
		case event := <-w.Events():
			if event.Kind == kind {
				return event
			}
		case <-deadline:
			t.Fatalf("no event %s", kind)
		}
	}
}

// The first of two relays is closed, and started again.
func TestVersionsComeFromTheOtherRelay(t *testing.T) {
	p := steer(t, "-m", "weightbus.tests.relay.steered")
	relays := strings.Split(p.address, ",")
	const size = 1 << 20
	memory := make([]float32, size)
	w, err := New(p.address, Options{Name: "w", NetworkOnly: true, Ping: 100 * time.Millisecond, LostAfter: time.Second,
		Models: map[string]Tensors{"m": {"w": F32(memory, size)}}})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	updates := applies(t, w)
	comes := func(value int, from string) {
		t.Helper()
		p.do(object{"do": "publish", "value": value, "size": size})
		if update := next(t, updates); update.Version != int64(value) || memory[size-1] != float32(value) || w.Address() != from {
			t.Fatalf("%+v: %v from %s", update, memory[size-1], w.Address())
		}
	}
	awaitEvent(t, w, Joined)
	comes(1, relays[0])
	p.do(object{"do": "close", "relay": 0})
	if moved := awaitEvent(t, w, Moved); !strings.Contains(moved.Text, "from "+relays[0]+" to "+relays[1]) {
		t.Fatal(moved.Text)
	}
	awaitEvent(t, w, Joined)
	comes(2, relays[1])
	p.do(object{"do": "start", "relay": 0})
	awaitEvent(t, w, Moved)
	awaitEvent(t, w, Joined)
	comes(3, relays[0])
}

// Each publisher has its own keys. A wrong key sends the worker to the next address, too.
func TestKeysOfEachAddress(t *testing.T) {
	folders := []string{keygen(t, "w"), keygen(t, "w")}
	var keys []*Keys
	var addresses []string
	var publishers []*publisher
	for _, folder := range folders {
		own, err := ReadKeys(folder, "w")
		if err != nil {
			t.Fatal(err)
		}
		p := publish(t, object{"keys": folder, "timing": quick})
		keys, addresses, publishers = append(keys, own), append(addresses, p.address), append(publishers, p)
	}
	join := func(keys []*Keys, at string) *Worker {
		t.Helper()
		w, err := Dial(within(t, 30*time.Second), strings.Join(addresses, ","), Options{KeysOfEach: keys,
			Models: map[string]Tensors{"m": nil}, Ping: 200 * time.Millisecond, LostAfter: time.Second})
		if err != nil || w.Address() != at {
			t.Fatal(err)
		}
		return w
	}
	join([]*Keys{keys[1], keys[1]}, addresses[1]).Close()
	w := join(keys, addresses[0])
	defer w.Close()
	updates := applies(t, w)
	publishers[0].kill()
	publishers[1].do(object{"wait_for_workers": 1})
	publishers[1].version(1, 5, object{"require": 0, "wait": "none"})
	if update := next(t, updates); update.Version != 1 || w.Address() != addresses[1] {
		t.Fatalf("%+v from %s", update, w.Address())
	}
}
