package weightbus

// A View is the version that a model runs. Inside Worker.Read it is the memory of the model
// itself, and valid until the function returns; a Snapshot's is a copy of its own.
type View struct {
	Update
	names  []string
	tensor func(name string) (Tensor, bool)
}

// Names are the names of the tensors by position, without aliases.
func (v View) Names() []string { return v.names }

// Tensor returns a tensor by its name or an alias.
func (v View) Tensor(name string) (Tensor, bool) { return v.tensor(name) }

func (m *model) view() View {
	names := make([]string, len(m.layout.Tensors))
	for i := range names {
		names[i] = m.layout.Tensors[i].Name
	}
	return View{*m.running.Load(), names, m.tensor}
}

// snapshot returns a view of a copy.
func (m *model) snapshot() View {
	from := m.view()
	to := &model{layout: m.layout, own: make([]byte, m.layout.Bytes)}
	to.running.Store(&from.Update)
	for _, name := range from.names {
		if t, ok := from.Tensor(name); ok {
			copy(to.own[m.layout.ByName(name).Begin:], t.bytes)
		}
	}
	return to.view()
}
