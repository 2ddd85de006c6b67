package wbp

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"sort"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A Spec is one tensor and its byte range in the data section.
type Spec struct {
	Name       string
	DType      string
	Shape      []int64
	Begin, End int64
}

func (s *Spec) String() string { return fmt.Sprintf("%s %s", s.DType, ShapeText(s.Shape)) }

// ShapeText formats a shape, such as [4, 3].
func ShapeText(shape []int64) string {
	text := "["
	for i, size := range shape {
		if i > 0 {
			text += ", "
		}
		text += fmt.Sprint(size)
	}
	return text + "]"
}

// A Layout has the tensors of a version and their positions. It is a safetensors header:
//
//	0        8                      8+n
//	├────────┼───────────────────────┼──────────────────────────────┤
//	│ n, u64 │ JSON of n bytes       │ data section: the tensors,   │
//	│ little │                       │ row-major, without gaps      │
//	└────────┴───────────────────────┴──────────────────────────────┘
//
// Only ParseLayout creates a Layout. It checks every value, since the bytes may be hostile.
type Layout struct {
	ID       string            // SHA-256 of all its bytes
	Bytes    int64             // size of the data section
	Tensors  []Spec            // by position
	Aliases  map[string]string // by alias: the name of the tensor
	Metadata map[string]string
	byName   map[string]*Spec // aliases included
	inOrder  []*Spec          // in the order of the publisher's source
	size     int              // bytes of the layout itself
}

const prefixBytes = 8 // of the length of the JSON

// errTooManyNames means that a layout has more names than the limit allows.
var errTooManyNames = errors.New("more names of tensors and metadata than this worker has memory for")

// ByName returns the tensor with this name or alias; nil if there is none.
func (l *Layout) ByName(name string) *Spec { return l.byName[name] }

// InOrder returns the tensors in the order of the publisher's source.
func (l *Layout) InOrder() []*Spec { return l.inOrder }

// ParseLayout parses a layout. bytes includes the 8 bytes that give its length.
func ParseLayout(bytes []byte) (*Layout, error) { return parseLayout(bytes, math.MaxInt64) }

// parseLayout parses a layout with at most namesMax names of tensors and metadata.
func parseLayout(bytes []byte, namesMax int64) (*Layout, error) {
	if len(bytes) < prefixBytes || uint64(len(bytes)-8) != binary.LittleEndian.Uint64(bytes) ||
		len(bytes) > LayoutBytesMax+prefixBytes { // L1
		return nil, fmt.Errorf("a layout of %d bytes: its first 8 bytes must have the length of the others, "+
			"and it may have at most %d bytes", len(bytes), LayoutBytesMax+prefixBytes)
	}
	text := bytes[8:]
	if len(text) == 0 || text[0] != '{' || !utf8.Valid(text) { // L2
		return nil, fmt.Errorf("the layout must be UTF-8 that begins with '{'")
	}
	l := &Layout{Metadata: map[string]string{}, Aliases: map[string]string{}, size: len(bytes)}
	if err := l.read(&scanner{text: text}, namesMax); err != nil {
		return nil, err
	}
	if err := l.sortByPosition(); err != nil {
		return nil, err
	}
	if err := l.indexNames(); err != nil {
		return nil, err
	}
	id := sha256.Sum256(bytes)
	l.ID = hex.EncodeToString(id[:])
	return l, nil
}

// read parses the JSON into Tensors and Metadata.
func (l *Layout) read(s *scanner, namesMax int64) error {
	seen := map[string]struct{}{}
	err := s.object(func(key string) error {
		if int64(len(seen)+len(l.Metadata)) >= namesMax {
			return errTooManyNames
		}
		if _, twice := seen[key]; twice { // L3
			return s.fail(fmt.Sprintf("the key %.40q appears twice", key))
		}
		seen[key] = struct{}{}
		if key == "__metadata__" {
			return l.readMetadata(s, namesMax-int64(len(seen)))
		}
		if len(l.Tensors) >= TensorsMax { // L4
			return s.fail(fmt.Sprintf("more than %d tensors", TensorsMax))
		}
		spec, err := readSpec(s, key)
		l.Tensors = append(l.Tensors, spec)
		return err
	})
	if err != nil {
		return err
	}
	return s.end()
}

func (l *Layout) readMetadata(s *scanner, namesMax int64) error {
	return s.object(func(key string) error {
		if int64(len(l.Metadata)) >= namesMax {
			return errTooManyNames
		}
		if _, twice := l.Metadata[key]; twice {
			return s.fail(fmt.Sprintf("the metadata key %.40q appears twice", key))
		}
		text, err := s.string()
		l.Metadata[key] = text
		return err
	})
}

// readSpec reads an entry: exactly dtype, shape and data_offsets, in any order.
func readSpec(s *scanner, name string) (Spec, error) {
	spec := Spec{Name: name, Shape: []int64{}}
	var offsets []int64
	seen := 0 // a bit for each field
	field := func(bit int) error {
		if seen&bit != 0 {
			return s.fail("a field appears twice")
		}
		seen |= bit
		return nil
	}
	err := s.object(func(key string) (err error) {
		switch key {
		case "dtype":
			if err = field(1); err == nil {
				spec.DType, err = s.string()
			}
		case "shape":
			if err = field(2); err == nil {
				spec.Shape, err = s.integers(RankMax)
			}
		case "data_offsets":
			if err = field(4); err == nil {
				offsets, err = s.integers(2)
			}
		default:
			err = s.fail(fmt.Sprintf("unknown field %.40q", key))
		}
		return err
	})
	if err == nil && (seen != 7 || len(offsets) != 2) {
		err = s.fail(fmt.Sprintf("tensor %.40q needs dtype, shape and two data_offsets", name))
	}
	if err != nil {
		return spec, err
	}
	spec.Begin, spec.End = offsets[0], offsets[1]
	return spec, nil
}

// integers reads an array of at most `most` integers.
func (s *scanner) integers(most int) ([]int64, error) {
	list := []int64{}
	err := s.array(func() error {
		if len(list) >= most {
			return s.fail(fmt.Sprintf("more than %d entries", most))
		}
		n, err := s.integer()
		list = append(list, n)
		return err
	})
	return list, err
}

// sortByPosition sorts the tensors by position. It returns an error unless their dtypes and shapes
// are valid and they are contiguous.
func (l *Layout) sortByPosition() error {
	sort.SliceStable(l.Tensors, func(i, j int) bool {
		a, b := &l.Tensors[i], &l.Tensors[j]
		return a.Begin < b.Begin || a.Begin == b.Begin && a.End < b.End
	})
	for i := range l.Tensors {
		spec := &l.Tensors[i]
		size, ok := TensorBytes(spec.DType, spec.Shape)
		if !ok { // L5, L6
			return fmt.Errorf("tensor %.40q: %.40q %s is not a valid dtype and shape", spec.Name, spec.DType,
				ShapeText(spec.Shape))
		}
		if spec.Begin != l.Bytes || spec.End-spec.Begin != size { // L7, L8
			return fmt.Errorf("tensor %.40q (%s, %d bytes) claims bytes %d to %d; it must own %d to %d, since "+
				"tensors lie end to end", spec.Name, spec, size, spec.Begin, spec.End, l.Bytes, l.Bytes+size)
		}
		l.Bytes = spec.End
	}
	return nil
}

// indexNames fills the tables of names and aliases, and orders the tensors. A metadata entry is an
// alias if its value names a tensor and its key does not.
func (l *Layout) indexNames() error {
	l.byName = make(map[string]*Spec, len(l.Tensors))
	for i := range l.Tensors {
		l.byName[l.Tensors[i].Name] = &l.Tensors[i]
	}
	for alias, original := range l.Metadata {
		_, isTensor := l.byName[alias]
		if _, known := l.byName[original]; known && !isTensor {
			l.Aliases[alias] = original
		}
	}
	for alias, original := range l.Aliases {
		l.byName[alias] = l.byName[original]
	}
	l.order()
	for name := range l.byName {
		if len(name) < 1 || len(name) > NameBytesMax { // L4
			return fmt.Errorf("the name %.40q has %d bytes; a name has 1 to %d", name, len(name), NameBytesMax)
		}
	}
	return nil
}

// orderKey is the metadata key of the order in which the publisher's model has the names. The value
// has one index for each name, separated by commas. It is an index into the list of all tensors by
// position, followed by the sorted aliases.
const orderKey = "weightbus.order"

// order lists the tensors in the order of the publisher's model, or by position if the metadata has
// no valid order.
func (l *Layout) order() {
	for i := range l.Tensors {
		l.inOrder = append(l.inOrder, &l.Tensors[i])
	}
	text, hasOrder := l.Metadata[orderKey]
	if _, isAlias := l.Aliases[orderKey]; !hasOrder || isAlias {
		return
	}
	words, seen := strings.Split(text, ","), make([]bool, len(l.byName))
	ordered := make([]*Spec, 0, len(l.Tensors))
	for _, word := range words {
		at, err := strconv.Atoi(word)
		if err != nil || strconv.Itoa(at) != word || at < 0 || at >= len(seen) || seen[at] {
			return
		}
		seen[at] = true
		if at < len(l.Tensors) { // larger indices are aliases
			ordered = append(ordered, &l.Tensors[at])
		}
	}
	if len(words) == len(seen) {
		l.inOrder = ordered
	}
}
