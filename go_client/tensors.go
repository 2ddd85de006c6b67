package weightbus

import (
	"fmt"
	"sort"
	"unsafe"

	"github.com/weightbus/weightbus/go_client/internal/wbp"
)

// Tensors are the tensors of a model, by name. Versions are written into their memory.
type Tensors map[string]Tensor

// A Tensor is a slice with a dtype and a shape, in row-major order.
type Tensor struct {
	dtype string
	shape []int64
	bytes []byte
	fault string // why it is invalid; "" if it is valid
}

// The constructors below accept a slice and its shape. Without a shape the tensor is a scalar, which
// has one element. New returns an error if the product of the shape is not the length of the slice.

// F64 returns a tensor of float64.
func F64(values []float64, shape ...int) Tensor { return tensorOf("F64", values, shape) }

// F32 returns a tensor of float32.
func F32(values []float32, shape ...int) Tensor { return tensorOf("F32", values, shape) }

// F16 returns a tensor of IEEE half floats, given as bits. F16ToFloat32 converts the bits.
func F16(bits []uint16, shape ...int) Tensor { return tensorOf("F16", bits, shape) }

// BF16 returns a tensor of bfloat16, given as bits. BF16ToFloat32 converts the bits.
func BF16(bits []uint16, shape ...int) Tensor { return tensorOf("BF16", bits, shape) }

// F8E4M3 returns a tensor of float8_e4m3fn, given as bits. F8E4M3ToFloat32 converts the bits.
func F8E4M3(bits []uint8, shape ...int) Tensor { return tensorOf("F8_E4M3", bits, shape) }

// F8E5M2 returns a tensor of float8_e5m2, given as bits. F8E5M2ToFloat32 converts the bits.
func F8E5M2(bits []uint8, shape ...int) Tensor { return tensorOf("F8_E5M2", bits, shape) }

// C64 returns a tensor of complex64.
func C64(values []complex64, shape ...int) Tensor { return tensorOf("C64", values, shape) }

// I64 returns a tensor of int64.
func I64(values []int64, shape ...int) Tensor { return tensorOf("I64", values, shape) }

// I32 returns a tensor of int32.
func I32(values []int32, shape ...int) Tensor { return tensorOf("I32", values, shape) }

// I16 returns a tensor of int16.
func I16(values []int16, shape ...int) Tensor { return tensorOf("I16", values, shape) }

// I8 returns a tensor of int8.
func I8(values []int8, shape ...int) Tensor { return tensorOf("I8", values, shape) }

// U64 returns a tensor of uint64.
func U64(values []uint64, shape ...int) Tensor { return tensorOf("U64", values, shape) }

// U32 returns a tensor of uint32.
func U32(values []uint32, shape ...int) Tensor { return tensorOf("U32", values, shape) }

// U16 returns a tensor of uint16.
func U16(values []uint16, shape ...int) Tensor { return tensorOf("U16", values, shape) }

// U8 returns a tensor of uint8.
func U8(values []uint8, shape ...int) Tensor { return tensorOf("U8", values, shape) }

// Bool returns a tensor of booleans, a byte each: 0 or 1. (Received bytes may have other values,
// which a Go bool must not have.)
func Bool(values []uint8, shape ...int) Tensor { return tensorOf("BOOL", values, shape) }

// Bits returns a tensor of any dtype of the protocol, such as F4 or F6_E2M3, whose elements are given
// as bytes.
func Bits(dtype string, bytes []byte, shape ...int) Tensor {
	t := newTensor(dtype, shape)
	t.bytes = bytes
	size, ok := wbp.TensorBytes(dtype, t.shape)
	switch {
	case !ok:
		t.fault = fmt.Sprintf("%s is not a valid dtype and shape", t)
	case size != int64(len(bytes)):
		t.fault = fmt.Sprintf("%s needs %d bytes, the slice has %d", t, size, len(bytes))
	}
	return t
}

func newTensor(dtype string, shape []int) Tensor {
	t := Tensor{dtype: dtype, shape: make([]int64, len(shape))}
	for i, size := range shape {
		t.shape[i] = int64(size)
	}
	return t
}

func tensorOf[T any](dtype string, values []T, shape []int) Tensor {
	t := newTensor(dtype, shape)
	width := int64(unsafe.Sizeof(*new(T)))
	if len(values) > 0 {
		t.bytes = unsafe.Slice((*byte)(unsafe.Pointer(&values[0])), len(values)*int(width))
	}
	size, ok := wbp.TensorBytes(dtype, t.shape)
	switch {
	case !ok:
		t.fault = fmt.Sprintf("%s is not a valid shape", t)
	case size != int64(len(t.bytes)):
		t.fault = fmt.Sprintf("%s needs %d elements, the slice has %d", t, size/width, len(values))
	}
	return t
}

// DType returns the protocol's name of the dtype.
func (t Tensor) DType() string { return t.dtype }

// Shape returns the sizes of the dimensions, none for a scalar.
func (t Tensor) Shape() []int64 { return append([]int64{}, t.shape...) }

// Bytes returns the memory: little-endian elements in row-major order. Inside Worker.Read this is
// the model's memory, which must not be written.
func (t Tensor) Bytes() []byte { return t.bytes }

func (t Tensor) String() string { return t.dtype + " " + wbp.ShapeText(t.shape) }

// difference describes why the published tensors cannot be written into t; "" if they can.
func (t Tensors) difference(layout *wbp.Layout, allowed wbp.Lenience) string {
	_, firstNames := t.findTies()
	own := make(map[string]wbp.Signature, len(t))
	for name, tensor := range t {
		own[name] = wbp.Signature{DType: tensor.dtype, Shape: tensor.shape, Tie: firstNames[name]}
	}
	return wbp.Difference(layout, own, allowed)
}

// findTies finds tied tensors, which share their memory. firstNames maps the name of each tied tensor to
// the first name with the same memory. fault is an error message if two tensors overlap only in part.
func (t Tensors) findTies() (fault string, firstNames map[string]string) {
	var names []string
	for name, tensor := range t {
		if len(tensor.bytes) > 0 {
			names = append(names, name)
		}
	}
	begin := func(name string) uintptr { return uintptr(unsafe.Pointer(&t[name].bytes[0])) }
	sort.Slice(names, func(i, j int) bool {
		if a, b := begin(names[i]), begin(names[j]); a != b {
			return a < b
		}
		return names[i] < names[j]
	})
	firstNames = map[string]string{}
	first := "" // name of the latest tensor with memory of its own
	for _, name := range names {
		switch {
		case first == "" || begin(first)+uintptr(len(t[first].bytes)) <= begin(name):
			first = name
		case begin(first) == begin(name) && t[first].String() == t[name].String():
			firstNames[first], firstNames[name] = first, first
		default:
			return fmt.Sprintf("%s and %s share a part of their memory, which cannot hold both", first, name), nil
		}
	}
	return "", firstNames
}
