//go:build !portable

package segment

import (
	"os"
	"runtime"
	"syscall"
	"unsafe"
)

// What package syscall lacks: numbers of the kernel's interface.
const (
	fcntlAddSeals   = 1033
	fcntlGetSeals   = 1034
	sealShrink      = 2
	sealGrow        = 4
	memfdCloseExec  = 1
	memfdAllowSeals = 2
)

var memfdCreate = map[string]uintptr{"386": 356, "amd64": 319, "arm": 385, "arm64": 279, "riscv64": 279}

// sealsOf returns what can no longer be done to a memfd. An error: it is none.
func sealsOf(fd uintptr) (int, error) {
	seals, _, err := syscall.Syscall(syscall.SYS_FCNTL, fd, fcntlGetSeals, 0)
	if err != 0 {
		return 0, err
	}
	return int(seals), nil
}

// Make returns a memfd that holds these bytes, sealed as a publisher's is. Workers make none;
// tests and the conformance driver do.
func Make(content []byte) (*os.File, error) {
	name := []byte("weightbus\x00")
	fd, _, err := syscall.Syscall(memfdCreate[runtime.GOARCH], uintptr(unsafe.Pointer(&name[0])),
		memfdCloseExec|memfdAllowSeals, 0)
	if err != 0 {
		return nil, err
	}
	file := os.NewFile(fd, "memfd:weightbus")
	if _, err := file.Write(content); err != nil {
		return nil, err
	}
	if _, _, err := syscall.Syscall(syscall.SYS_FCNTL, fd, fcntlAddSeals, sealShrink|sealGrow); err != 0 {
		return nil, err
	}
	return file, nil
}
