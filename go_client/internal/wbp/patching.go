package wbp

import (
	"fmt"
	"sync/atomic"
)

// A Patching is a job that decodes a patch into a staging buffer. It needs no lock: only the job uses
// the buffer, and the base does not change until the job has ended.
type Patching struct {
	Model    string
	transfer *Transfer
	base     *base
	patch    []byte
	buffer   []byte
	digest   string // of the version
	canceled atomic.Bool
}

// cancel makes Run return soon. It may be called on any goroutine.
func (j *Patching) cancel() { j.canceled.Store(true) }

// isLive reports whether the job was not cancelled.
func (j *Patching) isLive() bool { return !j.canceled.Load() }

// Run decodes the patch, which may take long. It returns "", or the reason why the patch is unusable. (D5)
func (j *Patching) Run() (fault string) {
	patch, err := ParsePatch(j.base.layout, j.patch)
	if err == nil && patch.Target != j.digest {
		err = fmt.Errorf("the patch leads to %.12s, but %.12s was announced", patch.Target, j.digest)
	}
	if err == nil {
		patch.wanted = j.isLive
		steps := Plan{int64(len(j.base.data)), wantedBytes}
		for i := int64(0); i < steps.Count() && patch.wanted(); i++ {
			begin, end := steps.Span(i)
			copy(j.buffer[begin:end], j.base.data[begin:end])
		}
		err = patch.Apply(j.buffer, "")
	}
	if err != nil {
		return err.Error()
	}
	return ""
}
