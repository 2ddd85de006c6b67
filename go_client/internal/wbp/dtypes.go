package wbp

// dtypeBits has the number of bits of an element, for each dtype of safetensors.
var dtypeBits = map[string]int64{
	"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
	"F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
	"I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}

// TensorBytes returns the size of a tensor in bytes. It returns false if the dtype is unknown, if
// the shape exceeds the limits of rules L5 and L6, or if the size is not a whole number of bytes.
func TensorBytes(dtype string, shape []int64) (int64, bool) {
	width, known := dtypeBits[dtype]
	if !known || len(shape) > RankMax {
		return 0, false
	}
	bits, extent := width, width // extent counts a size of 0 as 1: some readers multiply the others
	for _, size := range shape {
		if size < 0 || size > IntegerMax {
			return 0, false
		}
		if size > 0 && extent > IntegerMax/size {
			return 0, false
		}
		if size > 0 {
			extent *= size
		}
		bits *= size // at most extent, so it does not overflow
	}
	return bits / 8, bits%8 == 0
}
