package weightbus

import "github.com/weightbus/weightbus/go_client/internal/wbp"

// A View gives access to a version's tensors. Inside Worker.Read and Options.Apply a View refers to
// the model's memory, and is valid until the function returns. The View of a Snapshot is a copy.
type View struct {
	Update
	names  []string
	tensor func(name string) (Tensor, bool)
}

// Names returns the names of the tensors in the order of the publisher's model, without aliases and
// without tensors that are not registered (see Options.Partial).
func (v View) Names() []string { return v.names }

// Tensor returns a tensor by its name or an alias.
func (v View) Tensor(name string) (Tensor, bool) { return v.tensor(name) }

// view returns a View of the memory.
func (m *memory) view(update Update) View {
	names := make([]string, 0, len(m.tensorFor))
	for _, spec := range m.layout.InOrder() {
		if m.tensorFor[spec].dtype != "" {
			names = append(names, spec.Name)
		}
	}
	return View{update, names, m.tensor}
}

// snapshot returns a View of a copy of the memory.
func (m *memory) snapshot(update Update) View {
	to := &memory{layout: m.layout, aliases: m.aliases, tensorFor: make(map[*wbp.Spec]Tensor, len(m.tensorFor))}
	for spec, t := range m.tensorFor {
		t.bytes = append([]byte{}, t.bytes...)
		to.tensorFor[spec] = t
	}
	return to.view(update)
}
