//go:build !portable

package segment

import (
	"os"
	"runtime"
	"syscall"
	"unsafe"
)

// Constants of the kernel that package syscall lacks.
const (
	fcntlAddSeals   = 1033
	fcntlGetSeals   = 1034
	sealShrink      = 2
	sealGrow        = 4
	memfdCloseExec  = 1
	memfdAllowSeals = 2
)

var memfdCreate = map[string]uintptr{"386": 356, "amd64": 319, "arm": 385, "arm64": 279, "riscv64": 279}

// sealsOf returns the seals of a memfd, or an error if the file is not a memfd.
func sealsOf(fd uintptr) (int, error) {
	seals, _, err := syscall.Syscall(syscall.SYS_FCNTL, fd, fcntlGetSeals, 0)
	if err != 0 {
		return 0, err
	}
	return int(seals), nil
}

// Make returns a memfd with this content and the seals of a publisher's segment, for tests and the
// conformance driver.
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
