package weightbus

import (
	"sync/atomic"

	"weightbus/internal/wbp"
)

// A model is where the versions of one model go: into memory that the user registered, or into
// memory of our own.
type model struct {
	tensors Tensors // nil: the memory is ours, and takes any layout

	running atomic.Pointer[Update] // what runs; changes under the guard, but for its name
	guard   guard                  // of all that follows, and of the memory
	layout  *wbp.Layout
	own     []byte
	pieces  []piece // of the layout, where each tensor goes
}

// A piece is the memory of one tensor, and where its bytes begin in the data section.
type piece struct {
	to    []byte
	begin int64
}

// accepts says why a layout cannot be applied; "" if it can.
func (m *model) accepts(layout *wbp.Layout) string {
	if m.tensors == nil {
		return ""
	}
	return m.tensors.difference(layout)
}

// bytes is how much a version has, 0 if that is not known. (Tied tensors count more than once.)
func (m *model) bytes() int64 {
	total := int64(0)
	for _, t := range m.tensors {
		total += int64(len(t.bytes))
	}
	return total
}

// prepare makes the memory fit a layout, which was accepted.
func (m *model) prepare(layout *wbp.Layout) {
	if m.layout != nil && m.layout.ID == layout.ID {
		return
	}
	m.layout, m.pieces = layout, nil
	if m.tensors == nil {
		if int64(len(m.own)) != layout.Bytes {
			m.own = make([]byte, layout.Bytes)
		}
		return
	}
	for name, t := range m.tensors {
		m.pieces = append(m.pieces, piece{t.bytes, layout.ByName(name).Begin})
	}
}

// write copies a data section to its place.
func (m *model) write(data []byte) {
	if m.tensors == nil {
		copy(m.own, data)
		return
	}
	for _, p := range m.pieces {
		copy(p.to, data[p.begin:])
	}
}

// tensor returns the memory of a name or an alias.
func (m *model) tensor(name string) (Tensor, bool) {
	spec := m.layout.ByName(name)
	if spec == nil {
		return Tensor{}, false
	}
	t := Tensor{dtype: spec.DType, shape: spec.Shape}
	if m.tensors == nil {
		t.bytes = m.own[spec.Begin:spec.End:spec.End]
		return t, true
	}
	for known, registered := range m.tensors {
		if m.layout.ByName(known) == spec {
			t.bytes = registered.bytes
			return t, true
		}
	}
	return Tensor{}, false
}
