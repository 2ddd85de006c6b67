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
	Tie   string // for tied tensors, which share their memory: one name for all of them; else ""
}

func (s Signature) String() string { return s.DType + " " + ShapeText(s.Shape) }

// Lenience says which differences a target allows between its own tensors and the published ones.
type Lenience struct {
	Partial bool // published tensors that the target does not have
	Cast    bool // another dtype, if values can be converted (see Castable)
}

// Difference describes why the published tensors cannot be applied to the tensors of a target, one
// difference per line; "" if they can. The target may use any alias of a published tensor. For tied
// tensors of the target, it suffices that one of their names is published.
func Difference(layout *Layout, target map[string]Signature, allowed Lenience) string {
	var lines []string
	covered, filled := map[*Spec]bool{}, map[string]bool{}
	for name, own := range target {
		if layout.ByName(name) != nil {
			filled[own.Tie] = true
		}
	}
	for named, own := range target {
		spec := layout.ByName(named)
		covered[spec] = true
		name := Printable(named, 0)
		switch {
		case spec == nil && own.Tie != "" && filled[own.Tie]:
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
