package weightbus

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/weightbus/weightbus/go_client/internal/segment"
	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

const client = "weightbus-go/0.1.0"

const applyTimeoutMax = 24 * time.Hour // whoever waits for longer waits for ever

// Options say what a worker receives, and how.
type Options struct {
	// Models gives the memory of each model, which versions are written into. A model without
	// Tensors takes versions of any layout, in memory of the worker's own.
	Models map[string]Tensors
	// Name is what the worker is called, unique among the publisher's workers: 1 to 128 of
	// A-Z a-z 0-9 . _ -. Default: that of its keys, or host, process and four random digits.
	Name string
	// BytesMax is the largest version to accept. Default: 64 GiB.
	BytesMax int64
	// Keys are those of this worker, and of its publisher (ReadKeys): with them it speaks to that publisher
	// alone, and never in the clear. Default: those of the file, or the folder, that the environment names
	// as WEIGHTBUS_KEYS; none if there is no such variable, or if this is an empty Keys.
	Keys *Keys
	// AnyDataHost accepts pushed data from whatever endpoint the publisher names. Else it must be on the host of the
	// address, or a publisher could have the worker connect to anything.
	AnyDataHost bool
	// NetworkOnly keeps off the shared road, even if the publisher is a process of this user on
	// this host.
	NetworkOnly bool
	// NoPatches has every version come as a whole. Else the bytes of what runs are kept, where the publisher says that
	// patches may come: a copy of the model more.
	NoPatches bool
	// Ping is the interval of pings, and LostAfter the silence after which the publisher counts as
	// lost, at least twice that. Default: 1 s and 5 s.
	Ping, LostAfter time.Duration
	// Partial lets a version have tensors that Models do not name: they are not copied.
	Partial bool
	// Cast converts among F64, F32, F16 and BF16 where a version has another of these dtypes than
	// Models: to the nearest value, to even where two are as near.
	Cast bool
	// BeforeApply, if there is one, may turn a version down before a byte of a model changes.
	BeforeApply func(ctx context.Context, next Update) error
	// Apply, if there is one, is called with each version once it is verified and copied, before the
	// publisher is told that it was applied: put it to use here, on a GPU say. What it returns, or panics
	// with, the publisher is told in place of that, and Receive returns it as an ApplyError with CodeApply.
	// In a model without Tensors the version before then stays; in registered memory, which is
	// overwritten by now, nothing runs until the next version.
	//
	// Both are called while a Receive waits for them, one at a time for each model, on a goroutine of
	// their own, and must not call Read or Snapshot. Their context ends with ApplyTimeout and with Close.
	Apply func(ctx context.Context, v View) error
	// ApplyTimeout is how long BeforeApply and Apply may take, up to a day. A version for which they take
	// longer has failed, whatever they return later, and the model takes no other until then. Default: 60 s.
	ApplyTimeout time.Duration
}

// An Update is a version that was applied.
type Update struct {
	Model          string
	Epoch, Version int64
	Bytes          int64         // of its tensors
	Digest         string        // of its bytes; empty if they were read from shared memory and nobody asked for it
	Encoding       string        // how they came: "raw" as they are, "delta-1" by a patch; empty: from shared memory
	Elapsed        time.Duration // what the copy into the model took

	Metadata map[string]string // what the publisher says of it: a step, a reward; nil: nothing
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
	Unpatched    EventKind = "unpatched"    // a patch was of no use, and all of its version is fetched
	Disconnected EventKind = "disconnected" // a connection broke, or could not be made; it is made again
	Panicked     EventKind = "panicked"     // BeforeApply or Apply, with the stack; the version has failed
	Defect       EventKind = "defect"       // this worker failed on one message, and goes on: please report it
	Late         EventKind = "late"         // BeforeApply or Apply has returned after ApplyTimeout
)

// A Worker receives the versions of some models. Any goroutine may call any method.
type Worker struct {
	name    string
	options Options
	models  map[string]*model
	loop    *loop
	life    context.Context // ends with Close
	end     context.CancelFunc
	close   sync.Once
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
	keys, err := options.findKeys()
	if err != nil {
		return nil, err
	}
	var opens wbp.Opens
	if !options.NetworkOnly {
		opens = segment.NewCache().Open
	}
	return newWorker(address, options, opens, func(c carried) transport { return newSockets(control, keys, c) })
}

// newWorker makes a worker on a transport; opens is nil where the shared road is not to be taken.
func newWorker(address string, options Options, opens wbp.Opens, connect func(carried) transport) (*Worker, error) {
	if err := options.check(); err != nil {
		return nil, err
	}
	w := &Worker{name: options.Name, options: options, models: map[string]*model{}}
	w.life, w.end = context.WithCancel(context.Background())
	expected := map[string]wbp.Model{}
	for name, tensors := range options.Models {
		m := newModel(tensors, wbp.Lenience{Partial: options.Partial, Cast: options.Cast})
		w.models[name] = m
		expected[name] = wbp.Model{Accepts: m.accepts, Bytes: m.bytes(), LayoutBytes: m.layoutBytes()}
	}
	host, _ := os.Hostname()
	if len(host) > wbp.LabelMax {
		host = host[:wbp.LabelMax]
	}
	id := wbp.Identity{Name: w.name, Instance: random(16), Client: client, Host: host, PID: int64(os.Getpid()),
		Keyed: options.Keys != nil, Patches: !options.NoPatches}
	w.loop = &loop{
		machine: wbp.NewWorkerMachine(id, expected, options.BytesMax, wbp.TimingOf(options.Ping, options.LostAfter), opens),
		handoff: newHandoff(options.decides()), address: address, name: w.name, started: time.Now(),
		events: make(chan Event, eventsMax), stop: make(chan struct{}), renamed: w.renamed,
		anyDataHost: options.AnyDataHost,
		door:        door{keyed: options.Keys != nil, patience: options.LostAfter},
	}
	w.loop.run(connect)
	return w, nil
}

// check fills in the defaults, and says what makes no sense.
func (o *Options) check() error {
	if o.Name == "" {
		o.Name = defaultName(o.Keys)
	}
	if o.BytesMax == 0 {
		o.BytesMax = wbp.BytesMaxDefault
	}
	if o.Ping == 0 && o.LostAfter == 0 {
		o.Ping, o.LostAfter = time.Second, 5*time.Second
	}
	if o.ApplyTimeout == 0 {
		o.ApplyTimeout = time.Minute
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
	if o.ApplyTimeout < 0 || o.ApplyTimeout > applyTimeoutMax {
		return optionErrorf("ApplyTimeout is %v; nothing is waited for without a deadline, of at most %v", o.ApplyTimeout,
			applyTimeoutMax)
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
		if fault, _ := tensors.memory(); fault != "" {
			return optionErrorf("model %q: %s; give each memory of its own", name, fault)
		}
	}
	return nil
}

func (o *Options) decides() bool { return o.BeforeApply != nil || o.Apply != nil }

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
// what it applied. It waits for functions inside Read to return, so it must not be called there. If
// its context ends while BeforeApply or Apply runs, that goes on, and a later call returns what became of it.
//
// Errors are those of the context, *ApplyError (a version cannot be taken: what ran before runs
// on, unless its code is CodeApply: then Read tells), *RefusedError (the worker goes on asking), each told once, and
// ErrClosed. After all but the last it can be called again.
func (w *Worker) Receive(ctx context.Context) (Update, error) {
	for {
		taken, err := w.loop.handoff.take(ctx)
		switch {
		case err != nil:
			return Update{}, err
		case taken.update != nil: // by an earlier call, which did not wait for it
			return *taken.update, nil
		case w.options.decides():
			err = w.decide(ctx, taken.version)
		default:
			var update Update
			if update, err = w.apply(ctx, taken.version); err == nil {
				return update, nil
			}
		}
		if err != nil && !errors.Is(err, errNotApplied) {
			return Update{}, err
		}
	}
}

// errNotApplied says that a version was too old, failed, or gone from shared memory: wait for the next,
// or for word of it.
var errNotApplied = errors.New("not applied")

func (w *Worker) apply(ctx context.Context, v *wbp.StagedVersion) (Update, error) {
	m := w.models[v.Model]
	if err := m.guard.lockWrite(ctx); err != nil { // somebody is reading and does not leave: later, then
		if !w.loop.handoff.putBack(v) {
			w.loop.dropped(v)
		}
		return Update{}, err
	}
	defer m.guard.unlockWrite()
	if !w.isNews(v) {
		return Update{}, errNotApplied
	}
	w.loop.taken(v)
	update, err := w.copy(v, m.memory)
	if err != nil {
		return Update{}, err
	}
	w.runs(v, update)
	return update, nil
}

// isNews tells whether a version is still to be applied.
func (w *Worker) isNews(v *wbp.StagedVersion) bool {
	if w.life.Err() != nil {
		return false
	}
	runs := w.models[v.Model].running.Load()
	if runs == nil || v.Key.Newer(wbp.Key{Epoch: runs.Epoch, Version: runs.Version}) { // W16
		return true
	}
	w.loop.dropped(v) // another goroutine was faster, with a newer one
	return false
}

// copy writes a version into memory that nobody else uses meanwhile.
func (w *Worker) copy(v *wbp.StagedVersion, to *memory) (Update, error) {
	begun, written, differ := time.Now(), false, ""
	digest, err := v.Copy(func(data []byte) {
		to.prepare(v.Layout)
		if differ = to.differ(data); differ == "" {
			written = true
			v.Note = wbp.OverflowText(to.write(data))
		}
	})
	m := w.models[v.Model]
	switch {
	case written && err != nil && to == m.memory: // half of one version and half of another: nobody may read it
		m.running.Store(nil)
		w.loop.failed(v, "it was overwritten in shared memory while it was copied into the model", false) // S5, W24
		return Update{}, errNotApplied
	case err != nil:
		w.loop.stale(v)
		return Update{}, errNotApplied
	case differ != "":
		w.loop.failed(v, differ, true)
		return Update{}, errNotApplied
	}
	update := updateOf(v)
	update.Digest, update.Elapsed = digest, time.Since(begun)
	return update, nil
}

// updateOf says what is known of a version before it is applied.
func updateOf(v *wbp.StagedVersion) Update {
	return Update{Model: v.Model, Epoch: v.Key.Epoch, Version: v.Key.Version, Bytes: v.Layout.Bytes, Digest: v.Digest,
		Encoding: v.Encoding(), Metadata: copied(v.Metadata)}
}

// copied makes a map the user's own.
func copied(said map[string]string) map[string]string {
	if len(said) == 0 {
		return nil
	}
	own := make(map[string]string, len(said))
	for name, text := range said {
		own[name] = text
	}
	return own
}

// runs takes note that a version was applied.
func (w *Worker) runs(v *wbp.StagedVersion, update Update) {
	w.models[v.Model].running.Store(&update)
	w.loop.applied(v, update.Digest) // here first, then at the publisher: whoever waits for its receipt must find it here
}

// renamed takes note that what runs has another name, too, by which the publisher knows it. Nothing is
// being applied.
func (w *Worker) renamed(model string, key wbp.Key, metadata map[string]string) {
	m := w.models[model]
	if runs := m.running.Load(); runs != nil {
		renamed := *runs
		renamed.Epoch, renamed.Version, renamed.Metadata = key.Epoch, key.Version, copied(metadata)
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
	runs := m.running.Load()
	if runs == nil {
		return ErrNoVersion
	}
	fn(m.view(*runs))
	return nil
}

// Snapshot returns a copy of the weights of a model, all of one version.
func (w *Worker) Snapshot(ctx context.Context, model string) (View, error) {
	var snapshot View
	err := w.Read(ctx, model, func(v View) { snapshot = w.models[model].snapshot(v.Update) })
	return snapshot, err
}

// Stats are counts since the worker was made.
type Stats struct {
	Applied      int   // versions
	Failed       int   // times that a version could not be taken or applied
	NetworkBytes int64 // of the tensors of versions that were applied and came over the network,
	SharedBytes  int64 // or straight out of the publisher's memory
	Malformed    int   // messages dropped because they broke the protocol
}

// Stats returns how things went so far.
func (w *Worker) Stats() Stats {
	w.loop.Lock()
	defer w.loop.Unlock()
	stats := w.loop.stats
	stats.Malformed = w.loop.machine.Malformed
	return stats
}

// Close says goodbye to the publisher and ends the worker. What was applied stays. It does not wait for
// BeforeApply or Apply. Calling it twice is fine.
func (w *Worker) Close() error {
	w.close.Do(func() {
		w.end()
		w.loop.close()
		close(w.loop.events)
		w.free()
	})
	return nil
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

// defaultName is a name that fits the keys, if there are any.
func defaultName(keys *Keys) string {
	host, _ := os.Hostname()
	if host = notInNames.ReplaceAllString(host, "-"); len(host) > 80 {
		host = host[:80]
	}
	own := fmt.Sprintf("%s-%d-%s", host, os.Getpid(), random(2))
	if keys == nil {
		return own
	}
	return strings.Replace(keys.Name, "*", own, 1)
}
