//go:build !linux || portable

package wbp

import "fmt"

// allocate returns memory of this size, with room for a tag behind it. A size that the system refuses ends the process: set
// BytesMax to what there is.
func allocate(size int64, _ bool) ([]byte, error) {
	if int64(int(size+TagBytes)) != size+TagBytes {
		return nil, fmt.Errorf("%d bytes are more than this machine can address", size)
	}
	return make([]byte, size, size+TagBytes), nil
}

// release gives memory of allocate back.
func release([]byte) {}
