package wbp

import (
	"encoding/json"
	"math/rand"
	"strings"
	"testing"
	"time"
)

// Valid messages that no publisher would send, in any order, cause no panic, and an honest version
// is ready afterwards.
func TestOddMessages(t *testing.T) {
	for seed := int64(0); seed < 300; seed++ {
		if !oddly(t, rand.New(rand.NewSource(seed))) {
			t.Fatalf("seed %d: an honest version is not taken", seed)
		}
	}
}

const honestEpoch = IntegerMax

var honestLayout = layoutOfText(`{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`)

// An oddity returns random values for the fields of messages.
type oddity struct{ *rand.Rand }

func (o oddity) of(values ...interface{}) interface{} { return values[o.Intn(len(values))] }

func (o oddity) key() map[string]interface{} {
	return map[string]interface{}{"model": o.of("m", "m", "m", "x", strings.Repeat("a", 128)),
		"epoch": o.of(7, 7, 7, 6, 8, 0, IntegerMax-1), "version": o.of(1, 2, 3, 0, IntegerMax)}
}

func (o oddity) patch() map[string]interface{} {
	key := o.key()
	return map[string]interface{}{"encoding": o.of("delta-1", "x"), "epoch": key["epoch"], "version": key["version"],
		"digest": strings.Repeat("0", 64), "nbytes": o.of(1, 4, 100, IntegerMax)}
}

func (o oddity) header(id string) []byte {
	count := func() interface{} { return o.of(0, 1, 2, 4, 1<<20, 1<<26, IntegerMax) }
	digest := func() interface{} { return o.of(id, strings.Repeat("0", 64), strings.Repeat("f", 64)) }
	hex := func(digits int) interface{} { return o.of(strings.Repeat("0", digits), strings.Repeat("f", digits)) }
	shared := map[string]interface{}{"path": o.of("", "/proc/1/fd/1", "x"), "token": hex(32)}
	running := o.key()
	delete(running, "model")
	running["digest"] = o.of("", digest())
	fields := o.key()
	for name, value := range map[string]interface{}{
		"wbp": 1, "layout": digest(), "digest": digest(), "layout_bytes": o.of(len(honestLayout), 10, 1<<20),
		"nbytes": count(), "chunk_bytes": o.of(1, 4, 1<<26), "commit": o.of("auto", "together"),
		"acknowledge": o.of("applied", "staged"), "encoding": o.of("raw", "raw", "x"), "encryption": o.of(nil, nil, AES256GCM, "x"),
		"key": hex(16), "tag": hex(32), "shared": o.of(nil, shared), "hash": o.of(true, false), "keep": o.of(true, false),
		"whole":   o.of(nil, map[string]interface{}{"crc": o.of(0, 1), "digest": digest()}),
		"patches": o.of([]int{}, []interface{}{o.patch()}), "patch": o.of(nil, o.patch()), "was": running, "index": count(),
		"crc": o.of(0, 1, CRC32C([]byte("abcd"))), "metadata": o.of(map[string]string{}, map[string]string{"a\n": "\x1b"}),
		"text": "\x1b", "token": count(), "models": map[string]interface{}{"m": count(), "x": count()}, "features": []string{"x"},
		"code": o.of("gone", "range", "no-patch", "unknown-worker", "limit", "x"), "data": o.of("tcp://*:9", "", "\x1b"),
		"ping_ms": o.of(1, 1000), "lost_ms": o.of(2, 5000), "age_ms": count(), "keys": []interface{}{hex(64)},
		"count": o.of(1, IntegerMax), "sealed": o.of("", "AAAA"),
	} {
		fields[name] = value
	}
	fields["type"] = o.of("welcome", "rekey", "announce", "announce", "announce", "chunk", "chunk", "sealed_chunk", "sealed_message",
		"end", "end", "commit", "abort", "rename", "beacon", "refuse", "ping", "pong", "prepare")
	header, _ := json.Marshal(fields)
	return header
}

// oddly sends such messages to a worker, and reports whether the worker then accepts a valid
// version.
func oddly(t *testing.T, random *rand.Rand) bool {
	o, keyed, now := oddity{random}, random.Intn(4) == 0, time.Second
	m := fuzzedMachine(keyed)
	var ready *StagedVersion
	perform := func(effects []Effect) {
		for len(effects) > 0 {
			effect := effects[0]
			effects = effects[1:]
			switch effect := effect.(type) {
			case Ready:
				ready = effect.Version
			case DecodePatch:
				effects = append(effects, m.Decoded(effect.Job, effect.Job.Run(), 1, now)...)
			}
		}
	}
	parsed, err := ParseLayout(honestLayout)
	if err != nil {
		t.Fatal(err)
	}
	say := func(pushed bool, header []byte, payloads ...[]byte) {
		var lease *Lease
		if len(payloads) > 0 {
			if lease = m.LeaseFor(header, len(payloads[0])); lease != nil {
				copy(lease.Room(), payloads[0])
				lease.Received(len(payloads[0]))
				payloads[0] = lease.Payload()
			}
		}
		if frames := append([][]byte{header}, payloads...); pushed {
			perform(m.ReceivePublished(append([][]byte{nil}, frames...), lease, now))
		} else {
			perform(m.Receive(frames, lease, now))
		}
	}
	for i := 0; i < 60; i++ {
		payloads := [][]byte{append([]byte{}, honestLayout...), []byte("abcd"), {}, make([]byte, 100)}
		say(o.Intn(2) == 0, o.header(parsed.ID), payloads[o.Intn(4):][:o.Intn(2)]...)
		now += []time.Duration{0, 0, time.Millisecond, 3 * time.Second}[o.Intn(4)]
		perform(m.Tick(now))
		if ready != nil && o.Intn(2) == 0 {
			m.ApplyStarted(ready)
			if o.Intn(2) == 0 {
				perform(m.Applied(ready, ready.Digest, now))
			} else {
				perform(m.Failed(ready, "no", o.Intn(2) == 0, now))
			}
			ready = nil
		}
	}
	if keyed {
		return true // it accepts only sealed messages
	}
	for tries := 0; tries < 3; tries++ {
		if ready != nil {
			m.ApplyStarted(ready)
			perform(m.Applied(ready, ready.Digest, now))
		}
		ready = nil
		for until := now + time.Minute; now < until; now += time.Second {
			perform(m.Tick(now))
		}
		say(false, Encode(&Welcome{Epoch: honestEpoch, Data: "tcp://*:9", PingMS: 1000, LostMS: 5000, Models: map[string]int64{},
			Features: []string{}}))
		a := &Announce{Model: "m", Epoch: honestEpoch, Version: IntegerMax, Layout: parsed.ID, LayoutBytes: int64(len(honestLayout)),
			Bytes: 4, ChunkBytes: 4, Commit: "auto", Acknowledge: "applied", Encoding: "raw"}
		crc := CRC32C([]byte("abcd"))
		say(true, Encode(a), append([]byte{}, honestLayout...))
		say(true, Encode(&Chunk{Model: "m", Epoch: honestEpoch, Version: IntegerMax, CRC: crc}), []byte("abcd"))
		say(true, Encode(&End{Model: "m", Epoch: honestEpoch, Version: IntegerMax, Digest: Digest(parsed.ID, 4, []uint32{crc})}))
		if ready != nil && ready.Key == (Key{honestEpoch, IntegerMax}) {
			return true
		}
	}
	return false
}
