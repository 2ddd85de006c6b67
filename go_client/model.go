package weightbus

import (
	"sync/atomic"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

// A model is where the versions of one model go: into memory that the user registered, or into
// memory of our own.
type model struct {
	allowed wbp.Lenience

	running atomic.Pointer[Update] // what runs; changes under the guard, but for its name
	guard   guard                  // of all that follows, and of the memory
	*memory
	spare *memory      // of our own, too: for a version on which the user has not decided yet
	late  <-chan error // what a function of the user's says in the end that has missed its deadline
}

func newModel(tensors Tensors, allowed wbp.Lenience) *model {
	return &model{allowed: allowed, memory: &memory{tensors: tensors}, spare: &memory{}}
}

// accepts says why a layout cannot be applied; "" if it can.
func (m *model) accepts(layout *wbp.Layout) string {
	if m.tensors == nil {
		return ""
	}
	return m.tensors.difference(layout, m.allowed)
}

// bytes is how much a version has, 0 if that is not known. (Tied tensors count more than once.)
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

// A memory holds one version of a model.
type memory struct {
	tensors Tensors // nil: the memory is ours, and takes any layout
	layout  *wbp.Layout
	own     []byte
	pieces  []piece // of the layout, where each registered tensor gets its values from
	held    map[*wbp.Spec]Tensor
}

// A piece is a registered tensor, and what is written there.
type piece struct {
	to   Tensor
	from *wbp.Spec
}

// prepare makes the memory fit a layout, which was accepted.
func (m *memory) prepare(layout *wbp.Layout) {
	if m.layout != nil && m.layout.ID == layout.ID {
		return
	}
	m.layout, m.pieces, m.held = layout, nil, map[*wbp.Spec]Tensor{}
	for name, t := range m.tensors {
		spec := layout.ByName(name)
		m.pieces, m.held[spec] = append(m.pieces, piece{t, spec}), t
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

// write copies a data section to its place.
func (m *memory) write(data []byte) {
	if m.tensors == nil {
		copy(m.own, data)
		return
	}
	for _, p := range m.pieces {
		if from := data[p.from.Begin:p.from.End]; p.to.dtype == p.from.DType {
			copy(p.to.bytes, from)
		} else {
			wbp.Cast(p.to.bytes, p.to.dtype, from, p.from.DType)
		}
	}
}

// tensor returns the memory of a name or an alias.
func (m *memory) tensor(name string) (Tensor, bool) {
	t, ok := m.held[m.layout.ByName(name)]
	return t, ok
}
