// The element types that travel: safetensors' names, and what they are in C++.
#pragma once

#include <complex>
#include <cstdint>
#include <string_view>

#include "floats.hpp"

namespace weightbus {

// In safetensors' own order, which decides where a tensor lies in a file: the last row first.
enum class Dtype : std::uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

struct DtypeRow {
  std::string_view name;
  std::uint64_t bits;
};

inline constexpr DtypeRow kDtypes[] = {
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
};

inline constexpr const DtypeRow& row(Dtype dtype) { return kDtypes[static_cast<int>(dtype)]; }
inline constexpr std::string_view name(Dtype dtype) { return row(dtype).name; }
inline constexpr std::uint64_t bits(Dtype dtype) { return row(dtype).bits; }

// Looks a name up; false if safetensors knows no such dtype.
inline bool find_dtype(std::string_view name, Dtype& found) {
  int index = 0;
  for (const DtypeRow& row : kDtypes) {
    if (row.name == name) {
      found = static_cast<Dtype>(index);
      return true;
    }
    ++index;
  }
  return false;
}

// The dtype of a C++ type: `dtype_of<float>` is kF32.
template <class T>
struct DtypeOf;  // no dtype of safetensors has elements of this type

template <>
struct DtypeOf<bool> {
  static constexpr Dtype value = Dtype::kBool;
};
template <>
struct DtypeOf<std::uint8_t> {
  static constexpr Dtype value = Dtype::kU8;
};
template <>
struct DtypeOf<std::int8_t> {
  static constexpr Dtype value = Dtype::kI8;
};
template <>
struct DtypeOf<std::uint16_t> {
  static constexpr Dtype value = Dtype::kU16;
};
template <>
struct DtypeOf<std::int16_t> {
  static constexpr Dtype value = Dtype::kI16;
};
template <>
struct DtypeOf<std::uint32_t> {
  static constexpr Dtype value = Dtype::kU32;
};
template <>
struct DtypeOf<std::int32_t> {
  static constexpr Dtype value = Dtype::kI32;
};
template <>
struct DtypeOf<std::uint64_t> {
  static constexpr Dtype value = Dtype::kU64;
};
template <>
struct DtypeOf<std::int64_t> {
  static constexpr Dtype value = Dtype::kI64;
};
template <>
struct DtypeOf<float> {
  static constexpr Dtype value = Dtype::kF32;
};
template <>
struct DtypeOf<double> {
  static constexpr Dtype value = Dtype::kF64;
};
template <>
struct DtypeOf<std::complex<float>> {
  static constexpr Dtype value = Dtype::kC64;
};
template <>
struct DtypeOf<Float16> {
  static constexpr Dtype value = Dtype::kF16;
};
template <>
struct DtypeOf<BFloat16> {
  static constexpr Dtype value = Dtype::kBF16;
};
template <>
struct DtypeOf<Float8E4M3> {
  static constexpr Dtype value = Dtype::kF8E4M3;
};
template <>
struct DtypeOf<Float8E5M2> {
  static constexpr Dtype value = Dtype::kF8E5M2;
};

template <class T>
inline constexpr Dtype dtype_of = DtypeOf<T>::value;

}  // namespace weightbus
