//go:build !windows

package wbp

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The time to parse a layout does not grow with the square of its length.
func TestTimeForLayouts(t *testing.T) {
	for what, text := range map[string]func(count int) string{
		"tensors": func(n int) string {
			return `{` + repeated(n, func(i int) string { return fmt.Sprintf(`"t%d":`, i) + emptyTensor }) + `}`
		},
		"metadata": func(n int) string {
			return `{"__metadata__":{` + repeated(4*n, func(i int) string { return fmt.Sprintf(`"%d":"%d"`, i, i) }) + `}}`
		},
		"aliases": func(n int) string {
			return `{"__metadata__":{` + repeated(4*n, func(i int) string { return fmt.Sprintf(`"%d":"t"`, i) }) + `},"t":` + emptyTensor + `}`
		},
		"a long name": func(n int) string { return `{"` + strings.Repeat("a", 100*n) + `":` + emptyTensor + `}` },
		"escapes":     func(n int) string { return `{"` + strings.Repeat(`\u0041`, 20*n) + `":` + emptyTensor + `}` },
		"spaces":      func(n int) string { return `{` + strings.Repeat(" ", 100*n) + `}` },
		"shapes": func(n int) string {
			return `{` + repeated(n/10, func(i int) string {
				return fmt.Sprintf(`"t%d":{"dtype":"U8","shape":[0%s],"data_offsets":[0,0]}`, i, strings.Repeat(",1", 63))
			}) + `}`
		},
	} {
		short, long := cost(layoutOfText(text(2000))), cost(layoutOfText(text(16000)))
		if long > 8*3*(short+3*time.Millisecond) {
			t.Errorf("%s: %v, and %v for eight times as much", what, short, long)
		}
	}
}

// cost returns the CPU time to parse a layout, the least of three runs.
func cost(layout []byte) time.Duration {
	least := time.Hour
	for range [3]struct{}{} {
		begun := used()
		_, _ = ParseLayout(layout)
		if took := used() - begun; took < least {
			least = took
		}
	}
	return least
}

func used() time.Duration {
	var usage syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
