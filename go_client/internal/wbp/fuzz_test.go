package wbp

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unicode/utf8"
)

const vectors = "../../../tests/vectors"

// seeds calls add with the frames of every case of a table of the golden vectors.
func seeds(f testing.TB, file string, add func(frames [][]byte)) {
	type source struct{ Text, Hex, File *string }
	var table struct {
		Cases []struct {
			Frames []source
			Header *source
			Steps  []struct{ Control, Data []source }
		}
	}
	text, err := os.ReadFile(filepath.Join(vectors, file))
	if err != nil {
		f.Fatal(err)
	}
	if err := json.Unmarshal(text, &table); err != nil {
		f.Fatal(err)
	}
	read := func(sources []source) (frames [][]byte) {
		for _, s := range sources {
			var frame []byte
			switch {
			case s.Text != nil:
				frame = []byte(*s.Text)
			case s.Hex != nil:
				frame, _ = hex.DecodeString(*s.Hex)
			case s.File != nil:
				frame, _ = os.ReadFile(filepath.Join(vectors, *s.File))
			}
			frames = append(frames, frame)
		}
		return frames
	}
	for _, c := range table.Cases {
		if c.Header != nil {
			c.Frames = []source{*c.Header}
		}
		add(read(c.Frames))
		for _, step := range c.Steps {
			add(read(append(step.Control, step.Data...)))
		}
	}
}

// Decode returns a ProtocolError or a message for any bytes. The message is the same as
// encoding/json decodes.
func FuzzDecode(f *testing.F) {
	seeds(f, "messages.json", func(frames [][]byte) {
		if len(frames) > 0 {
			f.Add(frames[0], len(frames)-1)
		}
	})
	f.Fuzz(func(t *testing.T, header []byte, payloads int) {
		m, err := Decode(header, payloads)
		if err != nil {
			var broken *ProtocolError
			if !errors.As(err, &broken) {
				t.Fatalf("%T: %v", err, err)
			}
			return
		}
		var other map[string]json.RawMessage
		if err := json.Unmarshal(header, &other); err != nil {
			t.Fatalf("taken as %s, but: %v", m.Kind(), err)
		}
		again, err := Decode(Encode(m), payloads)
		if err != nil || string(Encode(again)) != string(Encode(m)) {
			t.Fatalf("%s became %v (%v)", Encode(m), again, err)
		}
	})
}

// ParseLayout returns an error or a layout for any bytes; its tensors cover the data section.
func FuzzLayout(f *testing.F) {
	seeds(f, "layouts.json", func(frames [][]byte) { f.Add(frames[0]) })
	f.Fuzz(func(t *testing.T, header []byte) {
		layout, err := ParseLayout(header)
		if err != nil {
			return
		}
		at := int64(0)
		for i := range layout.Tensors {
			spec := &layout.Tensors[i]
			size, ok := TensorBytes(spec.DType, spec.Shape)
			if !ok || spec.Begin != at || spec.End != at+size || layout.ByName(spec.Name) != spec || !utf8.ValidString(spec.Name) {
				t.Fatalf("tensor %d: %+v", i, spec)
			}
			at = spec.End
		}
		if at != layout.Bytes {
			t.Fatalf("%d bytes, tensors up to %d", layout.Bytes, at)
		}
		for alias, kept := range layout.Aliases {
			if layout.ByName(alias) != layout.ByName(kept) || layout.Metadata[alias] != kept {
				t.Fatalf("alias %q", alias)
			}
		}
		var other map[string]json.RawMessage
		if err := json.Unmarshal(header[8:], &other); err != nil {
			t.Fatalf("taken, but: %v", err)
		}
	})
}

// A machine processes any messages in any order without a panic, and within its limits. The input
// is a list of messages: a byte that says how it arrives, the length of the header, the header, and
// the payload up to the next message.
func FuzzMachine(f *testing.F) {
	var all []byte
	f.Add(patchedStory())
	for _, file := range []string{"sequences.json", "messages.json"} {
		seeds(f, file, func(frames [][]byte) {
			if len(frames) == 0 || len(frames[0]) > 2000 {
				return
			}
			one := pack(frames)
			f.Add(one)
			if all = append(all, one...); len(all) > 4000 {
				f.Add(all)
				all = nil
			}
		})
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		fuzzMachine(t, in, fuzzedMachine(false), nil)
		v, keyed := newVault(1), fuzzedMachine(true)
		keyed.keyring.Begin(v.told(), time.Hour)
		fuzzMachine(t, in, keyed, v)
	})
}

// fuzzMachine feeds a machine; published messages are sealed if there is a vault.
func fuzzMachine(t *testing.T, in []byte, m *WorkerMachine, v *vault) {
	for now := time.Duration(0); len(in) > 4 && now < 200*time.Second; now += 50 * time.Millisecond {
		var how byte
		var frames [][]byte
		how, frames, in = unpack(in)
		if v != nil && how&1 != 0 && how&32 == 0 && len(frames[0]) < HeaderBytesMax/2 {
			frames[0] = Encode(v.message(frames[0]))
		}
		feed(t, m, how, frames, now)
	}
	h := m.followers["m"].versions
	if used := len(h.inPhases(arriving, staged, ready, applying)); used != h.buffers.taken || used > BuffersMax {
		t.Fatalf("%d versions are in memory, %d buffers in use", used, h.buffers.taken)
	}
	m.Free()
}

func pack(frames [][]byte) []byte {
	how, payload := byte(1), []byte{}
	if len(frames) > 1 {
		how, payload = 3, frames[1]
	}
	if len(payload) > 255 {
		payload = payload[:255]
	}
	out := append([]byte{how, byte(len(frames[0]) >> 8), byte(len(frames[0])), byte(len(payload))}, frames[0]...)
	return append(out, payload...)
}

func unpack(in []byte) (how byte, frames [][]byte, rest []byte) {
	how = in[0]
	cut := func(n int) []byte {
		if n > len(in) {
			n = len(in)
		}
		part := in[:n:n]
		in = in[n:]
		return part
	}
	head, tail := int(in[1])<<8|int(in[2]), int(in[3])
	cut(4)
	frames = append(frames, cut(head))
	if payload := cut(tail); how&2 != 0 {
		frames = append(frames, payload)
	}
	return how, frames, in
}

func fuzzedMachine(keyed bool) *WorkerMachine {
	id := Identity{Name: "w", Instance: "00000000000000000000000000000000", Keyed: keyed, Patches: true}
	models := map[string]Model{"m": {Mismatch: func(*Layout) string { return "" }}}
	m := NewWorkerMachine(id, models, 1<<16, TimingOf(time.Second, 5*time.Second), nil)
	m.Receive([][]byte{[]byte(`{"wbp":1,"type":"welcome","epoch":7,"data":"tcp://*:9","ping_ms":1,"lost_ms":2,"models":{}}`)}, nil, 0)
	return m
}

// feed sends one message to the machine. The bits of how say whether the message is pushed, has a
// payload, and is received into a lease, and what the user does meanwhile.
func feed(t *testing.T, m *WorkerMachine, how byte, frames [][]byte, now time.Duration) {
	var lease *Lease
	if how&4 != 0 && len(frames) > 1 && len(frames[1]) > 0 {
		if lease = m.LeaseFor(frames[0], len(frames[1])); lease != nil {
			lease.Received(copy(lease.Room(), frames[1]))
			if how&8 != 0 {
				m.Tick(now) // between the parts of a payload
			}
			frames[1] = lease.Payload()
		}
	}
	take, all := m.Receive, frames
	if how&1 != 0 {
		take, all = m.ReceivePublished, append([][]byte{nil}, frames...)
	}
	effects := append(take(all, lease, now), m.Tick(now)...)
	for len(effects) > 0 {
		effect := effects[0]
		effects = effects[1:]
		switch effect := effect.(type) {
		case Send:
			if header := Encode(effect.Message); len(header) > HeaderBytesMax {
				t.Fatalf("a header of %d bytes", len(header))
			}
		case Ready:
			v := effect.Version
			if int64(len(v.data)) != v.Layout.Bytes {
				t.Fatalf("%d bytes of %d", len(v.data), v.Layout.Bytes)
			}
			if how>>6 < 2 {
				m.ApplyStarted(v)
			}
			switch how >> 6 {
			case 0:
				effects = append(effects, m.Applied(v, v.Digest, now)...)
			case 1:
				effects = append(effects, m.Failed(v, "no", how&16 == 0, now)...)
			case 2:
				effects = append(effects, m.Dropped(v, now)...)
			}
		case DecodePatch:
			effects = append(effects, m.Decoded(effect.Job, effect.Job.Run(), 0, now)...)
		}
	}
}
