package wbp

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"
	"time"
)

// A vault seals messages as a publisher with keys does.
type vault struct {
	seed   byte
	groups []*GroupKey
	keys   []string // of groups
	count  int64
}

func newVault(seed byte) *vault {
	v := &vault{seed: seed}
	v.rekey()
	return v
}

// rekey rotates the group key.
func (v *vault) rekey() {
	key := bytes.Repeat([]byte{v.seed, byte(len(v.groups))}, 16)
	v.groups, v.keys, v.count = append(v.groups, NewGroupKey(key)), append(v.keys, hex.EncodeToString(key)), 0
}

// told returns the keys that a welcome brings.
func (v *vault) told() []string {
	if len(v.keys) > GroupKeysMax {
		return v.keys[len(v.keys)-GroupKeysMax:]
	}
	return v.keys
}

func (v *vault) group() *GroupKey { return v.groups[len(v.groups)-1] }

// seal returns a sealed copy of a payload, and its tag.
func (v *vault) seal(of Subject, purpose Purpose, index int64, payload []byte) (sealed []byte, tag string) {
	data := of.Associated(purpose, index, int64(len(payload)))
	sealed = gcm(v.group().VersionKey(of)).Seal(nil, Nonce(purpose, index), payload, data)
	return sealed[:len(payload)], hex.EncodeToString(sealed[len(payload):])
}

// answered seals the payload of a control message. a is the announcement of a chunk's version.
func (v *vault) answered(m Message, payload []byte, a *Announce) (Message, []byte) {
	switch m := m.(type) {
	case *Chunk:
		sealed, tag := v.seal(subjectOf(a, offerOf(a, m.Patch)), PurposeChunk, m.Index, payload)
		return &SealedChunk{Model: m.Model, Epoch: m.Epoch, Version: m.Version, Index: m.Index, Key: v.group().ID, Tag: tag, Patch: m.Patch}, sealed
	case *Announce:
		encryption, said := AES256GCM, *m
		said.Encryption = &encryption
		if payload != nil {
			purpose := PurposeLayout
			if m.Whole != nil {
				purpose = PurposeChunk
			}
			sealed, tag := v.seal(subjectOf(m, nil), purpose, 0, payload)
			said.Key, said.Tag, payload = &v.group().ID, &tag, sealed
		}
		return &said, payload
	}
	return m, payload
}

// published seals a published message.
func (v *vault) published(m Message, payload []byte, a *Announce) (Message, []byte) {
	m, payload = v.answered(m, payload, a)
	if _, chunk := m.(*SealedChunk); chunk {
		return m, payload
	}
	return v.message(Encode(m)), payload
}

func (v *vault) message(header []byte) *SealedMessage {
	v.count++
	data := encodeNumbers(PurposeMessage, v.count, int64(len(header)))
	return &SealedMessage{Key: v.group().ID, Count: v.count,
		Sealed: v.group().messages.Seal(nil, Nonce(PurposeMessage, v.count), header, data)}
}

// A keyedWorker is a machine with keys in a session.
type keyedWorker struct {
	*WorkerMachine
	t     *testing.T
	vault *vault
	now   time.Duration
}

func keyedInside(t *testing.T, features ...string) *keyedWorker {
	id := Identity{Name: "w", Instance: strings.Repeat("0", 32), Keyed: true, Patches: true}
	models := map[string]Model{"m": {Mismatch: func(*Layout) string { return "" }}}
	k := &keyedWorker{NewWorkerMachine(id, models, 1<<20, TimingOf(time.Second, 5*time.Second), nil), t, newVault(1), 0}
	k.control(k.welcome(features...), nil)
	return k
}

func (k *keyedWorker) welcome(features ...string) *Welcome {
	return &Welcome{Epoch: 7, Data: "tcp://*:9", PingMS: 1000, LostMS: 5000, Models: map[string]int64{},
		Features: append([]string{}, features...), Keys: k.vault.told()}
}

func (k *keyedWorker) control(m Message, payload []byte) []Effect {
	return k.Receive(framesOf(m, payload), nil, k.now)
}

func (k *keyedWorker) published(m Message, payload []byte) []Effect {
	return k.ReceivePublished(append([][]byte{nil}, framesOf(m, payload)...), nil, k.now)
}

func framesOf(m Message, payload []byte) [][]byte {
	if payload == nil {
		return [][]byte{Encode(m)}
	}
	return [][]byte{Encode(m), payload}
}

// kinds returns the types of sent messages and other effects.
func kinds(effects []Effect) string {
	var out []string
	for _, effect := range effects {
		if send, ok := effect.(Send); ok {
			out = append(out, send.Message.Kind())
		} else {
			out = append(out, strings.TrimPrefix(fmt.Sprintf("%T", effect), "wbp."))
		}
	}
	return strings.Join(out, " ")
}

func versionOf(data []byte, chunk int64) *published {
	text := fmt.Sprintf(`{"x":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, len(data), len(data))
	layout := append([]byte{byte(len(text)), 0, 0, 0, 0, 0, 0, 0}, text...)
	parsed, _ := ParseLayout(layout)
	a := Announce{Model: "m", Epoch: 7, Version: 1, Layout: parsed.ID, LayoutBytes: int64(len(layout)), Bytes: int64(len(data)),
		ChunkBytes: chunk, Commit: "auto", Acknowledge: "applied", Encoding: "raw"}
	return &published{announce: a, layout: layout, data: data, digest: DigestOf(parsed.ID, data, chunk)}
}

// The cipher needs the tag directly after a payload. Decrypt restores the bytes that were there, even
// after a failure.
func TestWhatIsOpenedInItsPlaceLeavesItsNeighboursAlone(t *testing.T) {
	v := newVault(1)
	p := versionOf(bytes.Repeat([]byte("0123456789"), 30), 100)
	for _, room := range []int{0, TagBytes} {
		for forged := 0; forged < 2; forged++ {
			for index := int64(0); index < 3; index++ {
				memory := bytes.Repeat([]byte("n"), 300+room)
				place := memory[100*index : 100*index+100]
				of := subjectOf(&p.announce, nil)
				sealed, tag := v.seal(of, PurposeChunk, index, p.payload(index))
				copy(place, sealed)
				place[5] ^= byte(forged)
				proof, _ := hex.DecodeString(tag)
				opening := NewOpening(v.group().VersionKey(of), of, PurposeChunk, index, 100, proof)
				crc, ok := opening.Decrypt(place, place)
				if ok != (forged == 0) || ok && (crc != CRC32C(p.payload(index)) || !bytes.Equal(place, p.payload(index))) {
					t.Fatalf("chunk %d: %v", index, ok)
				}
				if !ok && bytes.ContainsAny(place, "0123456789") {
					t.Fatal("something can be seen of what is forged")
				}
				if others := bytes.Count(memory, []byte("n")); others != 200+room {
					t.Fatalf("%d bytes beside it were written over", 200+room-others)
				}
			}
		}
	}
}

func TestAWorkerWithKeysTakesNothingInTheClear(t *testing.T) {
	p := versionOf(make([]byte, 40), 16)
	for _, whole := range []*Whole{nil, {CRC: CRC32C(p.data), Digest: p.digest}} {
		a, payload := p.announce, p.layout
		if whole != nil {
			a.Whole, payload = whole, p.data
		}
		k := keyedInside(t)
		if got := k.published(&a, payload); kinds(got) != "ping" { // only the subscription is confirmed
			t.Fatal(kinds(got))
		}
		effects := k.control(&a, payload)
		if failed, ok := effects[0].(Send).Message.(*Failed); !ok || failed.Code != CodeUnsupported {
			t.Fatal(kinds(effects))
		}
	}
	k := keyedInside(t)
	announce, layout := k.vault.answered(&p.announce, p.layout, nil)
	if got := kinds(k.control(announce, layout)); got != "fetch fetch" {
		t.Fatal(got)
	}
	for _, m := range []Message{p.chunk(0), &Beacon{Model: "m", Epoch: 7, Version: 9}, &End{Model: "m", Epoch: 7, Version: 1, Digest: p.digest}, &Refuse{Code: CodeLimit, Text: "no"}} {
		var payload []byte
		if m.Kind() == "chunk" {
			payload = p.payload(0)
		}
		if got := kinds(k.published(m, payload)); got != "ping" && got != "" {
			t.Fatalf("%s: %s", m.Kind(), got)
		}
	}
	k.control(p.chunk(0), p.payload(0))
	if here := k.followers["m"].versions.inPhase(arriving).transfer.Here; here != 0 || k.Malformed != 0 {
		t.Fatalf("%d chunks in the clear were taken, %d messages are malformed", here, k.Malformed)
	}
}

func TestAWorkerWithoutKeysTakesNothingThatIsSealed(t *testing.T) {
	v, p, m := newVault(1), versionOf(make([]byte, 40), 16), fuzzedMachine(false)
	m.Receive(framesOf(&p.announce, p.layout), nil, 0)
	chunk, sealed := v.answered(p.chunk(0), p.payload(0), &p.announce)
	for _, one := range []Message{chunk, v.message(Encode(&Beacon{Model: "m", Epoch: 7, Version: 9})), &Rekey{Epoch: 7, Keys: v.told()}} {
		var payload []byte
		if one == chunk {
			payload = sealed
		}
		if got := m.Receive(framesOf(one, payload), nil, 0); len(got) > 0 {
			t.Fatalf("%s: %s", one.Kind(), kinds(got))
		}
	}
	announce, _ := v.answered(&p.announce, nil, nil)
	announce.(*Announce).Version = 2
	effects := m.Receive(framesOf(announce, nil), nil, 0)
	if failed, ok := effects[0].(Send).Message.(*Failed); !ok || failed.Code != CodeUnsupported {
		t.Fatal(kinds(effects))
	}
}

// A worker keeps the previous key for a while, and requests a key that it does not know.
func TestGroupKeysThatChange(t *testing.T) {
	k := keyedInside(t)
	beacon := func() Message {
		return k.vault.message(Encode(&Beacon{Model: "m", Epoch: 7, Version: k.vault.count + 5}))
	}
	old, older := *k.vault, beacon()
	heard := func(m Message) bool {
		k.followers["m"].planner.requestedAt = never
		return strings.Contains(kinds(k.published(m, nil)), "fetch")
	}
	if !heard(older) || heard(older) {
		t.Fatal("a beacon counts once")
	}
	k.vault.rekey()
	if heard(beacon()) {
		t.Fatal("it has no such key")
	}
	k.now = time.Second
	if got := kinds(k.Tick(k.now)); !strings.Contains(got, "hello") {
		t.Fatalf("it does not ask for the key that it lacks: %s", got)
	}
	if got := kinds(k.Tick(k.now)); strings.Contains(got, "hello") {
		t.Fatal("it asks again and again")
	}
	k.now += k.timing.HelloRetry // the hello was lost, or not sent yet
	if got := kinds(k.Tick(k.now)); !strings.Contains(got, "hello") {
		t.Fatalf("it does not ask again for the key that it lacks: %s", got)
	}
	k.control(&Rekey{Epoch: 7, Keys: k.vault.told()}, nil)
	k.now += k.timing.HelloRetry
	if got := kinds(k.Tick(k.now)); strings.Contains(got, "hello") {
		t.Fatal("it asks for a key that it was told")
	}
	old.count = 5
	if !heard(beacon()) || !heard(old.message(Encode(&Beacon{Model: "m", Epoch: 7, Version: 8}))) {
		t.Fatal("it has both keys")
	}
	k.now += 4 * time.Second
	k.control(&Pong{Epoch: 7, Models: map[string]int64{}}, nil)
	k.now += 2 * time.Second
	k.Tick(k.now)
	if heard(old.message(Encode(&Beacon{Model: "m", Epoch: 7, Version: 9}))) || !heard(beacon()) {
		t.Fatal("the key before is over by now")
	}
	replay := beacon()
	heard(replay)
	k.control(&Refuse{Code: CodeUnknownWorker, Text: "who?"}, nil)
	k.vault.keys = k.vault.keys[1:]
	k.control(k.welcome(), nil) // another session with the same key continues its counts
	if heard(replay) || !heard(beacon()) {
		t.Fatal("a session makes a replay count")
	}
	before := beacon()
	k.vault.rekey()
	k.control(&Refuse{Code: CodeUnknownWorker, Text: "who?"}, nil)
	k.vault.keys = k.vault.keys[1:]
	k.control(k.welcome(), nil)
	if heard(before) || !heard(beacon()) {
		t.Fatal("a session has other keys than those of its welcome")
	}
}

// ids returns the ids of the keys that a worker has.
func (r *Keyring) ids() string {
	var ids []string
	for _, key := range r.keys {
		ids = append(ids, key.ID)
	}
	return strings.Join(ids, " ")
}

// A key that is listed before a known key is older and has expired. Counts are kept.
func TestTheOrderOfGroupKeysThatAreTold(t *testing.T) {
	v, r := newVault(1), NewKeyring()
	v.rekey()
	v.rekey()
	a, b, c := v.groups[0].ID, v.groups[1].ID, v.groups[2].ID
	has := func(now time.Duration, ids ...string) {
		t.Helper()
		if r.expire(now); r.ids() != strings.Join(ids, " ") {
			t.Fatalf("at %v it has %s, not %s", now, r.ids(), ids)
		}
	}
	r.Begin(v.keys[:1], 5)
	r.add(v.keys[:2], 10)
	has(9, a, b)
	r.counts[b] = 7
	has(10, b)
	r.add(v.keys[:2], 20)
	has(15, b)
	has(20, b)
	if r.add(v.keys[:2], 30); r.counts[b] != 7 {
		t.Fatal("replays count")
	}
	r.add([]string{v.keys[0], v.keys[2]}, 40) // both are unknown
	has(39, a, c)
	has(40, c)
	r.Begin(v.keys[:2], 50)
	r.derived.id = a
	has(49, a, b)
	has(50, b)
	if r.derived.id != "" {
		t.Fatal("what was derived from a key outlives it")
	}
}

// The older key came with its successor in a session, or in the welcome.
func TestTheOlderGroupKeyIsOverInTimeOutsideASessionToo(t *testing.T) {
	for _, begins := range []bool{false, true} {
		k := keyedInside(t)
		k.vault.rekey()
		if begins {
			k.control(&Refuse{Code: CodeUnknownWorker, Text: "who?"}, nil)
			k.control(k.welcome(), nil)
		} else {
			k.control(&Rekey{Epoch: 7, Keys: k.vault.told()}, nil)
		}
		k.control(&Refuse{Code: CodeUnknownWorker, Text: "who?"}, nil)
		k.Tick(k.timing.LostAfter - 1)
		if got := k.keyring.ids(); k.inSession() || !strings.Contains(got, " ") {
			t.Fatal(got)
		}
		k.Tick(k.timing.LostAfter)
		if got := k.keyring.ids(); got != k.vault.group().ID {
			t.Fatal(got)
		}
	}
}

// The header of a sealed chunk is not sealed, so any process can forge it.
func TestTheHeaderOfASealedChunkIsNeitherNewsNorASignOfLife(t *testing.T) {
	k := keyedInside(t)
	k.published(k.vault.message(Encode(&Beacon{Model: "m", Epoch: 7, Version: 0})), nil)
	for _, key := range []Key{{7, 1<<53 - 1}, {8, 1}} {
		k.now += k.timing.LostAfter / 2
		forged := &SealedChunk{Model: "m", Epoch: key.Epoch, Version: key.Version, Key: k.vault.group().ID, Tag: strings.Repeat("0", 32)}
		if got := kinds(k.published(forged, make([]byte, 16))); got != "" {
			t.Fatalf("%v: %s", key, got)
		}
	}
	if k.heardAt != 0 {
		t.Fatal("a sign of life")
	}
	said := &SealedChunk{Model: "m", Epoch: 7, Version: 1, Key: k.vault.group().ID, Tag: strings.Repeat("0", 32)}
	if got := kinds(k.control(said, make([]byte, 16))); got != "fetch" {
		t.Fatalf("what the publisher itself says is not news: %q", got)
	}
}

// A message does not count as seen when Place is called. It counts once when it is received.
func TestWhatIsPublishedIsReceivedInItsPlaceAndCountsOnce(t *testing.T) {
	k, p := keyedInside(t), versionOf(bytes.Repeat([]byte("0123456789"), 4), 16)
	receive := func(m Message, payload []byte) string {
		header := Encode(m)
		lease := k.LeaseFor(header, len(payload))
		if lease == nil {
			t.Fatalf("a %s has no place", m.Kind())
		}
		lease.Received(copy(lease.Room(), payload))
		return kinds(k.ReceivePublished([][]byte{nil, header, lease.Payload()}, lease, k.now))
	}
	announce, layout := k.vault.published(&p.announce, p.layout, nil)
	receive(announce, layout)
	v := k.followers["m"].versions.inPhase(arriving)
	if v == nil || k.LeaseFor(Encode(announce), len(layout)) != nil {
		t.Fatal("an announcement counts once")
	}
	for index := int64(2); index >= 0; index-- {
		chunk, sealed := k.vault.published(p.chunk(index), p.payload(index), &p.announce)
		receive(chunk, sealed)
	}
	end, _ := k.vault.published(&End{Model: "m", Epoch: 7, Version: 1, Digest: p.digest}, nil, nil)
	if got := kinds(k.published(end, nil)); got != "Ready" || !bytes.Equal(v.staged.data, p.data) {
		t.Fatalf("%s: %q", got, v.staged.data)
	}
}

func TestTickets(t *testing.T) {
	ticket := func(digit string) string { return "ticket." + strings.Repeat(digit, 32) }
	k := keyedInside(t, ticket("a"))
	connects := func(effects []Effect) (tickets []string) {
		for _, effect := range effects {
			if connect, ok := effect.(Connect); ok {
				tickets = append(tickets, connect.Endpoint+" "+connect.Ticket)
			}
		}
		return tickets
	}
	if got := connects(k.control(k.welcome("x", ticket("b")), nil)); fmt.Sprint(got) != "[tcp://*:9 "+strings.Repeat("b", 32)+"]" {
		t.Fatal(got)
	}
	if got := connects(k.control(k.welcome("ticket.short"), nil)); len(got) != 0 {
		t.Fatal(got)
	}
	k.now = time.Second
	if one, again := kinds(k.WithoutTicket(k.now)), kinds(k.WithoutTicket(k.now)); one != "hello" || again != "" {
		t.Fatalf("%q, then %q", one, again)
	}
	for _, code := range []Code{CodeRevoked, CodeWrongName, CodeNotAllowed} {
		k.control(k.welcome(), nil)
		if got := kinds(k.control(&Refuse{Code: code, Text: "no"}, nil)); got != "Refused" || k.inSession() {
			t.Fatalf("%s: %s", code, got)
		}
	}
	if k.WithoutTicket(time.Hour) != nil {
		t.Fatal("a hello for a ticket outside a session")
	}
	if got := connects(k.control(k.welcome(ticket("c")), nil)); len(got) != 1 {
		t.Fatalf("a session without its ticket: %v", got)
	}
	if got := kinds(k.HandshakeFailed("why")); got != "Refused" || k.inSession() {
		t.Fatal(got)
	}
}
