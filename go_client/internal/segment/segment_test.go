//go:build linux && !portable

package segment

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

const token = "00112233445566778899aabbccddeeff"

var key = wbp.Key{Epoch: 7, Version: 3}

// content returns the bytes of a segment of the model "policy". A stamp of zeros means no version.
func content(stamp string, data []byte) []byte {
	raw, _ := hex.DecodeString(token)
	out := append([]byte("WBPSHM1\x00"), raw...)
	out = append(out, stamp...)
	return append(append(out, make([]byte, headerBytes-len(out))...), data...)
}

func made(t *testing.T, content []byte) (*os.File, *wbp.Shared) {
	t.Helper()
	file, err := Make(content)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	return file, &wbp.Shared{Path: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), file.Fd()), Token: token}
}

// another opens the same memory with its own file description, as the publisher does.
func another(t *testing.T, shared *wbp.Shared) *os.File {
	t.Helper()
	file, err := os.OpenFile(shared.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	return file
}

// Prefault maps the pages of a segment before they are read.
func TestWarm(t *testing.T) {
	const size = 1 << 20
	_, shared := made(t, content("", make([]byte, size)))
	view := NewCache().Open(shared, size).(*view)
	pages := func() int {
		all, err := os.ReadFile("/proc/self/smaps")
		if err != nil {
			t.Fatal(err)
		}
		_, mapping, found := strings.Cut(string(all), fmt.Sprintf("%08x-", uintptr(unsafe.Pointer(&view.memory[0]))))
		if !found {
			t.Fatal("the mapping is not there")
		}
		_, rest, _ := strings.Cut(mapping, "Rss:")
		var kilobytes int
		if _, err := fmt.Sscan(rest, &kilobytes); err != nil {
			t.Fatal(err)
		}
		return kilobytes
	}
	before := pages()
	if err := view.prefault(); errors.Is(err, syscall.EINVAL) {
		t.Skip("this kernel maps nothing ahead")
	} else if err != nil {
		t.Fatal(err)
	}
	if after := pages(); before >= size>>10 || after < size>>10 {
		t.Fatalf("%d kB before, %d after", before, after)
	}
}

func TestCopy(t *testing.T) {
	data := []byte("0123456789")
	file, shared := made(t, content(stampOf("policy", key), data))
	view := NewCache().Open(shared, 10)
	if view == nil {
		t.Fatal("it was not opened")
	}
	var copied []byte
	read := func(data []byte) { copied = append([]byte{}, data...) }
	if err := view.Copy("policy", key, read); err != nil || !bytes.Equal(copied, data) {
		t.Fatalf("%q %v", copied, err)
	}
	for _, other := range []wbp.Key{{Epoch: 7, Version: 4}, {Epoch: 8, Version: 3}} {
		if err := view.Copy("policy", other, read); !errors.Is(err, wbp.ErrStale) {
			t.Fatal(err)
		}
	}
	overwrite := func([]byte) { _, _ = file.WriteAt([]byte{9}, 24) }
	if err := view.Copy("policy", key, overwrite); !errors.Is(err, wbp.ErrStale) {
		t.Fatalf("it was overwritten meanwhile, but: %v", err)
	}
}

// A copy excludes writers and a writer excludes copies, but two copies may run at once.
func TestLocks(t *testing.T) {
	_, shared := made(t, content(stampOf("policy", key), nil))
	owner := another(t, shared)
	view := NewCache().Open(shared, 0)
	fill := func() error { return syscall.Flock(int(owner.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) }
	err := view.Copy("policy", key, func([]byte) {
		if err := view.Copy("policy", key, func([]byte) {}); err != nil {
			t.Error(err)
		}
		if fill() == nil {
			t.Error("it was filled while it was copied")
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := fill(); err != nil {
		t.Fatal(err)
	}
	if err := view.Copy("policy", key, func([]byte) {}); !errors.Is(err, wbp.ErrStale) {
		t.Fatal(err)
	}
}

func TestWhatIsNoSegment(t *testing.T) {
	good := content(stampOf("policy", key), nil)
	_, shared := made(t, good)
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, good, 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(plain)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	pipe, writer, _ := os.Pipe()
	defer pipe.Close()
	defer writer.Close()
	path := func(f *os.File) string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd()) }
	_, foreign := made(t, append([]byte("WBPSHM2\x00"), good[8:]...))
	for name, c := range map[string]struct {
		shared wbp.Shared
		size   int64
	}{
		"the file's own path":     {wbp.Shared{Path: plain, Token: token}, 0},
		"a path with more behind": {wbp.Shared{Path: shared.Path + "/x", Token: token}, 0},
		"a path with a line end":  {wbp.Shared{Path: shared.Path + "\n", Token: token}, 0},
		"nothing":                 {wbp.Shared{Path: "/proc/1/fd/999999", Token: token}, 0},
		"a file that can shrink":  {wbp.Shared{Path: path(file), Token: token}, 0},
		"a pipe":                  {wbp.Shared{Path: path(pipe), Token: token}, 0},
		"another token":           {wbp.Shared{Path: shared.Path, Token: strings.Repeat("f", 32)}, 0},
		"another magic":           {*foreign, 0},
		"another size":            {*shared, 1},
		"a size beyond counting":  {*shared, wbp.IntegerMax},
	} {
		if view := NewCache().Open(&c.shared, c.size); view != nil {
			t.Errorf("%s was opened", name)
		}
	}
}

// Only the latest segments and those in use stay open.
func TestOldSegmentsAreClosed(t *testing.T) {
	cache := NewCache()
	var views []*view
	for i := 0; i < viewsMax+3; i++ {
		file, shared := made(t, content(stampOf("policy", key), nil))
		shared.Token = fmt.Sprintf("%032x", i)
		raw, _ := hex.DecodeString(shared.Token)
		if _, err := file.WriteAt(raw, 8); err != nil {
			t.Fatal(err)
		}
		found, _ := cache.Open(shared, 0).(*view)
		if found == nil {
			t.Fatal("it was not opened")
		}
		views = append(views, found)
	}
	for i, v := range views {
		v.Release()
		if open := v.file.Fd() != ^uintptr(0); open != (i >= 3) {
			t.Errorf("segment %d: open %v", i, open)
		}
	}
}
