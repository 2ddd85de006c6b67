//go:build !portable

// Package segment implements the shared-memory transport (section 10 of the protocol). It reads the
// memory of a publisher that is a process of the same user on the same Linux host.
//
//	0       8       24      32        40       48              4096
//	├───────┼───────┼───────┼─────────┼────────┼─────── ··· ────┼──────────────┤
//	│ magic │ token │ epoch │ version │ length │ model, zeros   │ data section │
//	└───────┴───────┴───────┴─────────┴────────┴────────────────┴──────────────┘
//
// Epoch, version and length are little-endian u64, and length is that of the model's name.
// The publisher writes a segment under an exclusive flock, and the worker copies under a shared flock. Neither
// side waits for the lock. The stamp (epoch, version, length, model) identifies the version in the segment.
package segment

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"regexp"
	"sync"
	"syscall"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

const (
	headerBytes = 4096
	stampBegin  = 24
	stampEnd    = 176
	viewsMax    = 8 // number of segments to keep mapped, enough for several models

	populateRead = 22 // MADV_POPULATE_READ of Linux 5.14; on older kernels the first copy maps the pages
)

var pathPattern = regexp.MustCompile(`^/proc/[0-9]{1,10}/fd/[0-9]{1,10}$`)

// A Cache keeps recently opened segments mapped.
type Cache struct {
	mu    sync.Mutex
	views []*view // the oldest first
}

// NewCache returns an empty Cache.
func NewCache() *Cache { return &Cache{} }

// Open returns a segment on this host with a data section of size bytes, or nil on failure. The
// caller must release the segment after use.
func (c *Cache) Open(shared *wbp.Shared, size int64) wbp.Segment {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, v := range c.views {
		if v.token == shared.Token && int64(len(v.data())) == size {
			v.hold()
			return v
		}
	}
	if !pathPattern.MatchString(shared.Path) { // S4
		return nil
	}
	v, err := open(shared, size)
	if err != nil {
		return nil // not an error: the publisher may be on another host
	}
	if c.views = append(c.views, v); len(c.views) > viewsMax {
		c.views[0].Release()
		c.views = c.views[1:]
	}
	v.hold() // for the caller; open has counted the cache as a user
	return v
}

// A view is a segment of another process, which is mapped for reading.
type view struct {
	token  string
	file   *os.File
	memory []byte

	mu     sync.Mutex
	holds  int // number of users, the cache included
	copies int // copies in progress, which share the descriptor's one flock
}

// open opens and maps the file of a segment. It returns an error if the file is not that segment.
func open(shared *wbp.Shared, size int64) (*view, error) {
	file, err := os.OpenFile(shared.Path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // close-on-exec by default in Go
	if err != nil {
		return nil, err
	}
	v := &view{token: shared.Token, file: file, holds: 1}
	if err := v.mapFile(shared, size); err != nil {
		v.unmap()
		return nil, err
	}
	return v, nil
}

// mapFile maps the file, and returns an error unless it is the segment that shared describes.
func (v *view) mapFile(shared *wbp.Shared, size int64) error {
	info, err := v.file.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() || size > wbp.IntegerMax-headerBytes || info.Size() != headerBytes+size {
		return fmt.Errorf("%s is not a segment of %d bytes", shared.Path, size)
	}
	if seals, err := sealsOf(v.file.Fd()); err != nil || seals&sealShrink == 0 {
		return fmt.Errorf("%s could be truncated while it is read", shared.Path)
	}
	v.memory, err = syscall.Mmap(int(v.file.Fd()), 0, int(info.Size()), syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		return err
	}
	token, err := hex.DecodeString(shared.Token)
	if err != nil || string(v.memory[:stampBegin]) != "WBPSHM1\x00"+string(token) {
		return errors.New("the segment has another token")
	}
	return nil
}

func (v *view) unmap() {
	if v.memory != nil {
		_ = syscall.Munmap(v.memory)
	}
	_ = v.file.Close()
}

func (v *view) data() []byte { return v.memory[headerBytes:] }

func (v *view) hold() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.holds++
}

// Release ends one use of the segment. When the last use ends, it unmaps the segment.
func (v *view) Release() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.holds--; v.holds == 0 {
		v.unmap()
	}
}

// Prefault maps all pages in the background.
func (v *view) Prefault() {
	v.hold()
	go func() {
		defer v.Release()
		_ = v.prefault()
	}()
}

func (v *view) prefault() error { return syscall.Madvise(v.memory, populateRead) }

// Copy calls copy with the locked data section. It returns ErrStale if the segment does not hold
// this version both before and after the call.
func (v *view) Copy(model string, key wbp.Key, copy func(data []byte)) error {
	if err := v.lock(); err != nil { // S5
		return wbp.ErrStale
	}
	defer v.unlock()
	stamp := stampOf(model, key)
	if string(v.memory[stampBegin:stampEnd]) != stamp {
		return wbp.ErrStale
	}
	copy(v.data())
	if string(v.memory[stampBegin:stampEnd]) != stamp {
		return wbp.ErrStale
	}
	return nil
}

func (v *view) lock() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.copies == 0 {
		if err := syscall.Flock(int(v.file.Fd()), syscall.LOCK_SH|syscall.LOCK_NB); err != nil {
			return err
		}
	}
	v.copies++
	return nil
}

func (v *view) unlock() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.copies--; v.copies == 0 {
		_ = syscall.Flock(int(v.file.Fd()), syscall.LOCK_UN)
	}
}

func stampOf(model string, key wbp.Key) string {
	stamp := make([]byte, stampEnd-stampBegin)
	binary.LittleEndian.PutUint64(stamp, uint64(key.Epoch))
	binary.LittleEndian.PutUint64(stamp[8:], uint64(key.Version))
	binary.LittleEndian.PutUint64(stamp[16:], uint64(len(model)))
	copy(stamp[24:], model)
	return string(stamp)
}
