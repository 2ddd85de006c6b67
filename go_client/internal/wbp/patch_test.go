package wbp

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// A patch is rejected before any byte has changed, or it is applied completely.
func FuzzPatch(f *testing.F) {
	type source struct{ Text, Hex string }
	read := func(s source) []byte {
		if s.Hex == "" {
			return []byte(s.Text)
		}
		found, err := hex.DecodeString(s.Hex)
		if err != nil {
			f.Fatal(err)
		}
		return found
	}
	var table struct {
		Cases []struct {
			Layout, Patch source
			Base          [][2]interface{}
		}
	}
	text, err := os.ReadFile(filepath.Join(vectors, "deltas.json"))
	if err == nil {
		err = json.Unmarshal(text, &table)
	}
	if err != nil {
		f.Fatal(err)
	}
	var layouts []*Layout
	var bases [][]byte
	for _, c := range table.Cases {
		layout, err := ParseLayout(read(c.Layout))
		if err != nil {
			f.Fatal(err)
		}
		if layout.Bytes > 2000 {
			continue
		}
		var base []byte
		for _, run := range c.Base {
			base = append(base, bytes.Repeat(read(source{Hex: run[0].(string)}), int(run[1].(float64)))...)
		}
		f.Add(len(bases), read(c.Patch))
		layouts, bases = append(layouts, layout), append(bases, base)
	}
	f.Fuzz(func(t *testing.T, which int, text []byte) {
		layout, base := layouts[uint(which)%uint(len(bases))], bases[uint(which)%uint(len(bases))]
		patch, err := ParsePatch(layout, text)
		if err != nil {
			return
		}
		data := append([]byte{}, base...)
		if patch.Put(data) != nil && !bytes.Equal(data, base) {
			t.Fatal("a patch was refused, but bytes have changed")
		}
	})
}

// Long work checks repeatedly whether the patch was cancelled, and ends soon after that.
func TestAPatchThatNobodyWantsAnyMoreEndsSoon(t *testing.T) {
	one, two := patchedVersion(1, 1), patchedVersion(2, 2)
	layout, _ := ParseLayout(one.layout)
	apply := func(most int) (looks int, data []byte, err error) {
		patch, err := ParsePatch(layout, rawPatch(layout, one.data, two.data, patchChunk))
		if err != nil {
			t.Fatal(err)
		}
		patch.wanted = func() bool { looks++; return looks <= most }
		data = append(data, one.data...)
		return looks, data, patch.Apply(data, "")
	}
	all, data, err := apply(1000)
	if err != nil || !bytes.Equal(data, two.data) {
		t.Fatal(err)
	}
	// Two chunks in each digest, one check after the first digest, and one block in both loops.
	if all != 2+1+1+1+2 {
		t.Fatalf("%d looks", all)
	}
	for most := 0; most < all; most++ {
		if looks, _, err := apply(most); err == nil || looks > most+2 {
			t.Fatalf("after %d of %d looks, %d more: %v", most, all, looks-most, err)
		}
	}
}

// The copy of the base is cancelled, too.
func TestABaseIsNotCopiedForAPatchThatNobodyWants(t *testing.T) {
	one, two := patchedVersion(1, 1), patchedVersion(2, 2)
	layout, _ := ParseLayout(one.layout)
	job := &Patching{base: &base{layout: layout, data: one.data}, buffer: make([]byte, len(one.data)), digest: two.digest,
		patch: rawPatch(layout, one.data, two.data, patchChunk)}
	job.cancel()
	if fault := job.Run(); fault != errUnwanted.Error() || job.buffer[0] != 0 {
		t.Fatalf("%q, and %d", fault, job.buffer[0])
	}
}
