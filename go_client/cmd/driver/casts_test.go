package main

import (
	"encoding/hex"
	"testing"
)

// infinities has the bits of positive infinity of each dtype. Greater bits, without the sign, are
// NaN.
var infinities = map[string]uint64{"F64": 0x7ff0 << 48, "F32": 0x7f80 << 16, "F16": 0x7c00, "BF16": 0x7f80}

func TestCasts(t *testing.T) {
	cases(t, "casts.json", "cases", func(t *testing.T, c map[string]interface{}, got object) {
		want, _ := hex.DecodeString(c["out"].(string))
		is, _ := hex.DecodeString(got["out"].(string))
		to := c["to"].(string)
		width := map[string]int{"F64": 8, "F32": 4, "F16": 2, "BF16": 2}[to]
		if len(is) != len(want) || len(want) == 0 {
			t.Fatalf("%d bytes, not %d", len(is), len(want))
		}
		isNaN := func(bits uint64) bool { return bits&(1<<(8*width-1)-1) > infinities[to] }
		for at := 0; at < len(want); at += width {
			one, other := little(is[at:at+width]), little(want[at:at+width])
			if one != other && !(isNaN(one) && isNaN(other)) {
				t.Fatalf("value %d became %x, not %x", at/width, one, other)
			}
		}
	})
}

func little(bytes []byte) (bits uint64) {
	for i, b := range bytes {
		bits |= uint64(b) << (8 * i)
	}
	return bits
}
