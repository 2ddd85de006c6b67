package wbp

import (
	"fmt"
	"sort"
	"strings"
)

const differencesMax = 20 // lines of the text

// A Signature is the dtype and shape of a target's tensor.
type Signature struct {
	DType string
	Shape []int64
	Same  string // the same name for all tensors of one memory; "" if the tensor shares no memory
}

func (s Signature) String() string { return s.DType + " " + ShapeText(s.Shape) }

// Lenience has the differences from the published tensors that a target allows.
type Lenience struct {
	Partial bool // published tensors that the target does not have
	Cast    bool // another dtype, if values can be converted (see Castable)
}

// Difference returns a text on the differences between published tensors and the tensors of a
// target, one a line; "" if the published ones can be applied. The target may have a published
// tensor with aliases under any of its names. Memory of the target with several names is filled if
// one of these names is published.
func Difference(layout *Layout, target map[string]Signature, allowed Lenience) string {
	var lines []string
	covered, filled := map[*Spec]bool{}, map[string]bool{}
	for name, own := range target {
		if layout.ByName(name) != nil {
			filled[own.Same] = true
		}
	}
	for named, own := range target {
		spec := layout.ByName(named)
		covered[spec] = true
		name := Printable(named, 0)
		switch {
		case spec == nil && own.Same != "" && filled[own.Same]:
		case spec == nil:
			lines = append(lines, fmt.Sprintf("%s: %s in the target, not published", name, own))
		case ShapeText(spec.Shape) != ShapeText(own.Shape):
			lines = append(lines, fmt.Sprintf("%s: shape %s published, %s here", name, ShapeText(spec.Shape),
				ShapeText(own.Shape)))
		case spec.DType != own.DType && !(allowed.Cast && Castable(own.DType, spec.DType)):
			lines = append(lines, fmt.Sprintf("%s: dtype %s published, %s here", name, spec.DType, own.DType))
		}
	}
	for i := range layout.Tensors {
		if spec := &layout.Tensors[i]; !covered[spec] && !allowed.Partial {
			lines = append(lines, fmt.Sprintf("%s: published as %s, not in the target", Printable(spec.Name, 0), spec))
		}
	}
	sort.Strings(lines)
	if len(lines) > differencesMax {
		more := fmt.Sprintf("... and %d more", len(lines)-differencesMax+1)
		lines = append(lines[:differencesMax-1], more)
	}
	return strings.Join(lines, "\n")
}
