package wbp

import (
	"errors"
	"time"
)

// ErrStale means that the shared memory of a version was overwritten by another version, or is being written.
var ErrStale = errors.New("the segment no longer holds this version")

// A Key identifies a version. Keys are ordered by epoch, then by version.
type Key struct{ Epoch, Version int64 }

// Newer reports whether k is newer than other.
func (k Key) Newer(other Key) bool {
	return k.Epoch > other.Epoch || k.Epoch == other.Epoch && k.Version > other.Version
}

// A Segment is shared memory of a publisher on the same host.
type Segment interface {
	// Copy calls copy with the data section, locked against writers. It returns ErrStale if the
	// segment does not hold this version both before and after the call.
	Copy(model string, key Key, copy func(data []byte)) error
	// Prefault prefaults the memory in the background, so that the first copy is faster.
	Prefault()
	// Release ends the caller's use of the segment.
	Release()
}

// OpenSegment opens a segment with a data section of size bytes; it returns nil if that fails.
type OpenSegment func(shared *Shared, size int64) Segment

// A StagedVersion is a complete version: verified in a staging buffer, or still in shared memory. It
// is valid until the version is applied or dropped.
type StagedVersion struct {
	Model  string
	Key    Key
	Layout *Layout
	Digest string   // "" in shared memory, which is not hashed yet
	Shared bool     // the version comes from shared memory, directly or through a buffer
	Patch  *PatchID // the patch by which the version was received; nil if received whole

	Metadata map[string]string // published with the version; read-only
	Note     string            // once applied: describes values that the model cannot hold

	data         []byte
	segment      Segment
	took         time.Duration // time to decode the patch
	reportStaged bool          // report the version as staged before it is applied
	hash         int64         // in shared memory: the chunk size of the digest to compute; 0 for no digest
}

// Encoding returns the encoding in which the version was received over the network; "" if it comes
// from shared memory.
func (v *StagedVersion) Encoding() string {
	switch {
	case v.Shared:
		return ""
	case v.Patch != nil:
		return v.Patch.Encoding
	}
	return "raw"
}

// Copy calls copy with the data section, and returns the digest of its bytes, or "" if they were not
// hashed. If it returns ErrStale, the copied bytes are not those of the version.
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

// buffers are the staging buffers of one model. They are reused, so that a steady stream of
// versions allocates no memory, and they are outside the Go heap.
type buffers struct {
	free  [][]byte
	size  int64 // of each free buffer: the size of the version started last
	taken int   // number of buffers in use
}

// reserve allocates a buffer of size bytes in advance for the first version.
func (b *buffers) reserve(size int64) {
	if size == 0 || b.taken > 0 || len(b.free) > 0 {
		return
	}
	if buffer, err := allocate(size, true); err == nil { // otherwise take will report the error
		b.free, b.size = append(b.free, buffer), size
	}
}

// take returns a buffer of size bytes, reused if possible; nil if BuffersMax buffers are in use.
func (b *buffers) take(size int64) ([]byte, error) {
	if b.taken >= BuffersMax {
		return nil, nil
	}
	if b.size != size { // the model's size changed: old buffers no longer fit
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

// forget stops counting a buffer as in use, since the buffer has become the patch base.
func (b *buffers) forget() { b.taken-- }

// giveBack puts a buffer back after use.
func (b *buffers) giveBack(buffer []byte) {
	b.taken--
	b.recycle(buffer)
}

// recycle keeps a buffer for later versions if it has the current size, and otherwise releases it.
func (b *buffers) recycle(buffer []byte) {
	if int64(len(buffer)) == b.size {
		b.free = append(b.free, buffer)
	} else {
		release(buffer)
	}
}

// close releases the free buffers to the system.
func (b *buffers) close() {
	for _, buffer := range b.free {
		release(buffer)
	}
	b.free = nil
}
