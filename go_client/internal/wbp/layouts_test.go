package wbp

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"
	"time"
)

func layoutOfText(text string) []byte {
	return append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
}

func repeated(count int, entry func(i int) string) string {
	entries := make([]string, count)
	for i := range entries {
		entries[i] = entry(i)
	}
	return strings.Join(entries, ",")
}

const emptyTensor = `{"dtype":"U8","shape":[0],"data_offsets":[0,0]}`

// announcementOf returns the announcement of a layout.
func announcementOf(layout []byte) *Announce {
	parsed, err := ParseLayout(layout)
	if err != nil {
		panic(err)
	}
	return &Announce{Model: "m", Epoch: 7, Version: 1, Layout: parsed.ID, LayoutBytes: int64(len(layout)), ChunkBytes: 1,
		Commit: "auto", Acknowledge: "applied", Encoding: "raw"}
}

func TestLayoutsThatAreKept(t *testing.T) {
	c := &acceptance{bytesMax: 1 << 30, accepted: map[string]bool{}}
	kept := func(bytes int, i int) int {
		layout := layoutOfText(fmt.Sprintf(`{"__metadata__":{"%d":"%s"}}`, i, strings.Repeat("a", bytes)))
		if code, text := c.learn(announcementOf(layout), layout); code != "" {
			t.Fatal(code, text)
		}
		return len(c.layouts)
	}
	for i, expected := range []int{1, 2, 3, 4, 4} {
		if count := kept(10, i); count != expected {
			t.Errorf("%d are kept", count)
		}
	}
	for i, expected := range []int{4, 4, 2, 2} {
		if count := kept(layoutsBytesKept*2/5+i, i); count != expected {
			t.Errorf("%d large ones are kept", count)
		}
	}
	if count := kept(2*layoutsBytesKept, 9); count != 1 {
		t.Errorf("%d are kept beside one that is larger than all may be", count)
	}
}

func TestNamesThatAreRead(t *testing.T) {
	for _, c := range []struct {
		bytesMax int64
		names    int
		fits     bool
	}{
		{0, NamesGuaranteed, true}, {0, NamesGuaranteed + 1, false}, {NameCost * NamesGuaranteed * 2, 2 * NamesGuaranteed, true},
		{NameCost * NamesGuaranteed * 2, 2*NamesGuaranteed + 1, false},
	} {
		entries := repeated(c.names-2, func(i int) string { return fmt.Sprintf(`"%d":""`, i) })
		for _, text := range []string{`{"__metadata__":{` + entries + `},"t":` + emptyTensor + `}`,
			`{"t":` + emptyTensor + `,"__metadata__":{` + entries + `}}`,
			`{` + repeated(c.names, func(i int) string { return fmt.Sprintf(`"t%d":`, i) + emptyTensor }) + `}`} {
			layout := layoutOfText(text)
			a := &acceptance{bytesMax: c.bytesMax, accepted: map[string]bool{}}
			if code, why := a.learn(announcementOf(layout), layout); (code == "") != c.fits || !c.fits && code != CodeTooLarge {
				t.Errorf("%d names of %d: %s %s", c.names, c.bytesMax, code, why)
			}
		}
	}
}

// A layout that was declined for too many names is not parsed again.
func TestTooManyNamesAreDeclinedForGood(t *testing.T) {
	m := fuzzedMachine(false)
	layout := layoutOfText(`{` + repeated(NamesGuaranteed+1, func(i int) string { return fmt.Sprintf(`"t%d":`, i) + emptyTensor }) + `}`)
	header := Encode(announcementOf(layout))
	m.followers["m"].acceptance.bytesMax = int64(len(layout))
	for round, expected := range []int{2, 0} {
		effects := m.Receive([][]byte{header, append([]byte{}, layout...)}, nil, time.Duration(round))
		if len(effects) != expected {
			t.Errorf("%d: %#v", round, effects)
		}
	}
}
