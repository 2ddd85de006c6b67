package weightbus

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

func layoutOf(t *testing.T, text string) *wbp.Layout {
	t.Helper()
	layout, err := wbp.ParseLayout(append([]byte{byte(len(text)), byte(len(text) >> 8), 0, 0, 0, 0, 0, 0}, text...))
	if err != nil {
		t.Fatal(err)
	}
	return layout
}

const (
	oneName  = `{"embed":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`
	twoNames = `{"embed":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"head":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}`
	tiedName = `{"__metadata__":{"head":"embed"},"embed":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`
)

// Memory that is registered under two names is filled if either of the names is published.
func TestMemoryOfTwoNamesIsFilledByEither(t *testing.T) {
	memory := make([]uint8, 2)
	tied := Tensors{"embed": U8(memory, 2), "head": U8(memory, 2)}
	for _, allowed := range []wbp.Lenience{{}, {Partial: true, Cast: true}} {
		for value, text := range []string{oneName, strings.Replace(oneName, "embed", "head", 1), tiedName, twoNames} {
			layout, m := layoutOf(t, text), newModel(tied, allowed)
			if says := m.mismatch(layout); says != "" {
				t.Fatalf("%s: %s", text, says)
			}
			m.prepare(layout)
			data := []byte{byte(value), 7, byte(value), 7}[:layout.Bytes]
			if says := m.tieFault(data); says != "" {
				t.Fatal(says)
			}
			m.write(data)
			for _, view := range []View{m.view(Update{}), m.snapshot(Update{})} {
				for _, name := range []string{"embed", "head"} {
					if tensor, ok := view.Tensor(name); !ok || fmt.Sprint(tensor.Bytes()) != fmt.Sprint([]byte{byte(value), 7}) {
						t.Fatalf("%s: %s is %v", text, name, tensor.Bytes())
					}
				}
				if _, ok := view.Tensor("other"); ok {
					t.Fatal("a name of nobody's")
				}
			}
		}
	}
	apart := newModel(Tensors{"embed": U8(memory, 2), "head": U8(make([]uint8, 2), 2)}, wbp.Lenience{})
	if says := apart.mismatch(layoutOf(t, oneName)); says != "head: U8 [2] in the target, not published" {
		t.Fatal(says)
	}
	alone := newModel(Tensors{"head": U8(memory, 2)}, wbp.Lenience{})
	if says := alone.mismatch(layoutOf(t, tiedName)); says != "" {
		t.Fatal(says)
	}
}

// If two tensors with one memory differ in a version, the version is rejected before a byte is
// written.
func TestOneMemoryCannotHoldTwoValues(t *testing.T) {
	memory := make([]uint8, 2)
	m, layout := newModel(Tensors{"embed": U8(memory, 2), "head": U8(memory, 2)}, wbp.Lenience{}), layoutOf(t, twoNames)
	m.prepare(layout)
	if says := m.tieFault([]byte{1, 2, 1, 2}); says != "" {
		t.Fatal(says)
	}
	if says := m.tieFault([]byte{1, 2, 1, 3}); !strings.HasPrefix(says, "embed and head are one tensor here") {
		t.Fatal(says)
	}
}

func TestTensorsThatOverlapInPartAreNamed(t *testing.T) {
	f := make([]uint8, 8)
	for _, c := range []struct {
		tensors Tensors
		says    string
	}{
		{Tensors{"a": U8(f[:6], 6), "b": U8(f[2:], 6)}, "a and b"},
		{Tensors{"a": U8(f, 8), "b": U8(f[2:3], 1)}, "a and b"},
		{Tensors{"a": U8(f, 8), "b": U8(f, 2, 4)}, "a and b"},
		{Tensors{"a": U8(f, 8), "b": I8(nil, 0), "c": Bits("I8", f, 8)}, "a and c"},
		{Tensors{"a": U8(f, 8), "b": U8(f, 8), "c": U8(f[7:], 1)}, "a and c"},
		{Tensors{"a": U8(f[:4], 4), "b": U8(f[4:], 4), "c": U8(f[4:], 4), "d": U8(f[3:3], 0)}, ""},
	} {
		w, err := New("tcp://127.0.0.1:1", Options{Models: map[string]Tensors{"m": c.tensors}})
		if err == nil {
			w.Close()
		}
		if c.says == "" && err == nil {
			continue
		}
		if err == nil || c.says == "" || !strings.Contains(err.Error(), c.says+" share a part of their memory") {
			t.Errorf("%v: %v", c.tensors, err)
		}
	}
}

// The vectors that all clients share.
func TestTiesOfVectors(t *testing.T) {
	text, err := os.ReadFile("../tests/vectors/ties.json")
	if err != nil {
		t.Fatal(err)
	}
	var table struct {
		Cases []struct {
			Name, Layout, Data string
			Partial            bool
			Memory             int
			Target             map[string]struct {
				DType string
				Shape []int
				At    int
			}
			Expect struct{ OK, Error string }
		}
	}
	if err := json.Unmarshal(text, &table); err != nil || len(table.Cases) == 0 {
		t.Fatal(err, "no cases")
	}
	for _, c := range table.Cases {
		memory, tensors := make([]uint8, c.Memory), Tensors{}
		for name, at := range c.Target {
			count := 1
			for _, size := range at.Shape {
				count *= size
			}
			tensors[name] = Bits(at.DType, memory[at.At:at.At+count], at.Shape...)
		}
		data, err := hex.DecodeString(c.Data)
		if err != nil {
			t.Fatal(err)
		}
		is := func() (says, kind string) {
			w, err := New("tcp://127.0.0.1:1", Options{Models: map[string]Tensors{"m": tensors}})
			if err != nil {
				return err.Error(), "memory"
			}
			w.Close()
			m, layout := newModel(tensors, wbp.Lenience{Partial: c.Partial}), layoutOf(t, c.Layout)
			if says := m.mismatch(layout); says != "" {
				return says, "layout"
			}
			m.prepare(layout)
			if says := m.tieFault(data); says != "" {
				return says, "differ"
			}
			m.write(data)
			return "", ""
		}
		says, kind := is()
		want := c.Expect.OK
		if c.Expect.Error != "" {
			want = strings.Repeat("00", c.Memory)
		}
		if kind != c.Expect.Error || hex.EncodeToString(memory) != want {
			t.Errorf("%s: %s %q, and the memory holds %x", c.Name, kind, says, memory)
		}
	}
}
