//go:build !linux || portable

package wbp

import "fmt"

// allocate returns size bytes, with room for an authentication tag after them. If the system does not
// have enough memory, the process ends: Options.BytesMax must be low enough to prevent that.
func allocate(size int64, _ bool) ([]byte, error) {
	if int64(int(size+TagBytes)) != size+TagBytes {
		return nil, fmt.Errorf("%d bytes are more than this machine can address", size)
	}
	return make([]byte, size, size+TagBytes), nil
}

// release leaves memory from allocate to the garbage collector.
func release([]byte) {}
