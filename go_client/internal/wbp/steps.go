package wbp

import (
	"encoding/binary"
	"errors"
	"math/bits"
)

const (
	stepClasses   = 16
	countBitsMax  = 19
	riceMax       = 18
	golombBitsMax = 16      // largest number of bits of a step's size
	everyLarge    = 31      // value of stepRow.large if every step has a size
	peekedBits    = 57      // least number of bits that peek returns, whatever the position within a byte
	classWindow   = 64      // number of elements that are searched at once
	noClass       = 16      // class of the entries after the last element of a window
	noRank        = 1 << 30 // rank of a class without further steps
)

var (
	errEarly  = errors.New("it ends early")
	errSteps  = errors.New("it has more steps than elements, or than its bytes have room for")
	errNames  = errors.New("it names more elements than there are, or than its bytes have room for")
	errBeyond = errors.New("a gap leads past the end")
)

// A bitReader reads bits from bytes, the lowest bit of each byte first.
type bitReader struct {
	data []byte
	at   int // position of the next bit
}

func (r *bitReader) remaining() int { return 8*len(r.data) - r.at }

// peek returns the next bits without consuming them. Bits after the end are zero.
func (r *bitReader) peek() uint64 {
	rest := r.data[r.at/8:]
	if len(rest) >= 8 {
		return binary.LittleEndian.Uint64(rest) >> (r.at % 8)
	}
	return number(rest) >> (r.at % 8)
}

// number returns the little-endian value of bytes.
func number(bytes []byte) uint64 {
	value := uint64(0)
	for i, b := range bytes {
		value |= uint64(b) << (8 * i)
	}
	return value
}

// take reads `width` bits; the caller has checked that enough bits are left.
func (r *bitReader) take(width int) uint32 {
	value := r.peek() & (1<<width - 1)
	r.at += width
	return uint32(value)
}

func (r *bitReader) number(width int) (int, error) {
	if width > r.remaining() {
		return 0, errEarly
	}
	return int(r.take(width)), nil
}

// unary reads a unary code, and returns the number of zeros, at most `most`, before a 1.
func (r *bitReader) unary(most uint32) (uint32, error) {
	value := uint32(0)
	for {
		zeros := bits.TrailingZeros64(r.peek() | 1<<peekedBits)
		if value += uint32(zeros); value > most {
			return 0, errors.New("a code exceeds its limit")
		}
		if zeros < peekedBits {
			r.at += zeros + 1 // the 1 is before the end, after which all bits are zero
			return value, nil
		}
		if r.remaining() <= zeros {
			return 0, errors.New("a unary code has no end")
		}
		r.at += zeros
	}
}

// positions reads count rising positions below most, and appends them to `to`. Each position is
// encoded as the gap from the previous position, in a Rice code with the parameter k.
func (r *bitReader) positions(to []uint32, count, k, most int) ([]uint32, error) {
	begin := len(to)
	for i := 0; i < count; i++ {
		high, err := r.unary(uint32(most >> k))
		if err != nil {
			return to, err
		}
		to = append(to, high<<k)
	}
	if count*k > r.remaining() {
		return to, errEarly
	}
	next := uint32(0)
	for i := range to[begin:] {
		next += to[begin+i] + r.take(k)
		to[begin+i] = next
		if next++; next > uint32(most) {
			return to, errBeyond
		}
	}
	return to, nil
}

// signs reads count bits and appends a sign for each: 1 for a clear bit, -1 for a set bit.
func (r *bitReader) signs(to []int32, count int) ([]int32, error) {
	if count > r.remaining() {
		return to, errEarly
	}
	for end := r.at + count; r.at < end; r.at++ {
		to = append(to, 1-2*int32(r.data[r.at/8]>>(r.at%8)&1))
	}
	return to, nil
}

// golomb reads `count` numbers in Exp-Golomb codes of order `k`, and returns the numbers in the memory of `to`.
func (r *bitReader) golomb(to []uint32, count, k int) ([]uint32, error) {
	to, total := to[:0], 0
	for i := 0; i < count; i++ {
		width, err := r.unary(uint32(golombBitsMax - k))
		if err != nil {
			return to, err
		}
		to = append(to, width+uint32(k))
		total += int(width) + k
	}
	if total > r.remaining() {
		return to, errEarly
	}
	for i, width := range to {
		to[i] = r.take(int(width)) + 1<<width - 1<<k
	}
	return to, nil
}

// skipPadding checks that the unread bits of the current byte are zero, and returns the bytes after that byte.
func (r *bitReader) skipPadding() ([]byte, error) {
	unread := -r.at & 7
	if r.peek()&(1<<unread-1) != 0 {
		return nil, errors.New("the bits behind its codes are not zero")
	}
	return r.data[(r.at+unread)/8:], nil
}

// end checks that all bytes were read.
func (r *bitReader) end() error {
	rest, err := r.skipPadding()
	if err == nil && len(rest) > 0 {
		err = errors.New("something follows behind its codes")
	}
	return err
}

// A stepTable has the coding parameters of a group of blocks: one row for all elements, or a row for
// each class of elements.
type stepTable struct {
	classes int
	rows    []stepRow // of classes that have steps
}

// A stepRow has the coding parameters of a class: the widths of the count of steps and of the count of
// large steps, and the parameters of the codes of gaps, of gaps of large steps, and of sizes.
type stepRow struct{ class, count, gap, large, largeGap, size int }

// parseStepTable parses a table, and returns the bytes after it.
func parseStepTable(data []byte, kind elementKind) (*stepTable, []byte, error) {
	if len(data) == 0 || data[0] != 1 && (data[0] != stepClasses || kind != bf16Kind && kind != f16Kind) {
		return nil, nil, errors.New("a table is for 1 class, or 16 of floats of 16 bits")
	}
	table, reader := &stepTable{classes: int(data[0])}, &bitReader{data: data[1:]}
	for class := 0; class < table.classes; class++ {
		row, err := parseStepRow(reader)
		if err != nil {
			return nil, nil, err
		}
		if row.class = class; row.count > 0 {
			table.rows = append(table.rows, row)
		}
	}
	rest, err := reader.skipPadding()
	return table, rest, err
}

func parseStepRow(reader *bitReader) (row stepRow, err error) {
	field := func(width, most int) int {
		value, early := reader.number(width)
		if early != nil {
			err = early
		} else if value > most {
			err = errors.New("a parameter of its table is larger than it may be")
		}
		return value
	}
	if row.count = field(5, countBitsMax); row.count == 0 {
		return row, err
	}
	row.gap = field(5, riceMax)
	row.large = field(5, everyLarge)
	if row.large > countBitsMax && row.large < everyLarge {
		return row, errors.New("a count in its table has too many bits")
	}
	if row.large > 0 && row.large < everyLarge {
		row.largeGap = field(5, riceMax)
	}
	if row.large > 0 {
		row.size = field(4, 15)
	}
	return row, err
}

// changes has the changed elements of a block: their positions and, for steps, their new values.
type changes struct {
	at     []uint32
	values []uint16
}

func (c *changes) bytes() int { return 4*len(c.at) + 2*len(c.values) }
func (c *changes) clear()     { c.at, c.values = c.at[:0], c.values[:0] }

// A stepDecoder decodes blocks of steps (see put). It reuses its memory from block to block.
type stepDecoder struct {
	ranks, largeIndices, sizes []uint32
	steps                      []int32
}

// A cursor marks the remaining steps of a class: the steps with indices from next to end. large is
// the number of the class's steps with a size above 1.
type cursor struct {
	class, next, end, large int
	rank, seen              uint32 // rank within the class of the next changed element; number of the class's elements so far
}

// read decodes the body of a block of steps, and appends the changes to `to`. base has the bytes that
// the block has in the base version.
func (d *stepDecoder) read(body []byte, table *stepTable, base []byte, kind elementKind, to *changes) error {
	reader, elements := &bitReader{data: body}, len(base)/2
	cursors, err := readCounts(reader, table, elements)
	if err != nil {
		return err
	}
	d.ranks, d.steps = d.ranks[:0], d.steps[:0]
	for i, c := range cursors {
		if err := d.readClass(reader, &table.rows[i], c, elements); err != nil {
			return err
		}
	}
	if err := reader.end(); err != nil {
		return err
	}
	if table.classes > 1 {
		return d.find(base, kind, cursors, to)
	}
	for i, at := range d.ranks {
		if err := to.put(base, at, d.steps[i]); err != nil {
			return err
		}
	}
	return nil
}

// readCounts reads the number of steps of each class, and returns a cursor for each class. It returns
// an error if there are more steps than elements, or more than the remaining bits can encode.
func readCounts(reader *bitReader, table *stepTable, elements int) ([]cursor, error) {
	cursors, total := make([]cursor, len(table.rows)), 0
	for i, row := range table.rows {
		count, err := reader.number(row.count)
		large := 0
		if err == nil && row.large > 0 && row.large < everyLarge {
			large, err = reader.number(row.large)
		}
		if err != nil {
			return nil, err
		}
		if large > count {
			return nil, errors.New("more of its steps are large than there are")
		}
		cursors[i] = cursor{class: row.class, next: total, end: total + count, large: large}
		total += count
	}
	if total > elements || 2*total > reader.remaining() {
		return nil, errSteps
	}
	return cursors, nil
}

// readClass reads the steps of a class, and the ranks of the changed elements within it.
func (d *stepDecoder) readClass(reader *bitReader, row *stepRow, c cursor, elements int) (err error) {
	count := c.end - c.next
	if d.ranks, err = reader.positions(d.ranks, count, row.gap, elements); err != nil {
		return err
	}
	if d.steps, err = reader.signs(d.steps, count); err != nil || row.large == 0 {
		return err
	}
	steps := d.steps[c.next:]
	if row.large == everyLarge {
		d.sizes, err = reader.golomb(d.sizes, count, row.size)
		for i := range steps {
			if err == nil {
				steps[i] *= int32(d.sizes[i]) + 1
			}
		}
		return err
	}
	if d.largeIndices, err = reader.positions(d.largeIndices[:0], c.large, row.largeGap, count); err != nil {
		return err
	}
	if d.sizes, err = reader.golomb(d.sizes, c.large, row.size); err != nil {
		return err
	}
	for i, index := range d.largeIndices {
		steps[index] *= int32(d.sizes[i]) + 2
	}
	return nil
}

// put appends the change of the element with index at. In the order of all values of its dtype, the
// new value is `step` values after the base's value, or before it if step is negative.
func (c *changes) put(base []byte, at uint32, step int32) error {
	ordinal := int32(binary.LittleEndian.Uint16(base[2*at:]))
	if ordinal&0x8000 != 0 {
		ordinal = 0xffff - ordinal
	} else {
		ordinal |= 0x8000
	}
	ordinal += step
	if ordinal < 0 || ordinal > 0xffff {
		return errors.New("a step leads beyond 16 bits: is the patch applied to the wrong base?")
	}
	if ordinal&0x8000 != 0 {
		ordinal &= 0x7fff
	} else {
		ordinal = 0xffff - ordinal
	}
	c.at, c.values = append(c.at, at), append(c.values, uint16(ordinal))
	return nil
}

// A classTable is indexed by the upper 9 bits of an element. It has the class of the element, and two
// words with a byte for each class: the byte of the element's class is 1, all others are 0.
type classTable struct {
	of   [512]uint8
	ones [512]struct{ low, high uint64 }
}

var bf16Classes, f16Classes = classesBy(func(upper int) int {
	switch exponent := upper & 255; {
	case exponent < 96:
		return 0
	case exponent < 126:
		return (exponent - 96) / 2
	}
	return stepClasses - 1
}), classesBy(func(upper int) int { return upper >> 4 & 15 })

func classesBy(class func(upper int) int) *classTable {
	table := &classTable{}
	for upper := range table.of {
		c := class(upper)
		table.of[upper] = uint8(c)
		if c < 8 {
			table.ones[upper].low = 1 << (8 * c)
		} else {
			table.ones[upper].high = 1 << (8 * (c - 8))
		}
	}
	return table
}

// find finds the changed elements by their ranks within their classes, and appends the changes. It
// searches windows of 64 elements. It counts the elements of all classes of a window at once, in the
// bytes of two words, and classifies the elements one by one only if one of them changes.
func (d *stepDecoder) find(base []byte, kind elementKind, all []cursor, to *changes) error {
	classes := bf16Classes
	if kind == f16Kind {
		classes = f16Classes
	}
	cursors := all[:0]
	for _, c := range all {
		if c.next < c.end {
			c.rank = d.ranks[c.next]
			cursors = append(cursors, c)
		}
	}
	var found [classWindow]uint8
	for begin := 0; begin < len(base); begin += 2 * classWindow {
		window := base[begin:]
		if len(window) > 2*classWindow {
			window = window[:2*classWindow]
		}
		counts, classified := classes.count(window), false
		for i := range cursors {
			c := &cursors[i]
			seenAfter := c.seen + uint32(counts[c.class])
			if c.rank < seenAfter {
				if !classified {
					classified = true
					classes.classify(window, &found)
				}
				if err := d.findIn(base, begin/2, maskOf(&found, c.class), c, seenAfter, to); err != nil {
					return err
				}
			}
			c.seen = seenAfter
		}
	}
	for i := range cursors {
		if cursors[i].next < cursors[i].end {
			return errors.New("the patch refers past the last element of a class: is it applied to the wrong base?")
		}
	}
	return nil
}

// findIn appends the changes of a class in a window, whose first element has index first. mask has one bit
// for each element of the class; seenAfter is the number of the class's elements up to the window's end.
func (d *stepDecoder) findIn(base []byte, first int, mask uint64, c *cursor, seenAfter uint32, to *changes) error {
	for seen := c.seen; c.rank < seenAfter; seen++ {
		for ; seen < c.rank; seen++ {
			mask &= mask - 1
		}
		if err := to.put(base, uint32(first+bits.TrailingZeros64(mask)), d.steps[c.next]); err != nil {
			return err
		}
		mask &= mask - 1
		if c.next++; c.next == c.end {
			c.rank = noRank
		} else {
			c.rank = d.ranks[c.next]
		}
	}
	return nil
}

// count returns the number of elements of each class in a window.
func (t *classTable) count(window []byte) (counts [stepClasses]uint8) {
	var low, high uint64
	for ; len(window) >= 8; window = window[8:] {
		four := binary.LittleEndian.Uint64(window)
		a, b, c, d := &t.ones[four>>7&511], &t.ones[four>>23&511], &t.ones[four>>39&511], &t.ones[four>>55&511]
		low += a.low + b.low + c.low + d.low
		high += a.high + b.high + c.high + d.high
	}
	for ; len(window) > 0; window = window[2:] {
		one := &t.ones[binary.LittleEndian.Uint16(window)>>7]
		low, high = low+one.low, high+one.high
	}
	binary.LittleEndian.PutUint64(counts[:], low)
	binary.LittleEndian.PutUint64(counts[8:], high)
	return counts
}

// classify writes the class of each element of a window into found.
func (t *classTable) classify(window []byte, found *[classWindow]uint8) {
	for i := range found {
		found[i] = noClass
	}
	for i := 0; 2*i < len(window); i++ {
		found[i] = t.of[binary.LittleEndian.Uint16(window[2*i:])>>7]
	}
}

// maskOf returns a mask in which bit i is set if element i of a window has this class.
func maskOf(found *[classWindow]uint8, class int) uint64 {
	const ones = 0x0101010101010101
	const gather = 0x0102040810204080 // as a factor: moves the lowest bits of all bytes into the highest byte
	mask := uint64(0)
	for i := 0; i < classWindow; i += 8 {
		differs := binary.LittleEndian.Uint64(found[i:]) ^ uint64(class)*ones // bytes: 0 for this class, else at most 31
		equals := ^(differs + 0x7f*ones) >> 7 & ones
		mask |= equals * gather >> 56 << i
	}
	return mask
}

// readOverwritten appends the positions in the body of an overwrittenBlock to `to`. The new
// elements, of width bytes each, are at the end of the body.
func readOverwritten(body []byte, width, elements int, to *changes) (err error) {
	if len(body) < 3 {
		return errNames
	}
	head := int(number(body[:3]))
	count, k := head&(1<<19-1), head>>19
	codes := len(body) - 3 - count*width
	if count == 0 || count > elements || codes < 0 || count > 8*codes || k > riceMax {
		return errNames
	}
	reader := &bitReader{data: body[3 : 3+codes]}
	if to.at, err = reader.positions(to.at, count, k, elements); err != nil {
		return err
	}
	return reader.end()
}
