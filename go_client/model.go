package weightbus

import (
	"bytes"
	"encoding/json"
	"fmt"
	"sort"
	"sync/atomic"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

// Room for the spaces, aliases and metadata that a publisher may add to a layout.
const layoutSlackBytes = 1 << 20

// A model is the destination of one model's versions: the user's registered memory, or memory of
// the worker.
type model struct {
	allowed wbp.Lenience

	running atomic.Pointer[Update] // changes under the guard, except by a rename
	guard   guard                  // guards the fields below, and the memory
	*memory
	spare *memory      // receives a version until Apply accepts it
	late  <-chan error // result of a user function that missed its deadline
}

func newModel(tensors Tensors, allowed wbp.Lenience) *model {
	return &model{allowed: allowed, memory: &memory{tensors: tensors}, spare: &memory{}}
}

// accepts returns the reason that a layout cannot be applied; "" if it can be applied.
func (m *model) accepts(layout *wbp.Layout) string {
	if m.tensors == nil {
		return ""
	}
	return m.tensors.difference(layout, m.allowed)
}

// bytes returns the size of a version, 0 if unknown. (Tied tensors count more than once.)
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

// layoutBytes returns the size in bytes of the largest layout of these tensors; 0 if a layout may
// have other tensors.
func (m *model) layoutBytes() int64 {
	if m.tensors == nil || m.allowed.Partial {
		return 0
	}
	longest := int64(layoutSlackBytes)
	for name, t := range m.tensors {
		entry, _ := json.Marshal(map[string]interface{}{name: map[string]interface{}{"dtype": t.dtype, "shape": t.shape,
			"data_offsets": []int64{wbp.IntegerMax, wbp.IntegerMax}}})
		longest += 2 * int64(len(entry))
	}
	return longest
}

// A memory holds one version of a model.
type memory struct {
	tensors Tensors // nil: the worker's own memory, for any layout
	layout  *wbp.Layout
	own     []byte
	pieces  []piece // for each registered tensor, the published tensor that fills it
	tied    []twins // pairs of published tensors that share memory here
	held    map[*wbp.Spec]Tensor
	others  map[string]*wbp.Spec // by unpublished registered name: what fills its memory
}

// Twins are two published tensors that have the same registered memory.
type twins struct {
	names [2]string
	specs [2]*wbp.Spec
}

// A piece is a registered tensor and the published tensor that is written into it.
type piece struct {
	to   Tensor
	from *wbp.Spec
}

// prepare adapts the memory to an accepted layout.
func (m *memory) prepare(layout *wbp.Layout) {
	if m.layout != nil && m.layout.ID == layout.ID {
		return
	}
	m.layout, m.pieces, m.tied = layout, nil, nil
	m.held, m.others = map[*wbp.Spec]Tensor{}, map[string]*wbp.Spec{}
	_, same := m.tensors.memory()
	written := map[string]string{} // by the first name of a memory: the published name that fills it
	for name, t := range m.tensors {
		spec := layout.ByName(name)
		if spec == nil {
			continue // another name of the same memory is published
		}
		m.held[spec] = t
		first, other := same[name], ""
		if first != "" {
			other = written[first]
			written[first] = name
		}
		if other == "" {
			m.pieces = append(m.pieces, piece{t, spec})
		} else if twin := layout.ByName(other); twin != spec {
			m.tied = append(m.tied, twins{[2]string{other, name}, [2]*wbp.Spec{twin, spec}})
		}
	}
	for name := range m.tensors {
		if layout.ByName(name) == nil {
			m.others[name] = layout.ByName(written[same[name]])
		}
	}
	if m.tensors != nil {
		return
	}
	if int64(len(m.own)) != layout.Bytes {
		m.own = make([]byte, layout.Bytes)
	}
	for i := range layout.Tensors {
		spec := &layout.Tensors[i]
		m.held[spec] = Tensor{dtype: spec.DType, shape: spec.Shape, bytes: m.own[spec.Begin:spec.End:spec.End]}
	}
}

// differ returns an error message if two tensors that share memory here have different values in
// data; otherwise "".
func (m *memory) differ(data []byte) string {
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

// write copies or converts a data section into the memory. It returns the tensors in which finite
// values became infinite.
func (m *memory) write(data []byte) (lost []wbp.Overflow) {
	if m.tensors == nil {
		copy(m.own, data)
		return nil
	}
	for _, p := range m.pieces {
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

// tensor returns the tensor with this name or alias.
func (m *memory) tensor(name string) (Tensor, bool) {
	spec := m.layout.ByName(name)
	if spec == nil {
		spec = m.others[name]
	}
	t, ok := m.held[spec]
	return t, ok
}
