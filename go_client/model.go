package weightbus

import (
	"bytes"
	"encoding/json"
	"fmt"
	"sort"
	"sync/atomic"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

// layoutSlackBytes is room for the spaces, aliases and metadata that a publisher may add to a layout.
const layoutSlackBytes = 1 << 20

// A model is the destination of one model's versions: the user's registered memory, or memory of the worker.
type model struct {
	allowed wbp.Lenience

	running atomic.Pointer[Update] // nil: no version runs. Changes under the guard, except by a rename
	guard   guard                  // guards the fields below, and the memory
	*memory
	spare   *memory      // receives a version until Apply accepts it
	overdue <-chan error // receives the result of a user function that missed its deadline; else nil
}

func newModel(tensors Tensors, allowed wbp.Lenience) *model {
	return &model{allowed: allowed, memory: &memory{tensors: tensors}, spare: &memory{}}
}

// mismatch returns the reason why a layout cannot be applied; "" if it can be applied.
func (m *model) mismatch(layout *wbp.Layout) string {
	if m.tensors == nil {
		return ""
	}
	return m.tensors.difference(layout, m.allowed)
}

// bytes returns the size of a version, or 0 if Options.Partial or Options.Cast let it differ from
// the registered tensors' size. (Tied tensors count more than once.)
func (m *model) bytes() int64 {
	total := int64(0)
	if m.allowed != (wbp.Lenience{}) {
		return total
	}
	for _, t := range m.tensors {
		total += int64(len(t.bytes))
	}
	return total
}

// layoutBytes returns the size of the largest layout of the registered tensors, or 0 if a layout may
// have other tensors.
func (m *model) layoutBytes() int64 {
	if m.tensors == nil || m.allowed.Partial {
		return 0
	}
	size := int64(layoutSlackBytes)
	for name, t := range m.tensors {
		entry, _ := json.Marshal(map[string]interface{}{name: map[string]interface{}{"dtype": t.dtype, "shape": t.shape,
			"data_offsets": []int64{wbp.IntegerMax, wbp.IntegerMax}}})
		size += 2 * int64(len(entry))
	}
	return size
}

// A memory holds one version of a model.
type memory struct {
	tensors     Tensors // nil: the worker's own memory, for any layout
	layout      *wbp.Layout
	buffer      []byte
	assignments []assignment
	tied        []tiedPair
	tensorFor   map[*wbp.Spec]Tensor
	aliases     map[string]*wbp.Spec // by registered name that is not published: the tensor that fills its memory
}

// A tiedPair is two published tensors that have the same registered memory.
type tiedPair struct {
	names [2]string
	specs [2]*wbp.Spec
}

// An assignment is a registered tensor and the published tensor that is written into it.
type assignment struct {
	to   Tensor
	from *wbp.Spec
}

// prepare adapts the memory to an accepted layout.
func (m *memory) prepare(layout *wbp.Layout) {
	if m.layout != nil && m.layout.ID == layout.ID {
		return
	}
	m.layout, m.assignments, m.tied = layout, nil, nil
	m.tensorFor, m.aliases = map[*wbp.Spec]Tensor{}, map[string]*wbp.Spec{}
	_, firstNames := m.tensors.findTies()
	written := map[string]string{} // by first name of tied tensors: the published name that fills their memory
	for name, t := range m.tensors {
		spec := layout.ByName(name)
		if spec == nil {
			continue // the publisher uses another name of the same memory
		}
		m.tensorFor[spec] = t
		first, other := firstNames[name], ""
		if first != "" {
			other = written[first]
			written[first] = name
		}
		if other == "" {
			m.assignments = append(m.assignments, assignment{t, spec})
		} else if twin := layout.ByName(other); twin != spec {
			m.tied = append(m.tied, tiedPair{[2]string{other, name}, [2]*wbp.Spec{twin, spec}})
		}
	}
	for name := range m.tensors {
		if layout.ByName(name) == nil {
			m.aliases[name] = layout.ByName(written[firstNames[name]])
		}
	}
	if m.tensors != nil {
		return
	}
	if int64(len(m.buffer)) != layout.Bytes {
		m.buffer = make([]byte, layout.Bytes)
	}
	for i := range layout.Tensors {
		spec := &layout.Tensors[i]
		m.tensorFor[spec] = Tensor{dtype: spec.DType, shape: spec.Shape, bytes: m.buffer[spec.Begin:spec.End:spec.End]}
	}
}

// tieFault returns an error message if two published tensors that share memory here have different
// values in data; otherwise "".
func (m *memory) tieFault(data []byte) string {
	for _, t := range m.tied {
		a, b := t.specs[0], t.specs[1]
		if !bytes.Equal(data[a.Begin:a.End], data[b.Begin:b.End]) {
			sort.Strings(t.names[:])
			return fmt.Sprintf("%s and %s are one tensor here, but were published with different values; give each "+
				"memory of its own, or tie them at the publisher", t.names[0], t.names[1])
		}
	}
	return ""
}

// write copies the tensors of data into the memory, and converts their dtypes if necessary. It
// returns the tensors in which finite values became infinite.
func (m *memory) write(data []byte) (lost []wbp.Overflow) {
	if m.tensors == nil {
		copy(m.buffer, data)
		return nil
	}
	for _, p := range m.assignments {
		if from := data[p.from.Begin:p.from.End]; p.to.dtype == p.from.DType {
			copy(p.to.bytes, from)
		} else {
			if count := wbp.Cast(p.to.bytes, p.to.dtype, from, p.from.DType); count > 0 {
				lost = append(lost, wbp.Overflow{Name: p.from.Name, DType: p.to.dtype, Count: count})
			}
		}
	}
	return lost
}

// tensor returns the tensor with this name or alias, and whether there is one.
func (m *memory) tensor(name string) (Tensor, bool) {
	spec := m.layout.ByName(name)
	if spec == nil {
		spec = m.aliases[name]
	}
	t, ok := m.tensorFor[spec]
	return t, ok
}
