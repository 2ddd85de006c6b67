package weightbus

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"regexp"
	"sync"
	"time"
	"unsafe"

	"weightbus/internal/segment"
	"weightbus/internal/wbp"
)

const client = "weightbus-go/0.1.0"

// Options say what a worker receives, and how.
type Options struct {
	// Models gives the memory of each model, which versions are written into. A model without
	// Tensors takes versions of any layout, in memory of the worker's own.
	Models map[string]Tensors
	// Name is what the worker is called, unique among the publisher's workers: 1 to 128 of
	// A-Z a-z 0-9 . _ -. Default: host, process and four random digits.
	Name string
	// BytesMax is the largest version to accept. Default: 64 GiB.
	BytesMax int64
	// NetworkOnly keeps off the shared road, even if the publisher is a process of this user on
	// this host.
	NetworkOnly bool
	// Ping is the interval of pings, and LostAfter the silence after which the publisher counts as
	// lost, at least twice that. Default: 1 s and 5 s.
	Ping, LostAfter time.Duration
}

// An Update is a version that was applied.
type Update struct {
	Model          string
	Epoch, Version int64
	Bytes          int64         // of its tensors
	Digest         string        // of its bytes; empty if they were read from shared memory and nobody asked for it
	Elapsed        time.Duration // what the copy into the model took
}

// An Event is something that an operator may want to know.
type Event struct {
	Kind  EventKind
	Epoch int64  // of Joined
	Code  Code   // of Refused
	Text  string // in words
}

// An EventKind says what an Event is about.
type EventKind string

// Kinds of events.
const (
	Joined       EventKind = "joined"       // the publisher has let this worker in
	Lost         EventKind = "lost"         // the publisher is silent; the worker goes on asking
	Refused      EventKind = "refused"      // the publisher refuses this worker; it goes on asking
	Unheard      EventKind = "unheard"      // nothing that is published reaches the worker; everything is fetched
	Disconnected EventKind = "disconnected" // a connection broke, or could not be made; it is made again
)

// A Worker receives the versions of some models. Any goroutine may call any method.
type Worker struct {
	name   string
	models map[string]*model
	loop   *loop
	close  sync.Once
	closed chan struct{}
}

// Dial makes a worker and waits until the publisher has let it in. Without a deadline in the
// context it waits for as long as it takes; a refusal is returned at once.
func Dial(ctx context.Context, address string, options Options) (*Worker, error) {
	w, err := New(address, options)
	if err != nil {
		return nil, err
	}
	if err := w.Join(ctx); err != nil {
		_ = w.Close()
		return nil, err
	}
	return w, nil
}

// New makes a worker of the publisher at tcp://HOST:PORT or ipc://PATH. The publisher need not be
// there yet, and may come and go.
func New(address string, options Options) (*Worker, error) {
	control, err := parseEndpoint(address)
	if err != nil {
		return nil, err
	}
	var opens wbp.Opens
	if !options.NetworkOnly {
		opens = segment.NewCache().Open
	}
	return newWorker(address, options, opens, func(c carried) transport { return newSockets(control, c) })
}

// newWorker makes a worker on a transport; opens is nil where the shared road is not to be taken.
func newWorker(address string, options Options, opens wbp.Opens, connect func(carried) transport) (*Worker, error) {
	if err := options.check(); err != nil {
		return nil, err
	}
	w := &Worker{name: options.Name, models: map[string]*model{}, closed: make(chan struct{})}
	expected := map[string]wbp.Model{}
	for name, tensors := range options.Models {
		m := &model{tensors: tensors}
		w.models[name] = m
		expected[name] = wbp.Model{Accepts: m.accepts, Bytes: m.bytes()}
	}
	host, _ := os.Hostname()
	if len(host) > wbp.LabelMax {
		host = host[:wbp.LabelMax]
	}
	id := wbp.Identity{Name: w.name, Instance: random(16), Client: client, Host: host, PID: int64(os.Getpid())}
	w.loop = &loop{
		machine: wbp.NewMachine(id, expected, options.BytesMax, wbp.TimingOf(options.Ping, options.LostAfter), opens),
		handoff: newHandoff(), address: address, name: w.name, started: time.Now(),
		events: make(chan Event, eventsMax), stop: make(chan struct{}), renamed: w.renamed,
	}
	w.loop.run(connect)
	return w, nil
}

// check fills in the defaults, and says what makes no sense.
func (o *Options) check() error {
	if o.Name == "" {
		o.Name = defaultName()
	}
	if o.BytesMax == 0 {
		o.BytesMax = wbp.BytesMaxDefault
	}
	if o.Ping == 0 && o.LostAfter == 0 {
		o.Ping, o.LostAfter = time.Second, 5*time.Second
	}
	one := uint16(1)
	switch {
	case *(*byte)(unsafe.Pointer(&one)) != 1:
		return optionErrorf("this machine is big-endian; tensors travel little-endian, and are not turned here")
	case !wbp.IsName(o.Name):
		return optionErrorf("worker %q: a name is 1 to 128 of A-Z a-z 0-9 . _ -", o.Name)
	case len(o.Models) < 1 || len(o.Models) > wbp.ModelsMax:
		return optionErrorf("%d models; a worker takes 1 to %d", len(o.Models), wbp.ModelsMax)
	case o.BytesMax < 0:
		return optionErrorf("BytesMax is %d; it must not be negative", o.BytesMax)
	case o.Ping <= 0 || o.LostAfter < 2*o.Ping:
		return optionErrorf("Ping is %v and LostAfter %v: the publisher needs two chances to be heard; choose LostAfter "+
			"of at least twice Ping, both above zero", o.Ping, o.LostAfter)
	}
	for name, tensors := range o.Models {
		if !wbp.IsName(name) {
			return optionErrorf("model %q: a name is 1 to 128 of A-Z a-z 0-9 . _ -", name)
		}
		for tensor, t := range tensors {
			if t.dtype == "" {
				t.fault = "an empty Tensor; make it by F32 and its like"
			}
			if t.fault != "" {
				return optionErrorf("model %q, tensor %q: %s", name, tensor, t.fault)
			}
		}
	}
	return nil
}

// Name is what the worker is called.
func (w *Worker) Name() string { return w.name }

// Join waits until the publisher has let this worker in.
func (w *Worker) Join(ctx context.Context) error {
	if _, err := w.loop.handoff.waitJoined(ctx); err != nil {
		return fmt.Errorf("worker %q has not joined the publisher at %s: %w", w.name, w.loop.address, err)
	}
	return nil
}

// Events tells of sessions that begin and end. Nobody has to look: only the latest few are kept. The
// channel is closed by Close.
func (w *Worker) Events() <-chan Event { return w.loop.events }

// Receive applies the newest version that has arrived, waiting for one if need be, and returns
// what it applied. It waits for functions inside Read to return, so it must not be called there.
//
// Errors are those of the context, *ApplyError (a version cannot be taken: what ran before runs
// on, unless its code is CodeApply), *RefusedError (the worker goes on asking), each told once, and ErrClosed. After all but the
// last it can be called again.
func (w *Worker) Receive(ctx context.Context) (Update, error) {
	for {
		v, err := w.loop.handoff.take(ctx)
		if err != nil {
			return Update{}, err
		}
		update, err := w.apply(ctx, v)
		if !errors.Is(err, errNotApplied) {
			return update, err
		}
	}
}

// errNotApplied says that a version was too old, or gone from shared memory: wait for the next.
var errNotApplied = errors.New("not applied")

func (w *Worker) apply(ctx context.Context, v *wbp.Version) (Update, error) {
	m := w.models[v.Model]
	if err := m.guard.lockWrite(ctx); err != nil { // somebody is reading and does not leave: later, then
		if !w.loop.handoff.putBack(v) {
			w.loop.dropped(v)
		}
		return Update{}, err
	}
	defer m.guard.unlockWrite()
	if w.isClosed() {
		return Update{}, ErrClosed
	}
	if runs := m.running.Load(); runs != nil && !v.Key.Newer(wbp.Key{Epoch: runs.Epoch, Version: runs.Version}) {
		w.loop.dropped(v) // another goroutine was faster, with a newer one
		return Update{}, errNotApplied
	}
	w.loop.taken(v)
	begun, written := time.Now(), false
	digest, err := v.Copy(func(data []byte) {
		written = true
		m.prepare(v.Layout)
		m.write(data)
	})
	switch {
	case written && err != nil: // half of one version and half of another: nobody may read it
		m.running.Store(nil)
		w.loop.failed(v, "it was overwritten in shared memory while it was copied into the model", false) // S5, W24
		return Update{}, errNotApplied
	case err != nil:
		w.loop.stale(v)
		return Update{}, errNotApplied
	}
	update := Update{v.Model, v.Key.Epoch, v.Key.Version, v.Layout.Bytes, digest, time.Since(begun)}
	m.running.Store(&update)
	w.loop.applied(v, digest) // here first, then at the publisher: whoever waits for its receipt must find it here
	return update, nil
}

// renamed takes note that what runs has another name, too, by which the publisher knows it. Nothing is
// being applied.
func (w *Worker) renamed(model string, key wbp.Key) {
	m := w.models[model]
	if runs := m.running.Load(); runs != nil {
		renamed := *runs
		renamed.Epoch, renamed.Version = key.Epoch, key.Version
		m.running.Store(&renamed)
	}
}

// Read calls fn while the weights of a model do not change, with a view of them. Registered slices
// can be read there as well. It waits for an apply that is under way, no longer than the context.
// It must not be nested. ErrNoVersion: nothing was applied yet.
func (w *Worker) Read(ctx context.Context, model string, fn func(v View)) error {
	m := w.models[model]
	if m == nil {
		return optionErrorf("this worker has no model %q", model)
	}
	if err := m.guard.lockRead(ctx); err != nil {
		return err
	}
	defer m.guard.unlockRead()
	if m.running.Load() == nil {
		return ErrNoVersion
	}
	fn(m.view())
	return nil
}

// Snapshot returns a copy of the weights of a model, all of one version.
func (w *Worker) Snapshot(ctx context.Context, model string) (View, error) {
	var snapshot View
	err := w.Read(ctx, model, func(View) { snapshot = w.models[model].snapshot() })
	return snapshot, err
}

// Stats are counts since the worker was made.
type Stats struct {
	Malformed int // messages dropped because they broke the protocol
}

// Stats returns how things went so far.
func (w *Worker) Stats() Stats {
	w.loop.Lock()
	defer w.loop.Unlock()
	return Stats{Malformed: w.loop.machine.Malformed}
}

// Close says goodbye to the publisher and ends the worker. What was applied stays. Calling it
// twice is fine.
func (w *Worker) Close() error {
	w.close.Do(func() {
		close(w.closed)
		w.loop.close()
		close(w.loop.events)
		w.free()
	})
	return nil
}

func (w *Worker) isClosed() bool {
	select {
	case <-w.closed:
		return true
	default:
		return false
	}
}

// free gives the staging memory back once nobody copies from it any more.
func (w *Worker) free() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for _, m := range w.models {
		if m.guard.lockWrite(ctx) != nil {
			return // a reader that does not leave: the memory stays until the process ends
		}
		defer m.guard.unlockWrite()
	}
	w.loop.Lock()
	defer w.loop.Unlock()
	w.loop.machine.Free()
}

// random returns so many random bytes as hexadecimal digits.
func random(bytes int) string {
	digits := make([]byte, bytes)
	if _, err := rand.Read(digits); err != nil {
		panic(err) // the system has no randomness: nothing would work
	}
	return hex.EncodeToString(digits)
}

var notInNames = regexp.MustCompile(`[^A-Za-z0-9._-]`)

func defaultName() string {
	host, _ := os.Hostname()
	if host = notInNames.ReplaceAllString(host, "-"); len(host) > 80 {
		host = host[:80]
	}
	return fmt.Sprintf("%s-%d-%s", host, os.Getpid(), random(2))
}
