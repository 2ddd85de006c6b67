package wbp

import (
	"errors"
	"time"
)

// ErrStale says that shared memory holds another version by now, or is being filled.
var ErrStale = errors.New("the segment holds another version by now")

// A Key orders versions: by epoch, then by version.
type Key struct{ Epoch, Version int64 }

// Newer tells whether a version is newer than another.
func (k Key) Newer(other Key) bool {
	return k.Epoch > other.Epoch || k.Epoch == other.Epoch && k.Version > other.Version
}

// Segment is shared memory of the publisher's, on this host.
type Segment interface {
	// Copy calls copy with the data section while nobody can overwrite it; ErrStale if it holds
	// another version than this, before or after.
	Copy(model string, key Key, copy func(data []byte)) error
	// Warm has the system map its memory now, so that the first copy need not wait for that. It returns at once.
	Warm()
	// Release says that the segment will not be used again by whoever opened it.
	Release()
}

// Opens opens a segment with a data section of this size; nil if it is not to be had.
type Opens func(shared *Shared, size int64) Segment

// A StagedVersion is whole and verified, in a buffer of ours or in shared memory, until it is applied
// or dropped.
type StagedVersion struct {
	Model  string
	Key    Key
	Layout *Layout
	Digest string   // what its bytes hash to; empty on the shared road, where nothing hashes them
	Shared bool     // it came on the shared road, straight or by a buffer
	Patch  *PatchID // by which it came; nil: as it is

	Metadata map[string]string // what its publisher says of it; nobody writes to it
	Note     string            // of values that the model here cannot hold, once it is applied

	data      []byte
	segment   Segment
	took      time.Duration // decoding the patch
	sayStaged bool          // the publisher wants to know that it is staged, before it is applied
	hash      int64         // on the shared road: hash the bytes, in chunks of this size; 0: do not
}

// Encoding is how it came over the network; empty if it did not.
func (v *StagedVersion) Encoding() string {
	switch {
	case v.Shared:
		return ""
	case v.Patch != nil:
		return v.Patch.Encoding
	}
	return "raw"
}

// Copy calls copy with the data section, and returns the digest of its bytes. The error is
// ErrStale: what was copied is no version then.
func (v *StagedVersion) Copy(copy func(data []byte)) (digest string, err error) {
	if v.segment == nil {
		copy(v.data)
		return v.Digest, nil
	}
	err = v.segment.Copy(v.Model, v.Key, func(data []byte) {
		copy(data)
		if v.hash > 0 {
			digest = DigestOf(v.Layout.ID, data, v.hash)
		}
	})
	return digest, err
}

// buffers are the staging buffers of one model. They are kept and used again, so that a steady
// stream of versions touches no fresh memory, and none of it is the garbage collector's.
type buffers struct {
	free  [][]byte
	size  int64 // of each of these: as much as the version that was begun last
	taken int
}

// reserve makes a buffer of this size now, so that the first version need not wait for it.
func (b *buffers) reserve(size int64) {
	if size == 0 || b.taken > 0 || len(b.free) > 0 {
		return
	}
	if buffer, err := allocate(size, true); err == nil { // else whoever takes one is told
		b.free, b.size = append(b.free, buffer), size
	}
}

// take returns a buffer of this size, one used before if possible; nil if all are in use.
func (b *buffers) take(size int64) ([]byte, error) {
	if b.taken >= BuffersMax {
		return nil, nil
	}
	if b.size != size { // the model has changed its size: the old memory will not fit again
		b.close()
		b.size = size
	}
	if last := len(b.free) - 1; last >= 0 {
		buffer := b.free[last]
		b.free = b.free[:last]
		b.taken++
		return buffer, nil
	}
	buffer, err := allocate(size, false)
	if err == nil {
		b.taken++
	}
	return buffer, err
}

// forget takes the word that a buffer serves what patches build on.
func (b *buffers) forget() { b.taken-- }

// giveBack takes a buffer back.
func (b *buffers) giveBack(buffer []byte) {
	b.taken--
	b.spare(buffer)
}

// spare has a buffer that nobody needs serve other versions, or gives it back to the system if it fits none.
func (b *buffers) spare(buffer []byte) {
	if int64(len(buffer)) == b.size {
		b.free = append(b.free, buffer)
	} else {
		release(buffer)
	}
}

// close gives all memory back to the system. Nobody may use a buffer afterwards.
func (b *buffers) close() {
	for _, buffer := range b.free {
		release(buffer)
	}
	b.free = nil
}
