//go:build !portable

package wbp

import (
	"fmt"
	"syscall"
)

const populateMax = 1 << 30 // the largest memory to prefault; prefaulting more takes too long

// allocate returns size bytes from the system, with room for an authentication tag after them. The memory
// is outside the Go heap: it does not affect the pace of garbage collection, and release frees it at once.
// If prefault is true, the kernel maps all pages at once, which is several times cheaper than one by one.
func allocate(size int64, prefault bool) ([]byte, error) {
	if size == 0 {
		return []byte{}, nil
	}
	if int64(int(size+TagBytes)) != size+TagBytes {
		return nil, fmt.Errorf("%d bytes are more than this machine can address", size)
	}
	flags := syscall.MAP_PRIVATE | syscall.MAP_ANON
	if prefault && size <= populateMax {
		flags |= syscall.MAP_POPULATE
	}
	memory, err := syscall.Mmap(-1, 0, int(size+TagBytes), syscall.PROT_READ|syscall.PROT_WRITE, flags)
	if err != nil {
		return nil, err
	}
	return memory[:size], nil
}

// release returns memory from allocate to the system.
func release(buffer []byte) {
	if len(buffer) > 0 {
		_ = syscall.Munmap(buffer[:cap(buffer)])
	}
}
