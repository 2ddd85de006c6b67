package wbp

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
)

// floats has the dtypes between which values can be converted, with their sizes in bytes.
var floats = map[string]int{"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

// Castable reports whether values of one dtype can be converted to another.
func Castable(to, from string) bool { return floats[to] > 0 && floats[from] > 0 }

// Cast converts little-endian values from one dtype to another, and fills `to`. It rounds to the
// nearest value, ties to even; values beyond the largest finite value become infinite. NaN stays
// NaN, and subnormals are kept. Cast returns the number of finite values that became infinite.
func Cast(to []byte, toDType string, from []byte, fromDType string) int {
	var values, became [1024]float64 // float64 holds every value of these dtypes
	wide, narrow, lost := floats[fromDType], floats[toDType], 0
	for len(to) > 0 {
		batch := values[:]
		if left := len(to) / narrow; left < len(batch) {
			batch = batch[:left]
		}
		widen(batch, from, fromDType)
		round(to, toDType, batch)
		if anyBeyond(batch, greatest[toDType]) {
			widen(became[:len(batch)], to, toDType)
			for i, value := range batch {
				if math.IsInf(became[i], 0) && !math.IsInf(value, 0) {
					lost++
				}
			}
		}
		to, from = to[len(batch)*narrow:], from[len(batch)*wide:]
	}
	return lost
}

// greatest has the greatest finite value of each dtype.
var greatest = map[string]float64{
	"F64": math.MaxFloat64, "F32": math.MaxFloat32, "F16": 65504, "BF16": 0x1.FEp127,
}

// anyBeyond reports whether any value is beyond limit.
func anyBeyond(values []float64, limit float64) bool {
	for _, value := range values {
		if value > limit || value < -limit {
			return true
		}
	}
	return false
}

// An Overflow is a tensor with the number of its finite values that became infinite.
type Overflow struct {
	Name, DType string
	Count       int
}

// OverflowText describes the overflows of the first tensors; "" if there are none.
func OverflowText(lost []Overflow) string {
	const shown = 4
	words := []string{}
	for i, overflow := range lost {
		if i == shown {
			more, plural := len(lost)-shown, "s"
			if more == 1 {
				plural = ""
			}
			words = append(words, fmt.Sprintf("and likewise in %d more tensor%s", more, plural))
			break
		}
		values := "values are"
		if overflow.Count == 1 {
			values = "value is"
		}
		words = append(words, fmt.Sprintf("%s: %d finite %s beyond %s (at most %.6g)", Printable(overflow.Name, 256),
			overflow.Count, values, overflow.DType, greatest[overflow.DType]))
	}
	return strings.Join(words, "; ")
}

func widen(values []float64, from []byte, dtype string) {
	word := binary.LittleEndian
	switch dtype {
	case "F64":
		for i := range values {
			values[i] = math.Float64frombits(word.Uint64(from[8*i:]))
		}
	case "F32":
		for i := range values {
			values[i] = float64(math.Float32frombits(word.Uint32(from[4*i:])))
		}
	case "F16":
		for i := range values {
			values[i] = toFloat64(word.Uint16(from[2*i:]), 10)
		}
	case "BF16":
		for i := range values {
			values[i] = float64(math.Float32frombits(uint32(word.Uint16(from[2*i:])) << 16))
		}
	}
}

func round(to []byte, dtype string, values []float64) {
	word := binary.LittleEndian
	switch dtype {
	case "F64":
		for i, value := range values {
			word.PutUint64(to[8*i:], math.Float64bits(value))
		}
	case "F32":
		for i, value := range values {
			word.PutUint32(to[4*i:], math.Float32bits(float32(value)))
		}
	case "F16":
		for i, value := range values {
			word.PutUint16(to[2*i:], fromFloat64(value, 10))
		}
	case "BF16":
		for i, value := range values {
			word.PutUint16(to[2*i:], fromFloat64(value, 7))
		}
	}
}

// The number of mantissa bits of float64, and the exponent that float64 stores for 1.
const mantissa64, one64 = 52, 1023

// toFloat64 converts a 16-bit float to float64. mantissa is its number of mantissa bits.
func toFloat64(bits uint16, mantissa int) float64 {
	sign, infinity := uint64(bits>>15)<<63, uint16(1)<<15-1<<mantissa
	abs := bits & (1<<15 - 1)
	switch bias := int(infinity >> (mantissa + 1)); {
	case abs >= infinity: // infinity, or NaN, whose bits are kept
		return math.Float64frombits(sign | math.Float64bits(math.Inf(1)) | uint64(abs-infinity)<<(mantissa64-mantissa))
	case abs < 1<<mantissa: // zero and subnormals
		tiny := math.Ldexp(1, 1-bias-mantissa)
		return math.Float64frombits(sign | math.Float64bits(float64(abs)*tiny))
	default:
		return math.Float64frombits(sign | (uint64(abs)<<(mantissa64-mantissa) + uint64(one64-bias)<<mantissa64))
	}
}

// fromFloat64 converts a float64 to a 16-bit float. mantissa is its number of mantissa bits. If
// rounding carries out of the mantissa, the exponent increases by one, and the largest exponent
// becomes infinity, which is correct.
func fromFloat64(value float64, mantissa int) uint16 {
	bits := math.Float64bits(value)
	sign, abs := uint16(bits>>63)<<15, bits&^(1<<63)
	infinity := uint64(1)<<15 - 1<<mantissa
	if math.IsNaN(value) {
		return sign | uint16(infinity) | 1<<(mantissa-1)
	}
	bias := int(infinity >> (mantissa + 1))
	exponent := int(abs>>mantissa64) - one64 + bias
	dropped := mantissa64 - mantissa
	switch {
	case exponent >= 2*bias+1:
		return sign | uint16(infinity)
	case exponent > 0:
		abs -= uint64(one64-bias) << mantissa64
	case exponent < -mantissa: // less than half of the smallest subnormal
		return sign
	default: // a subnormal: its leading 1 is explicit, and more bits are dropped
		abs = abs&(1<<mantissa64-1) | 1<<mantissa64
		dropped += 1 - exponent
	}
	half, odd := uint64(1)<<(dropped-1), abs>>dropped&1
	if abs = (abs + half - 1 + odd) >> dropped; abs > infinity {
		abs = infinity
	}
	return sign | uint16(abs)
}
