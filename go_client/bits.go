package weightbus

import (
	"encoding/binary"
	"fmt"
	"math"
)

// BF16ToFloat32 converts a bfloat16, which is the upper half of a float32.
func BF16ToFloat32(bits uint16) float32 { return math.Float32frombits(uint32(bits) << 16) }

// F16ToFloat32 converts an IEEE half float.
func F16ToFloat32(bits uint16) float32 { return smallFloat(uint32(bits), 5, 10, true) }

// F8E5M2ToFloat32 converts a float8_e5m2, which is the upper half of an IEEE half float.
func F8E5M2ToFloat32(bits uint8) float32 { return smallFloat(uint32(bits), 5, 2, true) }

// F8E4M3ToFloat32 converts a float8_e4m3fn, which has no infinities, and one NaN for each sign.
func F8E4M3ToFloat32(bits uint8) float32 {
	if bits&0x7f == 0x7f {
		return float32(math.NaN())
	}
	return smallFloat(uint32(bits), 4, 3, false)
}

// smallFloat converts a float of 8 or 16 bits to float32. If ieee is true, the largest exponent
// stands for infinity or NaN.
func smallFloat(bits uint32, exponentBits, mantissaBits int, ieee bool) float32 {
	mantissa := bits & (1<<mantissaBits - 1)
	exponent := int(bits>>mantissaBits) & (1<<exponentBits - 1)
	bias := 1<<(exponentBits-1) - 1
	value := 0.0
	switch {
	case ieee && exponent == 1<<exponentBits-1 && mantissa == 0:
		value = math.Inf(1)
	case ieee && exponent == 1<<exponentBits-1:
		value = math.NaN()
	case exponent == 0:
		value = math.Ldexp(float64(mantissa), 1-bias-mantissaBits)
	default:
		value = math.Ldexp(float64(mantissa|1<<mantissaBits), exponent-bias-mantissaBits)
	}
	if bits>>(exponentBits+mantissaBits) != 0 {
		value = -value
	}
	return float32(value)
}

// Float32s returns the elements converted to float32 in a new slice. It returns an error unless the
// dtype is F64, F32, F16, BF16, F8_E4M3 or F8_E5M2.
func (t Tensor) Float32s() ([]float32, error) {
	width, convert := t.converter()
	if convert == nil {
		return nil, fmt.Errorf("a tensor of dtype %s cannot be converted to float32; use its Bytes", t.dtype)
	}
	values := make([]float32, len(t.bytes)/width)
	for i := range values {
		values[i] = convert(t.bytes[i*width:])
	}
	return values, nil
}

// converter returns the size of an element in bytes, and the function that converts an element to
// float32. The function is nil for other dtypes than those of Float32s.
func (t Tensor) converter() (width int, convert func(b []byte) float32) {
	order := binary.LittleEndian
	switch t.dtype {
	case "F64":
		return 8, func(b []byte) float32 { return float32(math.Float64frombits(order.Uint64(b))) }
	case "F32":
		return 4, func(b []byte) float32 { return math.Float32frombits(order.Uint32(b)) }
	case "F16":
		return 2, func(b []byte) float32 { return F16ToFloat32(order.Uint16(b)) }
	case "BF16":
		return 2, func(b []byte) float32 { return BF16ToFloat32(order.Uint16(b)) }
	case "F8_E4M3":
		return 1, func(b []byte) float32 { return F8E4M3ToFloat32(b[0]) }
	case "F8_E5M2":
		return 1, func(b []byte) float32 { return F8E5M2ToFloat32(b[0]) }
	}
	return 0, nil
}
