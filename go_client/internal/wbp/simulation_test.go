package wbp

import (
	"bytes"
	"container/heap"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand"
	"testing"
	"time"
)

// A worker recovers on any network that is not down for ever. Each run has a seed: to replay a
// failure, run `go test -run 'TestSimulation/seed17$'`.
func TestSimulation(t *testing.T) {
	seeds := 300
	if testing.Short() {
		seeds = 50
	}
	ran, patched, unpatched := 0, 0, 0
	for seed := 0; seed < seeds; seed++ {
		seed := seed
		t.Run(fmt.Sprintf("seed%d", seed), func(t *testing.T) {
			w := newWorld(t, int64(seed))
			w.run()
			ran, patched, unpatched = ran+1, patched+w.patched, unpatched+w.unpatched
		})
	}
	if ran == seeds && (patched < seeds/4 || unpatched < seeds/10) {
		t.Errorf("%d versions came by patches, and %d patches were of no use: that is too few", patched, unpatched)
	}
}

const publishedMax = 12 // versions of a run

// A world is a machine, a publisher, and a network between them that loses, damages, delays and
// repeats messages, with a simulated clock. Both have keys if the seed is odd.
type world struct {
	t                  *testing.T
	rng                *rand.Rand
	now                time.Duration
	events             eventHeap
	machine            *WorkerMachine
	loss               float64
	damage             float64
	delay              time.Duration
	splits             bool // payloads arrive in two parts
	topics             map[string]bool
	runs               Key
	applying           []*StagedVersion
	jobs               int // patches that are being decoded
	patched, unpatched int

	// The publisher.
	epoch      int64
	latest     *published
	kept       map[Key]*published
	lastLayout string // of the version pushed last
	known      bool   // the worker sent hello on this connection
	subscribed bool
	count      int
	vault      *vault // seals messages; nil to send them in the clear
}

// A published is one version of the publisher.
type published struct {
	announce Announce
	layout   []byte
	data     []byte
	digest   string
	decided  bool     // it is auto or committed
	patches  [][]byte // offered by announce
}

// bytes returns the bytes of a patch, or of the version itself.
func (p *published) bytes(by *PatchID) []byte {
	if by == nil {
		return p.data
	}
	for i, offer := range p.announce.Patches {
		if offer.PatchID == *by {
			return p.patches[i]
		}
	}
	return nil
}

type event struct {
	at time.Duration
	do func()
}

type eventHeap []event

func (h eventHeap) Len() int            { return len(h) }
func (h eventHeap) Less(i, j int) bool  { return h[i].at < h[j].at }
func (h eventHeap) Swap(i, j int)       { h[i], h[j] = h[j], h[i] }
func (h *eventHeap) Push(x interface{}) { *h = append(*h, x.(event)) }
func (h *eventHeap) Pop() interface{} {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

func newWorld(t *testing.T, seed int64) *world {
	w := &world{t: t, rng: rand.New(rand.NewSource(seed)), topics: map[string]bool{}, epoch: 100, kept: map[Key]*published{}}
	w.loss = []float64{0, 0.05, 0.3, 0.6}[w.rng.Intn(4)]
	w.damage = []float64{0, 0.05, 0.2}[w.rng.Intn(3)]
	w.delay = time.Duration(1+w.rng.Intn(300)) * time.Millisecond
	w.splits = w.rng.Intn(2) == 0
	id := Identity{Name: "w", Instance: "00000000000000000000000000000000", Keyed: seed%2 == 1, Patches: seed%5 > 0}
	if id.Keyed {
		w.vault = newVault(0)
	}
	mismatch := func(*Layout) string { return "" }
	w.machine = NewWorkerMachine(id, map[string]Model{"m": {Mismatch: mismatch}}, 1<<20, TimingOf(time.Second, 5*time.Second), nil)
	return w
}

func (w *world) after(d time.Duration, do func()) { heap.Push(&w.events, event{w.now + d, do}) }

func (w *world) chance(p float64) bool { return w.rng.Float64() < p }

func (w *world) run() {
	w.every(50*time.Millisecond, w.tick)
	w.every(time.Second, w.beacon)
	w.publish()
	for len(w.events) > 0 {
		next := heap.Pop(&w.events).(event)
		w.now = next.at
		next.do()
		if w.count == publishedMax && w.latest != nil && w.runs == (Key{w.epoch, w.latest.announce.Version}) && w.latest.decided {
			return
		}
		if w.now > time.Hour {
			w.t.Fatalf("after an hour %v runs, not version %d of epoch %d", w.runs, w.latest.announce.Version, w.epoch)
		}
	}
}

func (w *world) every(d time.Duration, do func()) {
	w.after(d, func() { do(); w.every(d, do) })
}

func (w *world) tick() {
	w.check()
	w.perform(w.machine.Connected(false, w.now))
	w.perform(w.machine.Tick(w.now))
	if len(w.applying) > 0 && w.chance(0.3) {
		w.apply()
	}
	if w.chance(0.002) { // the control connection breaks, not the data connection
		w.known = false
		w.perform(w.machine.Connected(true, w.now))
	}
}

// check fails the test if a buffer was lost or is in use twice.
func (w *world) check() {
	h := w.machine.followers["m"].versions
	used, waiting, dropped := len(h.inPhases(arriving, staged, ready, applying)), len(h.inPhases(ready)), w.jobs
	v := h.inPhase(arriving)
	if v != nil && v.transfer.job != nil {
		dropped--
	}
	if b := h.base; b != nil {
		original, needs := w.kept[Key{b.running.Epoch, b.running.Version}], w.jobs
		if v != nil && v.transfer.base == b && v.transfer.job == nil {
			needs++
		}
		if !bytes.Equal(b.data, original.data) || b.users > needs || b.users == 0 && b.running != *w.machine.followers["m"].running() {
			w.t.Fatalf("%v is kept for %d patches, and %d arrive", b.running, b.users, needs)
		}
	}
	if used += dropped; used != h.buffers.taken || used > BuffersMax || waiting != len(w.applying) {
		w.t.Fatalf("%d buffers are taken, %d used, %d for %d versions that are ready", h.buffers.taken, used, waiting,
			len(w.applying))
	}
	for _, begun := range h.inPhases(arriving, staged, ready, applying) {
		if begun.lacks != aMemory {
			w.t.Fatalf("version %v has begun, and lacks a %s", begun.Key, begun.lacks)
		}
	}
	if waits := h.inPhase(announced); waits != nil && (waits.lacks == aLayout) != (waits.layout == nil) {
		w.t.Fatalf("version %v waits for a %s", waits.Key, waits.lacks)
	}
	if v != nil && v.transfer.requestedCount > WindowChunks {
		w.t.Fatalf("%d chunks are outstanding", v.transfer.requestedCount)
	}
}

// apply applies the next ready version, as Receive does for a user.
func (w *world) apply() {
	v := w.applying[0]
	w.applying = w.applying[1:]
	original := w.kept[v.Key]
	digest, err := v.Copy(func(data []byte) {
		if original == nil || !bytes.Equal(data, original.data) {
			w.t.Fatalf("version %v is not what was published", v.Key)
		}
	})
	switch {
	case err != nil || digest != original.digest:
		w.t.Fatalf("version %v: digest %s, %v", v.Key, digest, err)
	case !original.decided:
		w.t.Fatalf("version %v was not committed", v.Key)
	case !v.Key.Newer(w.runs):
		w.t.Fatalf("version %v after %v", v.Key, w.runs)
	}
	w.machine.ApplyStarted(v)
	switch {
	case w.chance(0.02):
		w.perform(w.machine.Failed(v, "the user's code failed", true, w.now))
		w.renew()
		return
	case w.chance(0.02): // half-way: this version or an older one is retried until one is applied
		w.runs = Key{}
		w.perform(w.machine.Failed(v, "the user's code failed half-way", false, w.now))
		return
	}
	if v.Patch != nil {
		w.patched++
	}
	w.runs = v.Key
	w.perform(w.machine.Applied(v, digest, w.now))
}

// renew publishes once more, since a version that the user's code rejected is not retried.
func (w *world) renew() {
	if w.count == publishedMax {
		w.count--
		w.publish()
	}
}

func (w *world) perform(effects []Effect) {
	for _, effect := range effects {
		switch effect := effect.(type) {
		case Send:
			header := Encode(effect.Message)
			w.travel(header, nil, func(header, _ []byte) { w.heard(header) })
		case Subscribe:
			if w.topics[effect.Topic] = effect.On; effect.On && effect.Topic == "m/ctl" {
				w.after(w.delay, w.beacon)
			}
		case Ready:
			if len(w.applying) > 0 {
				w.perform(w.machine.Dropped(w.applying[0], w.now))
				w.applying = w.applying[1:]
			}
			w.applying = append(w.applying, effect.Version)
		case DecodePatch:
			w.jobs++
			w.after(time.Duration(w.rng.Intn(500))*time.Millisecond, func() {
				w.jobs--
				w.perform(w.machine.Decoded(effect.Job, effect.Job.Run(), 0, w.now))
			})
		case Unpatched:
			w.unpatched++
		case Rejected:
			if !w.mayFail(effect.Code, effect.Text) {
				w.t.Fatalf("rejected: %v", effect)
			}
		}
	}
}

// travel delivers a message later, unless the message is lost. It may deliver the message twice, or
// damaged.
func (w *world) travel(header, payload []byte, arrive func(header, payload []byte)) {
	for times := 1; times > 0; times-- {
		if w.chance(w.loss) {
			continue
		}
		if w.chance(w.loss / 4) {
			times++
		}
		if len(payload) > 0 && w.chance(w.damage) {
			payload = append([]byte{}, payload...)
			payload[w.rng.Intn(len(payload))] ^= 1
		}
		w.after(time.Duration(w.rng.Int63n(int64(w.delay))), func() { arrive(header, payload) })
	}
}

// The publisher.

func (w *world) publish() {
	w.count++
	if w.chance(0.15) { // the publisher restarts
		w.epoch++
		w.known, w.subscribed, w.latest, w.lastLayout = false, false, nil, ""
		if w.vault != nil {
			w.vault = newVault(byte(w.epoch))
		}
	}
	if w.vault != nil && w.chance(0.2) {
		w.vault.rekey()
	}
	number := int64(1)
	if w.latest != nil {
		number = w.latest.announce.Version + 1
		w.latest.decided = true
	}
	p := w.version(number)
	if w.chance(0.6) {
		p = w.trained(number)
	}
	w.latest = p
	w.kept[Key{w.epoch, number}] = p
	w.push(p)
	w.after(10*time.Second, func() { p.decided = true }) // enough other workers have staged it
	if w.count < publishedMax {
		w.after(time.Duration(w.rng.Intn(4000))*time.Millisecond, w.publish)
	}
}

func (w *world) version(number int64) *published {
	size := []int64{0, 1, 40, 1000, 3000}[w.rng.Intn(5)]
	text := fmt.Sprintf(`{"x":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, size, size)
	layout := make([]byte, 8, 8+len(text))
	binary.LittleEndian.PutUint64(layout, uint64(len(text)))
	layout = append(layout, text...)
	parsed, err := ParseLayout(layout)
	if err != nil {
		w.t.Fatal(err)
	}
	data := make([]byte, size)
	w.rng.Read(data)
	commit, acknowledge := "auto", "applied"
	switch w.rng.Intn(4) {
	case 0:
		commit, acknowledge = "together", "staged"
	case 1:
		acknowledge = "staged"
	}
	chunk := int64(1 + w.rng.Intn(100))
	if w.chance(0.2) {
		chunk = 4096
	}
	return &published{
		announce: Announce{Model: "m", Epoch: w.epoch, Version: number, Layout: parsed.ID, LayoutBytes: int64(len(layout)),
			Bytes: size, ChunkBytes: chunk, Commit: commit, Acknowledge: acknowledge, Encoding: "raw"},
		layout: layout, data: data, digest: DigestOf(parsed.ID, data, chunk), decided: commit == "auto",
	}
}

// trained returns a version that differs from the previous one in a few bytes, with patches, some
// of which are unusable.
func (w *world) trained(number int64) *published {
	p := patchedVersion(number, byte(w.rng.Intn(256)))
	p.announce.Epoch, p.announce.Keep = w.epoch, w.chance(0.9)
	p.announce.Commit, p.decided = "together", false
	if p.announce.Acknowledge = "staged"; w.chance(0.7) {
		p.announce.Commit, p.decided = "auto", true
	}
	for back := int64(1); back <= 3; back++ {
		base := w.kept[Key{w.epoch, number - back}]
		if base == nil || base.announce.Layout != p.announce.Layout || w.chance(0.2) {
			continue
		}
		p.offer(base)
		if last := p.patches[len(p.patches)-1]; w.chance(0.1) {
			last[w.rng.Intn(len(last))] ^= 1
		}
	}
	return p
}

// announcement returns the current announcement of a version.
func (p *published) announcement() *Announce {
	a := p.announce
	if p.decided {
		a.Commit = "auto"
	}
	return &a
}

// push publishes the messages of a version in order.
func (w *world) push(p *published) {
	if p.data != nil && int64(len(p.data)) <= p.announce.ChunkBytes && len(p.data) > 0 && w.lastLayout == p.announce.Layout && w.chance(0.7) {
		a := p.announcement()
		a.Whole = &Whole{CRC: CRC32C(p.data), Digest: p.digest}
		w.publishOn("m/ctl", a, p.data)
		return
	}
	layout := p.layout
	if w.lastLayout == p.announce.Layout {
		layout = nil
	}
	w.lastLayout = p.announce.Layout
	w.publishOn("m/ctl", p.announcement(), layout)
	if len(p.patches) > 0 {
		by := &p.announce.Patches[0].PatchID
		for i := int64(0); i < p.plan(by).Count(); i++ {
			w.publishOn("m/dlt", p.chunkOf(by, i), p.piece(by, i))
		}
		w.publishOn("m/dlt", &End{Model: "m", Epoch: p.announce.Epoch, Version: p.announce.Version, Digest: p.digest, Patch: by}, nil)
		if w.chance(0.5) { // all workers run its base
			return
		}
	}
	for i := int64(0); i < p.plan(nil).Count() && i < 40; i++ {
		w.publishOn("m/dat", p.chunk(i), p.payload(i))
	}
	w.publishOn("m/ctl", &End{Model: "m", Epoch: p.announce.Epoch, Version: p.announce.Version, Digest: p.digest}, nil)
}

func (p *published) plan(by *PatchID) Plan {
	return Plan{int64(len(p.bytes(by))), p.announce.ChunkBytes}
}

// piece returns the bytes of a chunk of a patch, or of the version itself.
func (p *published) piece(by *PatchID, index int64) []byte {
	begin, end := p.plan(by).Span(index)
	return p.bytes(by)[begin:end]
}

func (p *published) chunkOf(by *PatchID, index int64) *Chunk {
	return &Chunk{Model: "m", Epoch: p.announce.Epoch, Version: p.announce.Version, Index: index,
		CRC: CRC32C(p.piece(by, index)), Patch: by}
}

func (p *published) payload(index int64) []byte { return p.piece(nil, index) }

func (p *published) chunk(index int64) *Chunk { return p.chunkOf(nil, index) }

func (w *world) beacon() {
	b := &Beacon{Model: "m", Epoch: w.epoch}
	if w.latest != nil && w.latest.decided {
		b.Version = w.latest.announce.Version
	}
	w.publishOn("m/ctl", b, nil)
}

func (w *world) publishOn(topic string, m Message, payload []byte) {
	if w.vault != nil {
		m, payload = w.vault.published(m, payload, w.announcementOf(m))
	}
	w.travel(Encode(m), payload, func(header, payload []byte) {
		if w.topics[topic] {
			w.deliver(header, payload, w.machine.ReceivePublished, [][]byte{[]byte(topic)})
		}
	})
}

// announcementOf returns the announcement of a chunk's version.
func (w *world) announcementOf(m Message) *Announce {
	if chunk, ok := m.(*Chunk); ok {
		return &w.kept[Key{chunk.Epoch, chunk.Version}].announce
	}
	return nil
}

func (w *world) answer(m Message, payload []byte) {
	if w.vault != nil {
		m, payload = w.vault.answered(m, payload, w.announcementOf(m))
	}
	w.travel(Encode(m), payload, func(header, payload []byte) { w.deliver(header, payload, w.machine.Receive, nil) })
}

// deliver passes a message to the machine. It receives the payload into the machine's lease, at
// once or with other events in between, and sometimes incompletely.
func (w *world) deliver(header, payload []byte, take func([][]byte, *Lease, time.Duration) []Effect, frames [][]byte) {
	frames = append(frames, header)
	if payload == nil {
		w.perform(take(frames, nil, w.now))
		return
	}
	payload = append([]byte{}, payload...) // it is decrypted in place
	lease := w.machine.LeaseFor(header, len(payload))
	if lease == nil || len(payload) == 0 || !w.splits {
		if lease != nil {
			lease.Cancel()
		}
		w.perform(take(append(frames, payload), nil, w.now))
		return
	}
	half := w.rng.Intn(len(payload))
	lease.Received(copy(lease.Room(), payload[:half]))
	w.after(time.Duration(w.rng.Intn(100))*time.Millisecond, func() {
		if w.chance(0.05) {
			lease.Cancel()
			return
		}
		if lease.Room() != nil {
			lease.Received(copy(lease.Room(), payload[half:]))
		}
		w.perform(take(append(frames, lease.Payload()), lease, w.now))
	})
}

// heard processes a message of the worker.
func (w *world) heard(header []byte) {
	var m struct {
		Type    string
		Epoch   int64
		Version int64
		First   int64
		Count   int64
		Layout  bool
		Digest  string
		Token   int64
		Code    Code
		Text    string
		Patch   *PatchID
	}
	if err := json.Unmarshal(header, &m); err != nil {
		w.t.Fatal(err)
	}
	key := Key{m.Epoch, m.Version}
	switch {
	case m.Type == "hello":
		w.known = true
		welcome := &Welcome{Epoch: w.epoch, Data: "tcp://*:1", PingMS: 1000, LostMS: 5000, Models: w.versions(), Features: []string{}}
		if w.vault != nil {
			welcome.Keys = w.vault.told()
		}
		w.answer(welcome, nil)
	case !w.known:
		w.answer(&Refuse{Code: CodeUnknownWorker, Text: "who are you?"}, nil)
	case m.Type == "ping":
		w.answer(&Pong{Token: m.Token, Epoch: w.epoch, Models: w.versions()}, nil)
		if w.vault != nil {
			w.answer(&Rekey{Epoch: w.epoch, Keys: w.vault.told()}, nil)
		}
	case m.Type == "fetch":
		w.fetched(key, m.First, m.Count, m.Layout, m.Patch)
	case m.Type == "staged" && w.kept[key] != nil && m.Epoch == w.epoch:
		if m.Digest != w.kept[key].digest {
			w.t.Fatalf("staged %v with another digest", key)
		}
		if w.chance(0.3) {
			w.kept[key].decided = true
		}
		if w.kept[key].decided {
			w.answer(&Commit{Model: "m", Epoch: m.Epoch, Version: m.Version, Digest: m.Digest}, nil)
		}
	case m.Type == "applied" && (w.kept[key] == nil || w.kept[key].digest != m.Digest):
		w.t.Fatalf("applied %v with digest %q", key, m.Digest)
	case m.Type == "failed" && !w.mayFail(m.Code, m.Text):
		w.t.Fatalf("failed: %s", header)
	}
}

// mayFail reports whether a version may fail with this code: damaged sealed messages are ignored
// (E4), but all answers may be lost for as long as the worker retries (W12).
func (w *world) mayFail(code Code, text string) bool {
	damaged := code == CodeDigestMismatch || code == CodeLayoutInvalid
	return code == CodeApply || text == nothingFits || damaged && w.vault == nil
}

func (w *world) versions() map[string]int64 {
	if w.latest == nil || !w.latest.decided {
		return map[string]int64{}
	}
	return map[string]int64{"m": w.latest.announce.Version}
}

func (w *world) fetched(key Key, first, count int64, layout bool, by *PatchID) {
	p := w.kept[key]
	if key.Version == 0 && w.latest != nil && w.latest.decided {
		p = w.latest
	}
	old := w.latest != nil && key.Version != 0 && key.Version < w.latest.announce.Version-1
	if p == nil || key.Epoch != w.epoch || old {
		model := "m"
		w.answer(&Refuse{Code: CodeGone, Text: "gone", Model: &model, Epoch: key.Epoch, Version: key.Version}, nil)
		return
	}
	if by != nil && (p.bytes(by) == nil || w.chance(0.1)) {
		model := "m"
		w.answer(&Refuse{Code: CodeNoPatch, Text: "no such patch", Model: &model, Epoch: key.Epoch, Version: key.Version}, nil)
		return
	}
	for i := first; i < first+count; i++ {
		w.answer(p.chunkOf(by, i), p.piece(by, i))
	}
	if count == 0 && by == nil {
		var payload []byte
		if layout {
			payload = p.layout
		}
		w.answer(p.announcement(), payload)
	}
	if count == 0 {
		w.answer(&End{Model: "m", Epoch: p.announce.Epoch, Version: p.announce.Version, Digest: p.digest, Patch: by}, nil)
	}
}
