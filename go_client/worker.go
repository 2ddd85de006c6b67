package weightbus

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"regexp"
	"sort"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/weightbus/weightbus/go_client/internal/segment"
	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

const client = "weightbus-go/0.1.0"

const applyTimeoutMax = 24 * time.Hour

// Options configure a Worker.
type Options struct {
	// Models has an entry for each model that the worker receives: the memory into which versions
	// are written. A model without Tensors accepts any layout, and the worker allocates its memory.
	Models map[string]Tensors
	// Name is the worker's name, unique at its publisher: 1 to 128 of A-Z a-z 0-9 . _ -. Default: the
	// name in its keys, or the host name, the process id and four random digits.
	Name string
	// BytesMax is the size of the largest version to accept. Default: 64 GiB.
	BytesMax int64
	// Keys are the worker's key pair and its publisher's public key (see ReadKeys). With keys the worker
	// connects only to that publisher, always encrypted. Default: the keys in the file or folder that the
	// environment variable WEIGHTBUS_KEYS names, if it is set. A pointer to an empty Keys means no keys.
	Keys *Keys
	// KeysOfEach replaces Keys if the publishers at several addresses need different keys: it has
	// the keys for each address, in the order of the addresses.
	KeysOfEach []*Keys
	// AnyDataHost lets the worker connect to any data endpoint that the publisher names. By default
	// the endpoint must be on the host of the control address: otherwise a publisher could make the
	// worker connect to anything.
	AnyDataHost bool
	// NetworkOnly disables the shared-memory transport, even if the publisher is a process of the
	// same user on the same host.
	NetworkOnly bool
	// NoPatches makes the worker receive every version whole. Without NoPatches, the worker keeps one
	// more copy of the running version if the publisher may send patches.
	NoPatches bool
	// Ping is the interval of pings. The publisher is considered lost after LostAfter without a
	// message; LostAfter must be at least twice Ping. Default: 1 s and 5 s.
	Ping, LostAfter time.Duration
	// Partial allows versions with tensors that Models does not have. Such tensors are ignored.
	Partial bool
	// Cast converts between F64, F32, F16 and BF16 if a tensor's dtype differs from that in Models.
	// Values are rounded to the nearest value, ties to even.
	Cast bool
	// BeforeApply, if not nil, is called before any byte of the model is written. It rejects the
	// version by returning an error.
	BeforeApply func(ctx context.Context, next Update) error
	// Apply, if not nil, is called with each version after the version was verified and copied, and
	// before it is reported as applied. Use Apply to load the version, for example onto a GPU. If it
	// returns an error or panics, the version is reported as failed, and Receive returns an
	// ApplyError with CodeApply. A model without Tensors then keeps the previous version. Registered
	// memory is already overwritten, so no version runs there until the next version is applied.
	//
	// Receive calls both functions, one at a time for each model, on a separate goroutine. They
	// must not call Read or Snapshot. Their context ends at ApplyTimeout and on Close.
	Apply func(ctx context.Context, v View) error
	// ApplyTimeout is the time limit of each call of BeforeApply and Apply, at most a day. If a call
	// takes longer, the version fails, whatever the call returns later. No other version of the model
	// is applied until the call returns. Default: 60 s.
	ApplyTimeout time.Duration
}

// An Update is a version that was applied.
type Update struct {
	Model          string
	Epoch, Version int64
	Bytes          int64         // size of its tensors
	Digest         string        // empty if read from shared memory, unless the publisher requested it
	Encoding       string        // "raw": received whole; "delta-1": as a patch; empty: from shared memory
	Elapsed        time.Duration // duration of the copy into the model

	Metadata map[string]string // published with the version, such as a step or a reward; may be nil
}

// An Event is a notice for operators.
type Event struct {
	Kind  EventKind
	Epoch int64  // set if Kind is Joined
	Code  Code   // set if Kind is Refused
	Text  string // a description
}

// An EventKind is the type of an Event.
type EventKind string

// Kinds of events.
const (
	Joined       EventKind = "joined"       // the publisher has accepted the worker
	Lost         EventKind = "lost"         // the publisher no longer responds; the worker reconnects
	Refused      EventKind = "refused"      // the publisher refused the worker, which keeps trying to join
	Unheard      EventKind = "unheard"      // no published messages arrive; everything is fetched
	Unpatched    EventKind = "unpatched"    // a patch was unusable; the whole version is fetched
	Disconnected EventKind = "disconnected" // a connection broke, or an attempt failed; the worker reconnects
	Panicked     EventKind = "panicked"     // BeforeApply or Apply panicked, and the version failed; Text has the stack
	Defect       EventKind = "defect"       // a bug of this package, which please report; the worker continues
	Late         EventKind = "late"         // BeforeApply or Apply returned after ApplyTimeout
	Moved        EventKind = "moved"        // the worker changes over to another address; Text has both addresses and the reason
)

// A Worker receives versions of models. It is safe for concurrent use.
type Worker struct {
	name    string
	options Options
	models  map[string]*model
	loop    *loop
	life    context.Context // ends with Close
	end     context.CancelFunc
	close   sync.Once
}

// Dial returns a new worker once the publisher has accepted it. It returns an error if ctx ends
// first, or as soon as the publisher refuses the worker.
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

// New returns a worker for the publisher at tcp://HOST:PORT or ipc://PATH. The publisher may start
// later, and restart at any time.
//
// Several addresses, separated by commas, must be those of publishers of the same versions, such as
// a publisher and its relays. The worker connects to one of them at a time. If that publisher is lost
// or refuses the worker, the worker goes on to the next address, and after the last to the first.
// While it is connected to another address than the first, it probes the first one at intervals, and
// returns to it once a publisher answers there.
func New(address string, options Options) (*Worker, error) {
	sites, err := options.sites(address)
	if err != nil {
		return nil, err
	}
	var opens wbp.OpenSegment
	if !options.NetworkOnly {
		opens = segment.NewCache().Open
	}
	return newWorker(sites, options, opens, func(h transportHandler) transport { return newSockets(sites[0], h) })
}

// newWorker returns a worker that uses the transport that connect returns. If opens is nil, the
// shared-memory transport is disabled.
func newWorker(sites []site, options Options, opens wbp.OpenSegment, connect func(transportHandler) transport) (*Worker, error) {
	if err := options.setDefaultsAndCheck(); err != nil {
		return nil, err
	}
	w := &Worker{name: options.Name, options: options, models: map[string]*model{}}
	w.life, w.end = context.WithCancel(context.Background())
	expected := map[string]wbp.Model{}
	for name, tensors := range options.Models {
		m := newModel(tensors, wbp.Lenience{Partial: options.Partial, Cast: options.Cast})
		w.models[name] = m
		expected[name] = wbp.Model{Mismatch: m.mismatch, Bytes: m.bytes(), LayoutBytes: m.layoutBytes()}
	}
	host, _ := os.Hostname()
	if len(host) > wbp.LabelMax {
		host = host[:wbp.LabelMax]
	}
	id := wbp.Identity{Name: w.name, Instance: randomHex(16), Client: client, Host: host, PID: int64(os.Getpid()),
		Keyed: options.Keys != nil, Patches: !options.NoPatches}
	timing := wbp.TimingOf(options.Ping, options.LostAfter)
	w.loop = &loop{
		machine: wbp.NewWorkerMachine(id, expected, options.BytesMax, timing, opens),
		queue:   newReadyQueue(options.decides()), name: w.name, started: time.Now(),
		events: make(chan Event, eventsMax), stop: make(chan struct{}), onRenamed: w.onRenamed,
		anyDataHost: options.AnyDataHost, lostAfter: options.LostAfter,
		sites: sites, route: newRoute(addressesOf(sites), timing.HelloRetry, options.LostAfter),
	}
	for range sites {
		w.loop.handshakes = append(w.loop.handshakes, handshakes{keyed: options.Keys != nil, lostAfter: options.LostAfter})
	}
	w.loop.run(connect)
	return w, nil
}

// setDefaultsAndCheck sets the defaults, and returns an OptionError for an invalid option.
func (o *Options) setDefaultsAndCheck() error {
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
		return optionErrorf("this machine is big-endian, but tensors are sent as little-endian, and are not converted here")
	case !wbp.IsName(o.Name):
		return optionErrorf("worker %q: a name is 1 to 128 of A-Z a-z 0-9 . _ -", o.Name)
	case len(o.Models) < 1 || len(o.Models) > wbp.ModelsMax:
		return optionErrorf("Models has %d models; a worker receives 1 to %d", len(o.Models), wbp.ModelsMax)
	case o.BytesMax < 0:
		return optionErrorf("BytesMax is %d; it must not be negative", o.BytesMax)
	case o.Ping <= 0 || o.LostAfter < 2*o.Ping:
		return optionErrorf("Ping is %v and LostAfter %v: the publisher needs two chances to be heard; choose LostAfter "+
			"of at least twice Ping, both above zero", o.Ping, o.LostAfter)
	}
	if o.ApplyTimeout < 0 || o.ApplyTimeout > applyTimeoutMax {
		return optionErrorf("ApplyTimeout is %v; it must be above zero and at most %v", o.ApplyTimeout, applyTimeoutMax)
	}
	for name, tensors := range o.Models {
		if !wbp.IsName(name) {
			return optionErrorf("model %q: a name is 1 to 128 of A-Z a-z 0-9 . _ -", name)
		}
		for tensor, t := range tensors {
			if t.dtype == "" {
				t.fault = "an empty Tensor; make it with F32 or another constructor"
			}
			if t.fault != "" {
				return optionErrorf("model %q, tensor %q: %s", name, tensor, t.fault)
			}
		}
		if fault, _ := tensors.findTies(); fault != "" {
			return optionErrorf("model %q: %s; give each memory of its own", name, fault)
		}
	}
	return nil
}

func (o *Options) decides() bool { return o.BeforeApply != nil || o.Apply != nil }

// Name returns the worker's name.
func (w *Worker) Name() string { return w.name }

// Address returns the address that the worker is connected to or tries: one of the addresses that New
// was given.
func (w *Worker) Address() string {
	w.loop.Lock()
	defer w.loop.Unlock()
	return w.loop.route.address()
}

// Join waits until the publisher has accepted the worker.
func (w *Worker) Join(ctx context.Context) error {
	if _, err := w.loop.queue.waitJoined(ctx); err != nil {
		addresses := strings.Join(w.loop.route.addresses, ", ")
		return fmt.Errorf("worker %q has not joined the publisher at %s: %w", w.name, addresses, err)
	}
	return nil
}

// Events returns a channel of events. You need not read it: the worker keeps only the latest 64
// events. Close closes the channel.
func (w *Worker) Events() <-chan Event { return w.loop.events }

// Receive applies the newest version that has arrived, and returns its Update. It waits if no
// version has arrived. It also waits until every function passed to Read has returned, so it must
// not be called from such a function.
//
// Versions of several models that are published as one are applied by one call, which returns the
// first Update; later calls return the others. Readers wait while the models change from the old
// versions to the new ones. BeforeApply is called for all versions, and then Apply for all, before
// any is reported; if one version is rejected, so are the others.
//
// If ctx ends while BeforeApply or Apply runs, Receive returns the error of ctx. The function runs
// to its end, and a later Receive returns the result.
//
// Receive returns these errors:
//
//   - the error of ctx;
//   - an *ApplyError if a version cannot be applied: the previous version still runs, but with
//     CodeApply it is possible that no version runs (see ErrNoVersion);
//   - a *RefusedError if the publisher refused the worker, which keeps trying to join;
//   - ErrClosed.
//
// Each ApplyError and RefusedError is returned once. After any error but ErrClosed, Receive can be
// called again.
func (w *Worker) Receive(ctx context.Context) (Update, error) {
	for {
		item, err := w.loop.queue.take(ctx)
		switch {
		case err != nil:
			return Update{}, err
		case item.update != nil: // applied before
			return *item.update, nil
		case w.options.decides():
			err = w.decide(ctx, item.versions)
		default:
			err = w.apply(ctx, item.versions)
		}
		if err != nil {
			return Update{}, err
		}
	}
}

// apply applies versions as one, without user functions, and queues their Updates for Receive. It
// returns an error only if ctx ends before the models' readers are done.
func (w *Worker) apply(ctx context.Context, versions group) error {
	jobs := w.jobsFor(versions)
	if err := w.lockAll(ctx, jobs); err != nil { // readers still use a model: apply the versions later
		for _, v := range w.loop.queue.putBack(versions) {
			w.loop.dropped(v)
		}
		return err
	}
	defer w.unlockAll(jobs)
	jobs = w.keepNewer(jobs)
	if w.forEach(jobs, func(job *applyJob) *applyFault { return w.copy(job, job.model.memory) }) {
		w.setRunning(jobs)
	}
	return nil
}

// An applyJob is a version that is being applied.
type applyJob struct {
	version *wbp.StagedVersion
	model   *model
	update  Update
	written bool // bytes were written into the model's memory, so that the previous version is lost
}

// jobsFor returns a job for each version, sorted by model: all goroutines lock models in this order.
func (w *Worker) jobsFor(versions group) []*applyJob {
	var jobs []*applyJob
	for _, v := range versions {
		jobs = append(jobs, &applyJob{version: v, model: w.models[v.Model]})
	}
	sort.Slice(jobs, func(i, j int) bool { return jobs[i].version.Model < jobs[j].version.Model })
	return jobs
}

// lockAll locks the models for writing, or none of them if ctx ends.
func (w *Worker) lockAll(ctx context.Context, jobs []*applyJob) error {
	for i, job := range jobs {
		if err := job.model.guard.lockWrite(ctx); err != nil {
			w.unlockAll(jobs[:i])
			return err
		}
	}
	return nil
}

func (w *Worker) unlockAll(jobs []*applyJob) {
	for _, job := range jobs {
		job.model.guard.unlockWrite()
	}
}

// keepNewer returns the jobs whose versions are newer than the running ones, and drops the other
// versions. After Close it returns none.
func (w *Worker) keepNewer(jobs []*applyJob) []*applyJob {
	var newer []*applyJob
	for _, job := range jobs {
		if w.isNewerOrDrop(job.version) {
			w.loop.applyStarted(job.version)
			newer = append(newer, job)
		}
	}
	return newer
}

// An applyFault is the reason why a version was not applied.
type applyFault struct {
	text  string
	stale bool // the version was overwritten in shared memory, and the previous version still runs
}

// forEach calls step for one job after another. If a step fails, forEach rejects all jobs and returns false.
func (w *Worker) forEach(jobs []*applyJob, step func(job *applyJob) *applyFault) bool {
	for i, job := range jobs {
		if why := step(job); why != nil {
			w.rejectAll(jobs, i, *why)
			return false
		}
	}
	return true
}

// rejectAll reports that all jobs failed, since the job at index culprit failed. Models whose memory
// was written run no version now.
func (w *Worker) rejectAll(jobs []*applyJob, culprit int, why applyFault) {
	torn := false
	for _, job := range jobs {
		if job.written {
			job.model.running.Store(nil)
			torn = true
		}
	}
	if w.life.Err() != nil {
		return
	}
	first := jobs[culprit].version
	text := fmt.Sprintf("version %d of %s, which is published as one with it, failed: %s", first.Key.Version, first.Model, why.text)
	for i, job := range jobs {
		switch {
		case i != culprit:
			w.loop.failedWithCompanion(job.version, text, !job.written, torn && !job.written)
		case why.stale:
			w.loop.stale(job.version)
		case torn && !job.written:
			w.loop.failedForNow(job.version, why.text)
		default:
			w.loop.failed(job.version, why.text, !job.written) // S5, W24
		}
	}
}

// setRunning marks versions as the running ones, and then reports them as applied. The caller has
// locked the models.
func (w *Worker) setRunning(jobs []*applyJob) {
	var updates []Update
	for _, job := range jobs {
		job.model.running.Store(&job.update)
		updates = append(updates, job.update)
	}
	for _, job := range jobs {
		// Report last: once the publisher has the report, Read must return this version.
		w.loop.applied(job.version, job.update.Digest)
	}
	w.loop.queue.finish(updates)
}

// isNewerOrDrop reports whether a version is newer than the running one, and drops the version if it
// is not. After Close it returns false.
func (w *Worker) isNewerOrDrop(v *wbp.StagedVersion) bool {
	if w.life.Err() != nil {
		return false
	}
	running := w.models[v.Model].running.Load()
	if running == nil || v.Key.Newer(wbp.Key{Epoch: running.Epoch, Version: running.Version}) { // W16
		return true
	}
	w.loop.dropped(v) // another goroutine has applied a newer one
	return false
}

// copy writes a version into the memory to, which no other goroutine uses. It returns nil, or why it failed.
func (w *Worker) copy(job *applyJob, to *memory) *applyFault {
	start, written, fault, v := time.Now(), false, "", job.version
	digest, err := v.Copy(func(data []byte) {
		to.prepare(v.Layout)
		if fault = to.tieFault(data); fault == "" {
			written = true
			v.Note = wbp.OverflowText(to.write(data))
		}
	})
	job.written = written && to == job.model.memory
	switch {
	case job.written && err != nil: // the memory has parts of two versions, which must not be read
		return &applyFault{text: "it was overwritten in shared memory while it was copied into the model"}
	case err != nil:
		return &applyFault{text: "it was overwritten in shared memory", stale: true}
	case fault != "":
		return &applyFault{text: fault}
	}
	job.update = updateOf(v)
	job.update.Digest, job.update.Elapsed = digest, time.Since(start)
	return nil
}

// updateOf returns the Update of a version that is not applied yet.
func updateOf(v *wbp.StagedVersion) Update {
	return Update{Model: v.Model, Epoch: v.Key.Epoch, Version: v.Key.Version, Bytes: v.Layout.Bytes, Digest: v.Digest,
		Encoding: v.Encoding(), Metadata: copied(v.Metadata)}
}

// copied returns a copy of a version's metadata for the user, or nil if there is no metadata.
func copied(metadata map[string]string) map[string]string {
	if len(metadata) == 0 {
		return nil
	}
	result := make(map[string]string, len(metadata))
	for name, text := range metadata {
		result[name] = text
	}
	return result
}

// onRenamed gives the running version another key and other metadata. The loop calls it only while
// no version is being applied.
func (w *Worker) onRenamed(model string, key wbp.Key, metadata map[string]string) {
	m := w.models[model]
	if running := m.running.Load(); running != nil {
		renamed := *running
		renamed.Epoch, renamed.Version, renamed.Metadata = key.Epoch, key.Version, copied(metadata)
		m.running.Store(&renamed)
	}
}

// Read calls fn with a view of a model's weights, which do not change until fn returns. fn may also
// read the registered slices, but must not call Read. If an apply is in progress, Read waits for its
// end, at most until ctx ends. It returns ErrNoVersion if the model runs no version.
func (w *Worker) Read(ctx context.Context, model string, fn func(v View)) error {
	m := w.models[model]
	if m == nil {
		return optionErrorf("this worker has no model %q; see Options.Models", model)
	}
	if err := m.guard.lockRead(ctx); err != nil {
		return err
	}
	defer m.guard.unlockRead()
	running := m.running.Load()
	if running == nil {
		return ErrNoVersion
	}
	fn(m.view(*running))
	return nil
}

// Snapshot returns a copy of a model's weights, all of one version.
func (w *Worker) Snapshot(ctx context.Context, model string) (View, error) {
	var snapshot View
	err := w.Read(ctx, model, func(v View) { snapshot = w.models[model].snapshot(v.Update) })
	return snapshot, err
}

// Stats are counters since the worker was created.
type Stats struct {
	Applied      int   // applied versions
	Failed       int   // failures to receive or apply a version
	NetworkBytes int64 // size of applied versions that were received over the network
	SharedBytes  int64 // size of applied versions that were read from shared memory
	Malformed    int   // malformed messages, which were dropped
}

// Stats returns the current counters.
func (w *Worker) Stats() Stats {
	w.loop.Lock()
	defer w.loop.Unlock()
	stats := w.loop.stats
	stats.Malformed = w.loop.machine.Malformed
	return stats
}

// Close sends bye to the publisher and stops the worker. The weights of the running version stay in
// memory. Close does not wait for BeforeApply or Apply, and may be called more than once.
func (w *Worker) Close() error {
	w.close.Do(func() {
		w.end()
		w.loop.close()
		close(w.loop.events)
		w.free()
	})
	return nil
}

// free releases the staging memory once no goroutine copies from it.
func (w *Worker) free() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var all []*applyJob
	for _, m := range w.models {
		all = append(all, &applyJob{model: m})
	}
	if w.lockAll(ctx, all) != nil {
		return // a goroutine still reads a model, so the memory is never freed
	}
	defer w.unlockAll(all)
	w.loop.Lock()
	defer w.loop.Unlock()
	w.loop.machine.Free()
}

// randomHex returns random bytes as hexadecimal digits.
func randomHex(bytes int) string {
	raw := make([]byte, bytes)
	if _, err := rand.Read(raw); err != nil {
		panic(err) // the system has no random bytes
	}
	return hex.EncodeToString(raw)
}

var notInNames = regexp.MustCompile(`[^A-Za-z0-9._-]`)

// defaultName returns a worker name that the keys allow. If keys is nil, the name is unique: it
// consists of the host, the process id and random digits.
func defaultName(keys *Keys) string {
	host, _ := os.Hostname()
	if host = notInNames.ReplaceAllString(host, "-"); len(host) > 80 {
		host = host[:80]
	}
	unique := fmt.Sprintf("%s-%d-%s", host, os.Getpid(), randomHex(2))
	if keys == nil {
		return unique
	}
	return strings.Replace(keys.Name, "*", unique, 1)
}
