package wbp

import (
	"encoding/binary"
	"math"
	"math/rand"
	"strings"
	"testing"
)

// nearest returns the 16-bit float that is nearest to value, found by a search of all such floats.
func nearest(value float64, all []float64, infinity uint16) uint16 {
	best, least := uint16(0), math.Inf(1)
	for bits := uint16(0); bits < infinity; bits++ {
		away := math.Abs(all[bits] - math.Abs(value))
		if away < least || away == least && bits&1 == 0 {
			best, least = bits, away
		}
	}
	// From half-way between the largest value and the next power of two on, the result is infinity.
	largest := all[infinity-1]
	if math.Abs(value) >= largest+(largest-all[infinity-2])/2 {
		best = infinity
	}
	if math.Signbit(value) {
		best |= 1 << 15
	}
	return best
}

func TestCastsAreToTheNearest(t *testing.T) {
	chance := rand.New(rand.NewSource(1))
	for dtype, mantissa := range map[string]int{"F16": 10, "BF16": 7} {
		infinity := uint16(1)<<15 - 1<<mantissa
		all := make([]float64, infinity)
		for bits := range all { // round trip of every finite value
			all[bits] = toFloat64(uint16(bits), mantissa)
			if again := fromFloat64(all[bits], mantissa); again != uint16(bits) {
				t.Fatalf("%s %04x: %g is %04x", dtype, bits, all[bits], again)
			}
		}
		values := []float64{0, math.Copysign(0, -1), math.Inf(1), math.Inf(-1), math.MaxFloat64, math.SmallestNonzeroFloat64}
		for i := 0; i < 200; i++ {
			at := 1 + chance.Intn(int(infinity)-2)
			middle := (all[at] + all[at+1]) / 2
			values = append(values, middle, -middle, math.Nextafter(middle, 0), math.Nextafter(middle, math.Inf(1)))
		}
		values = append(values, all[1]/2, math.Nextafter(all[1]/2, 1), all[infinity-1]*1.001, all[infinity-1]*1.01)
		for _, value := range values {
			to, from := make([]byte, 2), make([]byte, 8)
			binary.LittleEndian.PutUint64(from, math.Float64bits(value))
			Cast(to, dtype, from, "F64")
			if got, want := binary.LittleEndian.Uint16(to), nearest(value, all, infinity); got != want {
				t.Fatalf("%s of %g is %04x, nearest is %04x", dtype, value, got, want)
			}
		}
	}
}

func TestCastsOfManyValues(t *testing.T) {
	const count = 3000 // more than one pass of Cast
	from, to, back := make([]byte, 4*count), make([]byte, 8*count), make([]byte, 4*count)
	for i := 0; i < count; i++ {
		binary.LittleEndian.PutUint32(from[4*i:], math.Float32bits(float32(i)/7))
	}
	Cast(to, "F64", from, "F32")
	Cast(back, "F32", to, "F64")
	if string(back) != string(from) {
		t.Fatal("it is not what it was")
	}
	for _, nan := range []uint16{0x7c01, 0x7e00, 0xfe01} {
		wide := make([]byte, 4)
		Cast(wide, "F32", []byte{byte(nan), byte(nan >> 8)}, "F16")
		if value := math.Float32frombits(binary.LittleEndian.Uint32(wide)); value == value {
			t.Fatalf("%04x is %g", nan, value)
		}
		Cast(wide[:2], "BF16", wide, "F32")
		if bits := binary.LittleEndian.Uint16(wide); bits&0x7f80 != 0x7f80 || bits&0x7f == 0 {
			t.Fatalf("%04x is %04x", nan, bits)
		}
	}
}

func TestFiniteValuesThatBecomeInfiniteAreCounted(t *testing.T) {
	values := []float32{65504, 65519.9, 65520, -1e30, float32(math.Inf(1)), float32(math.NaN()), math.MaxFloat32}
	from := make([]byte, 4*len(values))
	for i, value := range values {
		binary.LittleEndian.PutUint32(from[4*i:], math.Float32bits(value))
	}
	for dtype, expected := range map[string]int{"F16": 3, "BF16": 1, "F64": 0} {
		if lost := Cast(make([]byte, floats[dtype]*len(values)), dtype, from, "F32"); lost != expected {
			t.Errorf("%s: %d", dtype, lost)
		}
	}
	wide := make([]byte, 24)
	for i, value := range []float64{1e39, -1e300, 3e38} {
		binary.LittleEndian.PutUint64(wide[8*i:], math.Float64bits(value))
	}
	if lost := Cast(make([]byte, 12), "F32", wide, "F64"); lost != 2 {
		t.Error(lost)
	}
	one := OverflowText([]Overflow{{"w", "F16", 1}})
	if one != "w: 1 finite value is beyond F16 (at most 65504)" || OverflowText(nil) != "" {
		t.Error(one)
	}
	many := []Overflow{{"a", "BF16", 2}, {"b", "BF16", 2}, {"c", "BF16", 2}, {"d", "BF16", 2}, {"e", "BF16", 2}}
	if text := OverflowText(many); !strings.HasSuffix(text, "(at most 3.38953e+38); and likewise in 1 more tensor") {
		t.Error(text)
	}
}
