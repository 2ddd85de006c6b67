package wbp

import (
	"fmt"
	"sync/atomic"
)

// A Patching is a job that decodes a patch into a staging buffer. The job needs no lock, since it
// owns the buffer, and the base does not change until the job has ended.
type Patching struct {
	Model    string
	transfer *Transfer
	base     *base
	patch    []byte
	buffer   []byte
	digest   string      // of the version
	unwanted atomic.Bool // cancelled
}

// end cancels the job.
func (j *Patching) end() { j.unwanted.Store(true) }

// live reports whether the job was not cancelled.
func (j *Patching) live() bool { return !j.unwanted.Load() }

// Run decodes the patch, which may take long. It returns "", or the reason that the patch is
// unusable. (D5)
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
