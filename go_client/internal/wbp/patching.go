package wbp

import (
	"fmt"
	"sync/atomic"
)

// A Patching is a version on its way from a patch that is here into a buffer of ours. Nobody else touches that, or
// what the patch builds on, until it is over; so it takes no lock.
type Patching struct {
	Model    string
	transfer *Transfer
	base     *base
	patch    []byte
	buffer   []byte
	digest   string      // of the version
	unwanted atomic.Bool // it is to end soon
}

// end says that nobody wants it any more.
func (j *Patching) end() { j.unwanted.Store(true) }

// live tells whether somebody still wants it.
func (j *Patching) live() bool { return !j.unwanted.Load() }

// Run decodes the patch, which may take long, and says why it is of no use; "" if it is. (D5)
func (j *Patching) Run() (fault string) {
	patch, err := ParsePatch(j.base.layout, j.patch)
	if err == nil && patch.Target != j.digest {
		err = fmt.Errorf("the patch leads to %.12s; announced is %.12s", patch.Target, j.digest)
	}
	if err == nil {
		patch.wanted = j.live
		pieces := Plan{int64(len(j.base.data)), wantedBytes}
		for i := int64(0); i < pieces.Count() && patch.wanted(); i++ {
			begin, end := pieces.Span(i)
			copy(j.buffer[begin:end], j.base.data[begin:end])
		}
		err = patch.Apply(j.buffer, "")
	}
	if err != nil {
		return err.Error()
	}
	return ""
}
