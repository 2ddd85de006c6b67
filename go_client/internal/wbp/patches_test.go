package wbp

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
)

const (
	patchChunk = 250 // bytes: a version has two chunks, and a patch one
	decodeTime = 1234 * time.Microsecond
)

// patchedVersion returns a version of 30 bytes that change and 300 that do not.
func patchedVersion(number int64, value byte) *published {
	text := `{"x":{"dtype":"U8","shape":[30],"data_offsets":[0,30]},"y":{"dtype":"I8","shape":[300],"data_offsets":[30,330]}}`
	layout := append([]byte{byte(len(text)), 0, 0, 0, 0, 0, 0, 0}, text...)
	parsed, _ := ParseLayout(layout)
	data := append(bytes.Repeat([]byte{value}, 30), make([]byte, 300)...)
	a := Announce{Model: "m", Epoch: 7, Version: number, Layout: parsed.ID, LayoutBytes: int64(len(layout)), Bytes: 330,
		ChunkBytes: patchChunk, Commit: "auto", Acknowledge: "applied", Encoding: "raw", Keep: true}
	return &published{announce: a, layout: layout, data: data, digest: DigestOf(parsed.ID, data, patchChunk)}
}

// rawPatch returns a patch of unchanged and raw blocks.
func rawPatch(layout *Layout, base, target []byte, chunk int64) []byte {
	out := append([]byte(patchMagic), 0, 0, 0, 0)
	out = binary.LittleEndian.AppendUint32(out, uint32(chunk))
	out = binary.LittleEndian.AppendUint64(out, uint64(layout.Bytes))
	for _, id := range []string{layout.ID, DigestOf(layout.ID, base, chunk), DigestOf(layout.ID, target, chunk)} {
		raw, _ := hex.DecodeString(id)
		out = append(out, raw...)
	}
	for _, whole := range dtypeRuns(layout) {
		for _, group := range whole.cut(groupBlocks * blockElements) {
			var bodies []byte
			for _, b := range group.cut(blockElements) {
				body := target[b.begin:b.end]
				if bytes.Equal(base[b.begin:b.end], body) {
					out = append(out, byte(unchangedBlock))
					continue
				}
				out = binary.AppendUvarint(out, uint64(rawBlock)|uint64(len(body))<<2)
				bodies = append(bodies, body...)
			}
			out = append(out, bodies...)
		}
	}
	return out
}

// offer adds a patch on another version to a version.
func (p *published) offer(base *published) *PatchID {
	layout, _ := ParseLayout(p.layout)
	patch := rawPatch(layout, base.data, p.data, p.announce.ChunkBytes)
	id := PatchID{Encoding: Delta, Epoch: base.announce.Epoch, Version: base.announce.Version}
	p.announce.Patches = append(p.announce.Patches, PatchOffer{PatchID: id, Digest: base.digest, Bytes: int64(len(patch))})
	p.patches = append(p.patches, patch)
	return &id
}

// offerOf returns the offer of a patch; nil if there is none.
func offerOf(a *Announce, id *PatchID) *PatchOffer {
	for i := range a.Patches {
		if id != nil && a.Patches[i].PatchID == *id {
			return &a.Patches[i]
		}
	}
	return nil
}

// A taker is a worker in a session that accepts patches, with the effects of its machine.
type taker struct {
	*WorkerMachine
	t         *testing.T
	vault     *vault // seals messages; nil to send them in the clear
	now       time.Duration
	asked     []*Fetch
	jobs      []*Patching
	ready     []*StagedVersion
	said      []Message // except fetches
	renamed   []Renamed
	unpatched []string
	topics    map[string]bool
	withdrawn bool // the publisher no longer has patches
}

func newTaker(t *testing.T, sealed bool) *taker {
	k := &taker{WorkerMachine: fuzzedMachine(sealed), t: t, topics: map[string]bool{"m/dat": true}}
	if sealed {
		k.vault = newVault(1)
		k.keyring.Begin(k.vault.told(), time.Hour)
	}
	return k
}

func (k *taker) versions() *versionStore { return k.followers["m"].versions }

func (k *taker) do(effects []Effect) {
	for _, effect := range effects {
		switch effect := effect.(type) {
		case Send:
			if fetch, ok := effect.Message.(*Fetch); ok {
				k.asked = append(k.asked, fetch)
			} else {
				k.said = append(k.said, effect.Message)
			}
		case Subscribe:
			k.topics[effect.Topic] = effect.On
		case DecodePatch:
			k.jobs = append(k.jobs, effect.Job)
		case Ready:
			k.ready = append(k.ready, effect.Version)
		case Unpatched:
			k.unpatched = append(k.unpatched, effect.Why)
		case Renamed:
			k.renamed = append(k.renamed, effect)
		case Rejected:
			k.t.Fatalf("%+v", effect)
		}
	}
}

// control passes a control message to the worker. p is the version that it is about, or nil.
func (k *taker) control(p *published, m Message, payload []byte) {
	if k.vault != nil && p != nil {
		m, payload = k.vault.answered(m, payload, &p.announce)
	}
	k.do(k.Receive(framesOf(m, payload), nil, k.now))
}

func (k *taker) published(p *published, m Message, payload []byte) {
	if k.vault != nil {
		m, payload = k.vault.published(m, payload, &p.announce)
	}
	k.do(k.ReceivePublished(append([][]byte{nil}, framesOf(m, payload)...), nil, k.now))
}

// decode decodes the pending patches.
func (k *taker) decode() {
	for len(k.jobs) > 0 {
		job := k.jobs[0]
		k.jobs = k.jobs[1:]
		k.do(k.Decoded(job, job.Run(), decodeTime, k.now))
	}
}

func (k *taker) apply(p *published) {
	k.t.Helper()
	if len(k.ready) != 1 {
		k.t.Fatalf("%d versions are ready, not version %d", len(k.ready), p.announce.Version)
	}
	v := k.ready[0]
	k.ready = nil
	_, _ = v.Copy(func(data []byte) {
		if v.Key.Version != p.announce.Version || !bytes.Equal(data, p.data) {
			k.t.Fatalf("version %d is not what was published", v.Key.Version)
		}
	})
	k.ApplyStarted(v)
	k.do(k.WorkerMachine.Applied(v, v.Digest, k.now))
}

// serve answers requests until a version is applied. It returns how the version was received.
func (k *taker) serve(p *published) string {
	k.t.Helper()
	for len(k.asked)+len(k.jobs) > 0 {
		asked := k.asked
		k.asked = nil
		for _, f := range asked {
			k.answer(p, f)
		}
		k.decode()
	}
	k.apply(p)
	applied := k.said[len(k.said)-1].(*Applied)
	if applied.Digest != p.digest || applied.Version != p.announce.Version {
		k.t.Fatalf("%+v", applied)
	}
	if took := time.Duration(applied.DecodeUS) * time.Microsecond; took != 0 && took != decodeTime || (took == 0) != (applied.Patch == nil) {
		k.t.Fatalf("%+v was decoded in %v", applied.Patch, took)
	}
	if applied.Patch == nil {
		return "raw"
	}
	return fmt.Sprintf("%s on %d", applied.Patch.Encoding, applied.Patch.Version)
}

func (k *taker) answer(p *published, f *Fetch) {
	if f.Patch != nil && k.withdrawn {
		k.control(nil, &Refuse{Code: CodeNoPatch, Text: "gone", Model: &f.Model, Epoch: f.Epoch, Version: f.Version}, nil)
		return
	}
	for i := f.First; i < f.First+f.Count; i++ {
		k.control(p, p.chunkOf(f.Patch, i), p.piece(f.Patch, i))
	}
	if f.Count == 0 {
		k.control(p, p.announcement(), nil)
		k.control(p, &End{Model: "m", Epoch: 7, Version: p.announce.Version, Digest: p.digest, Patch: f.Patch}, nil)
	}
}

// push publishes a version as a patch, or whole if by is nil. It returns how the version was
// received.
func (k *taker) push(p *published, by *PatchID) string {
	k.t.Helper()
	k.published(p, p.announcement(), nil)
	for i := int64(0); i*patchChunk < int64(len(p.bytes(by))); i++ {
		k.published(p, p.chunkOf(by, i), p.piece(by, i))
	}
	k.published(p, &End{Model: "m", Epoch: 7, Version: p.announce.Version, Digest: p.digest, Patch: by}, nil)
	return k.serve(p)
}

// first makes the worker run a first version, fetched whole.
func (k *taker) first() *published {
	k.t.Helper()
	p := patchedVersion(1, 1)
	k.control(p, p.announcement(), p.layout)
	if came := k.serve(p); came != "raw" || k.versions().base == nil || !k.topics["m/dat"] {
		k.t.Fatalf("%s, %+v", came, k.topics)
	}
	return p
}

func (k *taker) expect(got, want string) {
	k.t.Helper()
	if got != want {
		k.t.Fatalf("it came as %s, not %s", got, want)
	}
}

func TestPatchesAreTaken(t *testing.T) {
	for _, sealed := range []bool{false, true} {
		k := newTaker(t, sealed)
		one, two, three, four, five := k.first(), patchedVersion(2, 2), patchedVersion(3, 3), patchedVersion(4, 4), patchedVersion(5, 5)
		k.expect(k.push(two, two.offer(one)), "delta-1 on 1") // not subscribed to patches yet, so it fetches
		if k.topics["m/dat"] || !k.topics["m/dlt"] {
			t.Fatalf("%v", k.topics)
		}
		by := three.offer(two)
		k.published(three, three.announcement(), nil)
		if len(k.asked) != 0 {
			t.Fatal("what will be pushed is fetched")
		}
		k.expect(k.push(three, by), "delta-1 on 2")
		four.offer(one) // the first one, which is pushed
		four.offer(three)
		k.published(four, four.announcement(), nil)
		if len(k.asked) != 2 {
			t.Fatal("a patch that is not pushed is waited for")
		}
		k.expect(k.serve(four), "delta-1 on 3")
		five.announce.Keep = false
		k.expect(k.push(five, nil), "raw")
		if !k.topics["m/dat"] || k.topics["m/dlt"] || k.versions().base != nil || k.versions().buffers.taken != 0 || len(k.unpatched) > 0 {
			t.Fatalf("%v, %v", k.topics, k.unpatched)
		}
		k.Free()
	}
}

func TestWhyAVersionIsNotPatched(t *testing.T) {
	for name, c := range map[string]struct {
		change func(k *taker, two *published)
		says   string
	}{
		"its bytes were not kept": {func(k *taker, _ *published) { k.versions().setPatchBase(nil, nil) }, "version 1 of epoch 7 runs here, and its bytes were not kept; there are patches on 1"},
		"another digest":          {func(_ *taker, p *published) { p.announce.Patches[0].Digest = p.digest }, "runs here; there are patches on 1"},
		"another version":         {func(_ *taker, p *published) { p.announce.Patches[0].Version = 9 }, "there are patches on 9"},
		"another epoch":           {func(_ *taker, p *published) { p.announce.Patches[0].Epoch = 6 }, "there are patches on 1"},
		"another encoding":        {func(_ *taker, p *published) { p.announce.Patches[0].Encoding = "delta-2" }, "there are patches on 1"},
		"larger than the version": {func(_ *taker, p *published) { p.announce.Patches[0].Bytes = 331 }, "there are patches on 1"},
		"another layout": {func(k *taker, _ *published) {
			other := *k.versions().base.layout
			other.ID = "x"
			k.versions().base.layout = &other
		}, "there are patches on 1"},
		"nothing runs": {func(k *taker, _ *published) {
			k.versions().move(k.versions().inPhase(running), torn)
			k.versions().setPatchBase(nil, nil)
		}, "nothing runs here, and its bytes were not kept"},
		"patches are not taken": {func(k *taker, _ *published) { k.followers["m"].patches.accepted = false }, ""},
		"there are none":        {func(_ *taker, p *published) { p.announce.Patches = nil }, ""},
		"it is in the announcement": {func(_ *taker, p *published) {
			p.announce.Whole, p.announce.ChunkBytes = &Whole{CRC: CRC32C(p.data), Digest: p.digest}, 1000
		}, ""},
	} {
		k := newTaker(t, false)
		one, two := k.first(), patchedVersion(2, 2)
		two.offer(one)
		var payload []byte
		if c.change(k, two); two.announce.Whole != nil {
			payload = append([]byte{1}, two.data[1:]...) // damaged: it is fetched
		}
		k.control(two, two.announcement(), payload)
		if len(k.asked) == 0 {
			t.Errorf("%s: it is not fetched", name)
		}
		var why []string
		for _, f := range k.asked {
			if f.Patch != nil {
				t.Errorf("%s: %+v", name, f)
			}
			if len(why) == 0 || why[0] != f.Unpatched { // the same in all fetches, since any may be the only one to arrive
				why = append(why, f.Unpatched)
			}
		}
		if two.announce.Whole == nil && (len(why) != 1 || !strings.Contains(why[0], c.says) || c.says == "" && why[0] != "") {
			t.Errorf("%s: %q", name, why)
		}
	}
}

// If a patch is unusable, the whole version is fetched. The running version stays meanwhile, and
// the next patch is accepted.
func TestAPatchThatIsOfNoUse(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(k *taker, two *published)
		says  string
	}{
		"the base has changed": {func(k *taker, _ *published) { k.versions().base.data[100] ^= 1 }, "for the base"},
		"it leads elsewhere, and says so": {func(k *taker, p *published) {
			layout, _ := ParseLayout(p.layout)
			p.patches[0] = rawPatch(layout, k.versions().base.data, patchedVersion(2, 9).data, patchChunk)
		}, "was announced"},
		"it leads elsewhere": {func(_ *taker, p *published) { p.patches[0][len(p.patches[0])-2] ^= 1 }, "leads to"},
		"it is none":         {func(_ *taker, p *published) { p.patches[0][0] = 'w' }, "are not a patch"},
		"it has a byte too little": {func(_ *taker, p *published) {
			p.patches[0] = p.patches[0][:len(p.patches[0])-1]
			p.announce.Patches[0].Bytes--
		}, "ends in its entry"},
		"it was withdrawn": {func(k *taker, _ *published) { k.withdrawn = true }, "does not have this patch"},
		"nothing of it comes": {func(k *taker, p *published) {
			k.published(p, p.announcement(), nil)
			for tries := 0; len(k.unpatched) == 0; k.now += k.timing.Ping {
				if k.do(k.Tick(k.now)); len(k.asked) > 0 && k.asked[0].Patch != nil {
					tries++
				}
				if k.asked = nil; k.followers["m"].running().Version != 1 || tries > TriesMax+1 {
					k.t.Fatalf("%d tries", tries)
				}
				k.control(nil, &Pong{Token: k.now.Milliseconds() + 1, Epoch: 7, Models: map[string]int64{}}, nil)
			}
			k.do(k.Tick(k.now)) // the requests for the whole version are repeated
		}, "no more of its chunks"},
	} {
		for _, sealed := range []bool{false, true} {
			k := newTaker(t, sealed)
			one, two, three := k.first(), patchedVersion(2, 2), patchedVersion(3, 3)
			two.offer(one)
			c.spoil(k, two)
			if len(k.asked) == 0 {
				k.control(two, two.announcement(), nil)
			}
			k.expect(k.serve(two), "raw")
			if len(k.unpatched) != 1 || !strings.Contains(k.unpatched[0], c.says) {
				t.Fatalf("%s: %q", name, k.unpatched)
			}
			k.withdrawn = false
			three.offer(two)
			k.control(three, three.announcement(), nil)
			k.expect(k.serve(three), "delta-1 on 2")
			if h := k.versions(); h.buffers.taken != 0 || h.base.users != 0 {
				t.Fatalf("%s: %d buffers are taken, %d need the base", name, h.buffers.taken, h.base.users)
			}
			k.Free()
		}
	}
}

// A patch is not given up as long as chunks of it arrive.
func TestAPatchThatComesSlowly(t *testing.T) {
	timing := TimingOf(time.Second, 5*time.Second)
	a := &Announce{Model: "m", Epoch: 7, Version: 2, Bytes: 100, ChunkBytes: 4}
	transfer := newTransferOfPatch(&PatchOffer{}, nil, a, nil, make([]byte, 8), 0, &timing)
	now := time.Duration(0)
	for _, tries := range []int{TriesMax - 1, TriesMax} {
		for i := 0; i < tries; i++ {
			if transfer.isExhausted() {
				t.Fatalf("it is given up after %d tries", i)
			}
			now += timing.PatienceMax
			transfer.dueFetches(now)
		}
		if isExhausted := transfer.isExhausted(); isExhausted != (tries == TriesMax) {
			t.Fatalf("after %d tries: %v", tries, isExhausted)
		}
		transfer.add(0, checksum(CRC32C(make([]byte, 4))), make([]byte, 4), nil, now, false)
	}
}

// D12: the key of a patch depends on the patch's encoding and base. The patch's size is part of the
// associated data of its chunks.
func TestWhatAPatchIsSealedUnder(t *testing.T) {
	a := &Announce{Model: "m", Epoch: 7, Version: 3, Bytes: 330, ChunkBytes: 250, Encoding: "raw"}
	offer := &PatchOffer{PatchID: PatchID{Encoding: Delta, Epoch: 6, Version: 2}, Bytes: 155}
	if of := subjectOf(a, offer); of != (Subject{"m", "delta-1", Key{7, 3}, Key{6, 2}, 155, 250}) {
		t.Fatalf("%+v", of)
	}
	if of := subjectOf(a, nil); of != (Subject{"m", "raw", Key{7, 3}, Key{}, 330, 250}) {
		t.Fatalf("%+v", of)
	}
}

// After a patch is given up, the whole version is fetched at once, with the reason.
func TestWhyAPatchWasGivenUpIsSaid(t *testing.T) {
	k := newTaker(t, false)
	one, two := k.first(), patchedVersion(2, 2)
	two.offer(one)
	k.withdrawn = true
	k.control(two, two.announcement(), nil)
	v := k.versions().inPhase(arriving)
	asked := k.asked
	k.asked = nil
	k.answer(two, asked[0])
	k.answer(two, asked[1]) // the second refusal changes nothing
	if k.versions().inPhase(arriving) != v || len(k.asked) != 2 || k.asked[0].Unpatched == "" || k.asked[1].Count != 2 || k.asked[1].Patch != nil {
		t.Fatalf("%+v", k.asked)
	}
	k.expect(k.serve(two), "raw")
}

// D9: while a patch is arriving, messages about another patch or about no patch have no effect.
// While no patch is arriving, messages about a patch have no effect.
func TestPatchesAreToldApart(t *testing.T) {
	k := newTaker(t, false)
	one, two := k.first(), patchedVersion(2, 2)
	by := two.offer(one)
	other := &PatchID{Encoding: Delta, Epoch: 7, Version: 9}
	two.announce.Patches = append(two.announce.Patches, PatchOffer{PatchID: *other, Digest: one.digest, Bytes: 200})
	two.patches = append(two.patches, two.patches[0])
	k.control(two, two.announcement(), nil)
	arrives := k.versions().inPhase(arriving).transfer
	for _, wrong := range []*PatchID{nil, other, {Encoding: "raw", Epoch: 7, Version: 1}} {
		chunk := two.chunkOf(by, 0)
		chunk.Patch = wrong
		if lease := k.LeaseFor(Encode(chunk), len(two.patches[0])); lease != nil {
			t.Fatalf("%+v has a place", wrong)
		}
		k.control(two, chunk, two.piece(by, 0))
		k.control(two, &End{Model: "m", Epoch: 7, Version: 2, Digest: two.digest, Patch: wrong}, nil)
		if arrives.Here != 0 || arrives.Digest != "" {
			t.Fatalf("%+v has an effect", wrong)
		}
	}
	k.control(two, two.chunkOf(by, 0), two.piece(by, 0))
	k.control(two, &End{Model: "m", Epoch: 7, Version: 2, Digest: two.digest, Patch: by}, nil)
	if len(k.jobs) != 1 {
		t.Fatal("it is not decoded")
	}
	k.control(two, &End{Model: "m", Epoch: 7, Version: 2, Digest: one.digest, Patch: by}, nil) // it is too late for another digest
	k.asked = nil
	k.expect(k.serve(two), "delta-1 on 1")
	three := patchedVersion(3, 3)
	k.control(three, three.announcement(), nil)
	chunk := three.chunkOf(nil, 0)
	chunk.Patch = by
	k.control(three, chunk, three.piece(nil, 0))
	k.control(three, &End{Model: "m", Epoch: 7, Version: 3, Digest: three.digest, Patch: by}, nil)
	if arrives := k.versions().inPhase(arriving).transfer; arrives.Here != 0 || arrives.Digest != "" {
		t.Fatal("a patch that does not arrive has an effect")
	}
}

// A newer version does not wait for the decoding of a patch, nor write its buffer or base.
func TestANewerVersionWhileAPatchIsDecoded(t *testing.T) {
	k := newTaker(t, false)
	one, two, three, four := k.first(), patchedVersion(2, 2), patchedVersion(3, 3), patchedVersion(4, 4)
	two.offer(one)
	k.control(two, two.announcement(), nil)
	for _, f := range k.asked {
		k.answer(two, f)
	}
	k.asked = nil
	job, h := k.jobs[0], k.versions()
	k.do(k.Tick(4 * time.Second))
	if k.jobs = nil; len(k.asked) > 0 || len(k.said) == 0 {
		t.Fatal("what is here is asked for")
	}
	k.control(three, three.announcement(), nil)
	if v := h.inPhase(arriving); v.Version != 3 || job.isLive() || &v.buffer[0] == &job.buffer[0] || h.buffers.taken != 2 || h.base.users != 1 {
		t.Fatalf("version %d arrives, %d buffers are taken", v.Version, h.buffers.taken)
	}
	k.expect(k.serve(three), "raw") // its base is still being read
	if string(h.base.data) != string(one.data) {
		t.Fatal("the base has changed")
	}
	if fault := job.Run(); fault == "" {
		t.Fatal("it was decoded to the end")
	} else {
		k.do(k.Decoded(job, fault, decodeTime, k.now))
	}
	if h.buffers.taken != 0 || h.base != nil || len(k.unpatched) > 0 {
		t.Fatalf("%d buffers are taken, %v", h.buffers.taken, k.unpatched)
	}
	k.control(four, four.announcement(), nil)
	k.expect(k.serve(four), "raw")
	if h.base == nil {
		t.Fatal("nothing is kept any more")
	}
	k.Free()
}

// A patch on the previously running version is still usable, since the patch leads to a newer
// version.
func TestAnotherVersionRunsWhileAPatchIsDecoded(t *testing.T) {
	k := newTaker(t, false)
	one, two, three := k.first(), patchedVersion(2, 2), patchedVersion(3, 3)
	k.control(two, two.announcement(), nil)
	for len(k.ready) == 0 {
		f := k.asked[0]
		k.asked = k.asked[1:]
		k.answer(two, f)
	}
	k.asked = nil
	three.offer(one)
	k.control(three, three.announcement(), nil)
	k.apply(two)
	if b := k.versions().base; b == nil || b.running.Version != 1 {
		t.Fatalf("%+v is kept", b)
	}
	k.expect(k.serve(three), "delta-1 on 1")
	if b := k.versions().base; b == nil || b.running.Version != 3 || k.versions().buffers.taken != 0 {
		t.Fatalf("%+v is kept", b)
	}
	k.Free()
}

// A model whose size has changed keeps no memory of the old size.
func TestABaseOfAnOldSizeIsNotKept(t *testing.T) {
	k := newTaker(t, false)
	k.first()
	text := `{"x":{"dtype":"U8","shape":[700],"data_offsets":[0,700]}}`
	layout := append([]byte{byte(len(text)), 0, 0, 0, 0, 0, 0, 0}, text...)
	parsed, _ := ParseLayout(layout)
	for number := int64(2); number < 4; number++ {
		larger := patchedVersion(number, 1)
		larger.layout, larger.data = layout, bytes.Repeat([]byte{byte(number)}, 700)
		larger.digest = DigestOf(parsed.ID, larger.data, patchChunk)
		a := &larger.announce
		a.Layout, a.LayoutBytes, a.Bytes = parsed.ID, int64(len(layout)), 700
		k.control(larger, larger.announcement(), layout)
		k.expect(k.serve(larger), "raw")
		free := k.versions().buffers.free
		if len(free) != int(number-2) || len(free) > 0 && len(free[0]) != 700 {
			t.Fatalf("%d buffers are kept once version %d runs", len(free), number)
		}
	}
	k.Free()
}

// A rename of the running version applies to the patch base, too.
func TestARenamedBase(t *testing.T) {
	k := newTaker(t, false)
	one, three := k.first(), patchedVersion(3, 3)
	said := map[string]string{"step": "2"}
	k.control(nil, &Rename{Model: "m", Epoch: 7, Version: 2, Was: *k.followers["m"].running(), Metadata: said}, nil)
	if want := []Renamed{{"m", Key{7, 2}, said}}; !reflect.DeepEqual(k.renamed, want) {
		t.Fatalf("renamed: %v, not %v", k.renamed, want)
	}
	two := *one
	two.announce.Version = 2
	three.offer(&two)
	k.control(three, three.announcement(), nil)
	k.expect(k.serve(three), "delta-1 on 2")
}

// After an apply failed half-way there is no base, and the next version is received whole.
func TestATornModelIsNoBase(t *testing.T) {
	k := newTaker(t, false)
	one, two, three := k.first(), patchedVersion(2, 2), patchedVersion(3, 3)
	two.offer(one)
	k.control(two, two.announcement(), nil)
	for _, f := range k.asked {
		k.answer(two, f)
	}
	k.asked = nil
	k.decode()
	v := k.ready[0]
	k.ready = nil
	k.ApplyStarted(v)
	for _, effect := range k.Failed(v, "half-way", false, k.now) {
		if _, rejected := effect.(Rejected); !rejected {
			k.do([]Effect{effect})
		}
	}
	three.offer(two)
	three.offer(one)
	if k.asked = nil; k.versions().base != nil {
		t.Fatal("the bytes of what runs no more are kept")
	}
	k.control(three, three.announcement(), nil)
	k.expect(k.serve(three), "raw")
}

// With shared memory no base is kept, and no patches are received.
func TestPatchesAndSharedMemory(t *testing.T) {
	k := newTaker(t, false)
	one, two := patchedVersion(1, 1), patchedVersion(2, 2)
	segment := &segmentOf{one.data}
	k.followers["m"].openSegment = func(*Shared, int64) Segment { return segment }
	k.followers["m"].shared = true
	two.offer(one)
	for _, p := range []*published{one, two} {
		segment.data, p.announce.Shared = p.data, &Shared{Path: "/proc/1/fd/1", Token: strings.Repeat("0", 32)}
		for _, acknowledge := range []string{"applied", "staged"} {
			p.announce.Acknowledge, k.asked = acknowledge, nil
			p.announce.Version++
			if k.control(p, p.announcement(), p.layout); len(k.ready) == 0 {
				k.control(p, &End{Model: "m", Epoch: 7, Version: p.announce.Version, Digest: p.digest}, nil)
			}
			if k.apply(p); k.versions().base != nil || k.topics["m/dlt"] {
				t.Fatal("bytes are kept, or patches listened to")
			}
			if applied := k.said[len(k.said)-1].(*Applied); applied.Patch != nil {
				t.Fatalf("%+v", applied)
			}
		}
		two.announce.Version = 10
	}
}

// segmentOf returns a segment that holds any version.
type segmentOf struct{ data []byte }

func (s *segmentOf) Copy(_ string, _ Key, copy func([]byte)) error { copy(s.data); return nil }
func (*segmentOf) Prefault()                                       {}
func (*segmentOf) Release()                                        {}

// patchedStory returns a version and a patch to the next one, in the format of FuzzMachine.
func patchedStory() []byte {
	one, two := patchedVersion(1, 1), patchedVersion(2, 2)
	by := two.offer(one)
	out := pack(framesOf(one.announcement(), one.layout))
	for i := int64(0); i < 2; i++ {
		out = append(out, pack(framesOf(one.chunkOf(nil, i), one.piece(nil, i)))...)
	}
	out = append(out, pack(framesOf(&End{Model: "m", Epoch: 7, Version: 1, Digest: one.digest}, nil))...)
	out = append(out, pack(framesOf(two.announcement(), nil))...)
	out = append(out, pack(framesOf(two.chunkOf(by, 0), two.piece(by, 0)))...)
	return append(out, pack(framesOf(&End{Model: "m", Epoch: 7, Version: 2, Digest: two.digest, Patch: by}, nil))...)
}
