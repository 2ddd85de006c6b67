package weightbus

import (
	"math"
	"testing"
)

func TestSmallFloats(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	for _, c := range []struct {
		name string
		got  float32
		want float32
	}{
		{"bf16 1", BF16ToFloat32(0x3f80), 1}, {"bf16 -2.5", BF16ToFloat32(0xc020), -2.5},
		{"bf16 inf", BF16ToFloat32(0x7f80), inf}, {"bf16 nan", BF16ToFloat32(0x7fc0), nan},
		{"f16 1", F16ToFloat32(0x3c00), 1}, {"f16 -65504", F16ToFloat32(0xfbff), -65504},
		{"f16 least", F16ToFloat32(1), float32(math.Ldexp(1, -24))}, {"f16 -inf", F16ToFloat32(0xfc00), -inf},
		{"f16 nan", F16ToFloat32(0x7e00), nan}, {"f16 third", F16ToFloat32(0x3555), 0.333251953125},
		{"e5m2 1", F8E5M2ToFloat32(0x3c), 1}, {"e5m2 largest", F8E5M2ToFloat32(0x7b), 57344},
		{"e5m2 least", F8E5M2ToFloat32(1), float32(math.Ldexp(1, -16))}, {"e5m2 inf", F8E5M2ToFloat32(0x7c), inf},
		{"e5m2 nan", F8E5M2ToFloat32(0x7d), nan}, {"e5m2 -1.5", F8E5M2ToFloat32(0xbe), -1.5},
		{"e4m3 1", F8E4M3ToFloat32(0x38), 1}, {"e4m3 largest", F8E4M3ToFloat32(0x7e), 448},
		{"e4m3 256", F8E4M3ToFloat32(0x78), 256}, {"e4m3 least", F8E4M3ToFloat32(1), float32(math.Ldexp(1, -9))},
		{"e4m3 nan", F8E4M3ToFloat32(0xff), nan}, {"e4m3 -0.5", F8E4M3ToFloat32(0xb0), -0.5},
	} {
		if c.got != c.want && !(c.got != c.got && c.want != c.want) {
			t.Errorf("%s: %v, not %v", c.name, c.got, c.want)
		}
	}
	if zero := F8E4M3ToFloat32(0x80); zero != 0 || !math.Signbit(float64(zero)) {
		t.Errorf("-0 became %v", zero)
	}
}

// An F8_E5M2 is the upper byte of an F16, so both convert to the same value.
func TestE5M2IsHalfOfAHalf(t *testing.T) {
	for bits := 0; bits < 256; bits++ {
		a, b := F8E5M2ToFloat32(uint8(bits)), F16ToFloat32(uint16(bits)<<8)
		if a != b && !(a != a && b != b) {
			t.Fatalf("%#x: %v and %v", bits, a, b)
		}
	}
}

func TestFloat32s(t *testing.T) {
	for _, tensor := range []Tensor{
		F32([]float32{1.5, -2}, 2), F64([]float64{1.5, -2}, 2), F16([]uint16{0x3e00, 0xc000}, 2),
		BF16([]uint16{0x3fc0, 0xc000}, 2), F8E4M3([]uint8{0x3c, 0xc0}, 2), F8E5M2([]uint8{0x3e, 0xc0}, 2),
	} {
		values, err := tensor.Float32s()
		if err != nil || len(values) != 2 || values[0] != 1.5 || values[1] != -2 {
			t.Errorf("%s: %v %v", tensor, values, err)
		}
	}
	if _, err := I32([]int32{1}).Float32s(); err == nil {
		t.Error("an int32 was converted")
	}
}
