package wbp

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
)

// Constants of patches (encoding delta-1). docs/DELTA.md defines the format.
const (
	patchMagic       = "WBDELTA1"
	patchHeaderBytes = 120
	blockElements    = 1 << 18
	groupBlocks      = 16
	entryBytesMax    = 4
	changesShare     = 8       // decoded changes are stored up to 1/changesShare of the data section's size
	wantedBytes      = 4 << 20 // bytes copied between checks for cancellation: about a millisecond
)

var errUnwanted = errors.New("it is no longer needed")

// An elementKind is how a patch encodes changes of a dtype's elements.
type elementKind int

const (
	plainKind   elementKind = iota // any other dtype
	integerKind                    // integers of 16 bits
	bf16Kind                       // floats of 16 bits
	f16Kind
)

var elementKinds = map[string]elementKind{"I16": integerKind, "U16": integerKind, "BF16": bf16Kind, "F16": f16Kind}

type blockMode int

const (
	unchangedBlock blockMode = iota
	steppedBlock
	overwrittenBlock
	rawBlock
)

// A block is a run of adjacent elements of one dtype: bytes begin to end of the data section.
type block struct {
	begin, end int64
	width      int64 // bytes of an element; 1 for packed dtypes
	kind       elementKind
}

func (b block) fail(err error) error { return fmt.Errorf("the block at byte %d: %w", b.begin, err) }

// A patchPart is a block that changes, with its encoded changes.
type patchPart struct {
	block
	mode  blockMode
	body  []byte
	table *stepTable // nil unless mode is steppedBlock
}

// A Patch turns one version into another of the same layout.
type Patch struct {
	LayoutID     string
	Bytes        int64  // size of the data section
	ChunkBytes   int64  // the chunk size for both digests
	Base, Target string // digests of the two versions
	parts        []patchPart
	wanted       func() bool // false once the patch is cancelled
}

// ParsePatch parses a patch, and checks everything that can be checked without the base.
func ParsePatch(layout *Layout, data []byte) (*Patch, error) {
	p, err := parsePatchHeader(data)
	if err != nil {
		return nil, err
	}
	if p.LayoutID != layout.ID || p.Bytes != layout.Bytes {
		return nil, fmt.Errorf("a patch for the layout %.12s of %d bytes; the base has %.12s of %d", p.LayoutID, p.Bytes,
			layout.ID, layout.Bytes)
	}
	rest := data[patchHeaderBytes:]
	for _, run := range dtypeRuns(layout) {
		for _, group := range run.cut(groupBlocks * blockElements) {
			if rest, err = p.parseGroup(group.cut(blockElements), rest); err != nil {
				return nil, err
			}
		}
	}
	if len(rest) > 0 {
		return nil, fmt.Errorf("%d bytes follow behind the last block of a patch", len(rest))
	}
	return p, nil
}

func parsePatchHeader(data []byte) (*Patch, error) {
	if len(data) < patchHeaderBytes || string(data[:8]) != patchMagic {
		return nil, fmt.Errorf("%d bytes that begin with %.8q are not a patch, which has at least %d bytes and begins with %q",
			len(data), data, patchHeaderBytes, patchMagic)
	}
	flags, chunk := binary.LittleEndian.Uint32(data[8:]), binary.LittleEndian.Uint32(data[12:])
	size := binary.LittleEndian.Uint64(data[16:])
	if flags != 0 {
		return nil, fmt.Errorf("the patch has flags %#x; none are known here", flags)
	}
	if size > IntegerMax || chunk < 1 || chunk > ChunkBytesMax || (Plan{int64(size), int64(chunk)}).Count() > ChunksMax {
		return nil, fmt.Errorf("digests of %d bytes in chunks of %d; chunks have 1 to %d bytes, and there are at most %d", size, chunk,
			ChunkBytesMax, ChunksMax)
	}
	return &Patch{hex.EncodeToString(data[24:56]), int64(size), int64(chunk), hex.EncodeToString(data[56:88]),
		hex.EncodeToString(data[88:120]), nil, func() bool { return true }}, nil
}

// dtypeRuns returns one block for each run of adjacent tensors of one dtype.
func dtypeRuns(layout *Layout) []block {
	var found []block
	dtype := ""
	for i := range layout.Tensors {
		spec := &layout.Tensors[i]
		if spec.Begin == spec.End {
			continue
		}
		if spec.DType != dtype {
			dtype = spec.DType
			width := dtypeBits[dtype] / 8
			if width == 0 {
				width = 1
			}
			found = append(found, block{spec.Begin, spec.End, width, elementKinds[dtype]})
		}
		found[len(found)-1].end = spec.End
	}
	return found
}

// cut divides a block into blocks of `elements` elements; the last one may be shorter.
func (b block) cut(elements int64) []block {
	var parts []block
	for begin := b.begin; begin < b.end; begin += elements * b.width {
		part := block{begin, begin + elements*b.width, b.width, b.kind}
		if part.end > b.end {
			part.end = b.end
		}
		parts = append(parts, part)
	}
	return parts
}

// parseGroup parses a group, and returns the bytes after it.
func (p *Patch) parseGroup(group []block, rest []byte) ([]byte, error) {
	var table *stepTable
	var modes [groupBlocks]blockMode
	var sizes [groupBlocks]int64
	stepped := false
	for i, b := range group {
		var err error
		if modes[i], sizes[i], rest, err = b.parseEntry(rest); err != nil {
			return nil, b.fail(err)
		}
		stepped = stepped || modes[i] == steppedBlock
	}
	if stepped {
		var err error
		if table, rest, err = parseStepTable(rest, group[0].kind); err != nil {
			return nil, group[0].fail(err)
		}
	}
	for i, b := range group {
		if sizes[i] > int64(len(rest)) {
			return nil, b.fail(fmt.Errorf("its body has %d bytes, but only %d follow", sizes[i], len(rest)))
		}
		if modes[i] != unchangedBlock {
			p.parts = append(p.parts, patchPart{b, modes[i], rest[:sizes[i]], table})
		}
		rest = rest[sizes[i]:]
	}
	return rest, nil
}

// parseEntry parses the mode and body size of a block, and returns the bytes after the entry.
func (b block) parseEntry(rest []byte) (blockMode, int64, []byte, error) {
	value := 0
	for i := 0; i < entryBytesMax; i++ {
		if i >= len(rest) {
			return 0, 0, nil, fmt.Errorf("the patch ends in its entry")
		}
		value |= int(rest[i]&127) << (7 * i)
		if i > 0 && rest[i] == 0 {
			return 0, 0, nil, fmt.Errorf("its entry is longer than it need be")
		}
		if rest[i] < 128 {
			mode, size := blockMode(value&3), int64(value>>2)
			return mode, size, rest[i+1:], b.check(mode, size)
		}
	}
	return 0, 0, nil, fmt.Errorf("its entry has more than %d bytes", entryBytesMax)
}

// check returns an error unless a block's body may have this mode and size.
func (b block) check(mode blockMode, size int64) error {
	least, most := int64(1), b.end-b.begin-1
	switch mode {
	case unchangedBlock:
		least, most = 0, 0
	case steppedBlock:
		if b.kind == plainKind {
			return fmt.Errorf("it has steps, but not elements of 16 bits")
		}
	case rawBlock:
		least, most = b.end-b.begin, b.end-b.begin
	}
	if size < least || size > most {
		return fmt.Errorf("its body (mode %d) has %d bytes; %d to %d are allowed", mode, size, least, most)
	}
	return nil
}

// Apply changes data from the base to the target. digest is the digest of data, or "" if unknown. If data
// is not the base, or a block is malformed, Apply returns an error and leaves data unchanged. If the
// result is not the target, or the patch is cancelled, Apply returns an error, and data must not be used.
func (p *Patch) Apply(data []byte, digest string) error {
	if digest == "" {
		digest = DigestWhile(p.LayoutID, data, p.ChunkBytes, p.wanted)
	}
	if !p.wanted() {
		return errUnwanted
	}
	if digest != p.Base {
		return fmt.Errorf("the patch is for the base %.12s, not %.12s", p.Base, digest)
	}
	if err := p.Put(data); err != nil {
		return err
	}
	if made := DigestWhile(p.LayoutID, data, p.ChunkBytes, p.wanted); made != p.Target {
		return fmt.Errorf("the patch leads to %.12s, but names the target %.12s", made, p.Target)
	}
	return nil
}

// Put changes all blocks without checking the digests. If a block is malformed, it returns an error and
// changes no block. If the patch is cancelled, it returns an error, and some blocks may have changed.
//
// The first pass decodes every block and stores the changes of the first parts, as many as
// changesShare allows. The second pass writes the changes, and decodes the other parts again.
func (p *Patch) Put(data []byte) error {
	if int64(len(data)) != p.Bytes {
		return fmt.Errorf("a patch for %d bytes, not for %d", p.Bytes, len(data))
	}
	var stored, scratch changes
	var ends [][2]int // end indices in stored, for each of the first parts
	d := &stepDecoder{}
	for i := range p.parts {
		if !p.wanted() {
			return errUnwanted
		}
		part, into := &p.parts[i], &stored
		if stored.bytes() > len(data)/changesShare {
			into = &scratch
			scratch.clear()
		}
		if err := part.decode(data, d, into); err != nil {
			return part.fail(err)
		}
		if into == &stored {
			ends = append(ends, [2]int{len(stored.at), len(stored.values)})
		}
	}
	begin := [2]int{}
	for i := range p.parts {
		if !p.wanted() {
			return errUnwanted
		}
		part := &p.parts[i]
		if i < len(ends) {
			part.write(changes{stored.at[begin[0]:ends[i][0]], stored.values[begin[1]:ends[i][1]]}, data)
			begin = ends[i]
			continue
		}
		scratch.clear()
		if err := part.decode(data, d, &scratch); err != nil {
			return part.fail(err) // never: the first pass has checked the block, whose bytes are unchanged
		}
		part.write(scratch, data)
	}
	return nil
}

// decode appends the changes of the block to `to`. data is the base.
func (part *patchPart) decode(data []byte, d *stepDecoder, to *changes) error {
	switch part.mode {
	case steppedBlock:
		return d.read(part.body, part.table, data[part.begin:part.end], part.kind, to)
	case overwrittenBlock:
		return readOverwritten(part.body, int(part.width), int((part.end-part.begin)/part.width), to)
	}
	return nil
}

// write writes this part's changes into data, the whole data section. c has the decoded changes; a
// raw block does not need them.
func (part *patchPart) write(c changes, data []byte) {
	to := data[part.begin:part.end]
	switch part.mode {
	case rawBlock:
		copy(to, part.body)
	case steppedBlock:
		for i, at := range c.at {
			binary.LittleEndian.PutUint16(to[2*at:], c.values[i])
		}
	case overwrittenBlock:
		width := int(part.width)
		elements := part.body[len(part.body)-width*len(c.at):]
		for i, at := range c.at {
			copy(to[int(at)*width:], elements[i*width:(i+1)*width])
		}
	}
}
