// The small floats that weights travel in, which C++17 lacks: bits, and what they are as a float.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace weightbus {

struct BFloat16 {
  std::uint16_t bits = 0;
};

struct Float16 {
  std::uint16_t bits = 0;
};

struct Float8E4M3 {  // "fn": no infinities; all bits set is NaN
  std::uint8_t bits = 0;
};

struct Float8E5M2 {
  std::uint8_t bits = 0;
};

// A bfloat16 is the upper half of a float.
inline float to_float(BFloat16 from) {
  const std::uint32_t bits = std::uint32_t{from.bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

namespace floats_detail {

// Of IEEE's kind: the greatest exponent means infinity (no fraction) or NaN, unless `finite`, where
// only the one pattern with all bits set is NaN.
inline float widen(std::uint32_t bits, int exponent_bits, int fraction_bits, bool finite) {
  const std::uint32_t exponents = (1U << exponent_bits) - 1, fractions = (1U << fraction_bits) - 1;
  const std::uint32_t exponent = bits >> fraction_bits & exponents, fraction = bits & fractions;
  const int bias = static_cast<int>(exponents >> 1);
  float value;
  if (finite ? (exponent == exponents && fraction == fractions)
             : (exponent == exponents && fraction != 0)) {
    value = std::numeric_limits<float>::quiet_NaN();
  } else if (!finite && exponent == exponents) {
    value = std::numeric_limits<float>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(fraction), 1 - bias - fraction_bits);
  } else {
    value = std::ldexp(static_cast<float>(fraction + fractions + 1),
                       static_cast<int>(exponent) - bias - fraction_bits);
  }
  return bits >> (exponent_bits + fraction_bits) & 1 ? -value : value;
}

}  // namespace floats_detail

inline float to_float(Float16 from) { return floats_detail::widen(from.bits, 5, 10, false); }
inline float to_float(Float8E4M3 from) { return floats_detail::widen(from.bits, 4, 3, true); }
inline float to_float(Float8E5M2 from) { return floats_detail::widen(from.bits, 5, 2, false); }

// Converts many at once: `to_floats(tensor.as<BFloat16>(), count, out)`.
template <class Small>
void to_floats(const Small* from, std::size_t count, float* to) {
  for (std::size_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

}  // namespace weightbus
