// The small floats, each of their patterns.
#include <doctest/doctest.h>

#include <cmath>
#include <set>
#include <weightbus/floats.hpp>

using namespace weightbus;

namespace {

float e4m3(int bits) { return to_float(Float8E4M3{static_cast<std::uint8_t>(bits)}); }
float e5m2(int bits) { return to_float(Float8E5M2{static_cast<std::uint8_t>(bits)}); }
float f16(int bits) { return to_float(Float16{static_cast<std::uint16_t>(bits)}); }
float bf16(int bits) { return to_float(BFloat16{static_cast<std::uint16_t>(bits)}); }

}  // namespace

TEST_CASE("values that are known") {
  CHECK(bf16(0x3F80) == 1.0F);
  CHECK(bf16(0xC040) == -3.0F);
  CHECK(f16(0x3C00) == 1.0F);
  CHECK(f16(0x7BFF) == 65504.0F);
  CHECK(f16(0x0001) == std::ldexp(1.0F, -24));
  CHECK(std::isinf(f16(0xFC00)));
  CHECK(std::isnan(f16(0x7E00)));
  CHECK(e4m3(0x7E) == 448.0F);  // the greatest: this one has no infinity
  CHECK(e4m3(0x38) == 1.0F);
  CHECK(e4m3(0x01) == std::ldexp(1.0F, -9));
  CHECK(std::isnan(e4m3(0x7F)));
  CHECK(std::isnan(e4m3(0xFF)));
  CHECK(e5m2(0x7B) == 57344.0F);
  CHECK(e5m2(0x3C) == 1.0F);
  CHECK(e5m2(0x01) == std::ldexp(1.0F, -16));
  CHECK(std::isinf(e5m2(0x7C)));
  CHECK(std::isnan(e5m2(0x7D)));
}

TEST_CASE("an eight-bit float with two bits of fraction is the upper half of a sixteen-bit one") {
  for (int bits = 0; bits < 256; ++bits) {
    const float small = e5m2(bits), large = f16(bits << 8);
    CHECK((small == large || (std::isnan(small) && std::isnan(large))));
    CHECK(std::signbit(e5m2(bits)) == (bits >= 128));
  }
}

TEST_CASE("positive patterns rise with their value, and negative ones mirror them") {
  for (int bits = 1; bits < 0x7F; ++bits) {
    CHECK(e4m3(bits) > e4m3(bits - 1));
    CHECK(e4m3(bits | 0x80) == -e4m3(bits));
  }
  for (int bits = 1; bits < 0x7C00; ++bits) CHECK(f16(bits) > f16(bits - 1));
}

TEST_CASE("many at once") {
  const BFloat16 from[] = {{0x3F80}, {0x4000}, {0x0000}};
  float to[3] = {};
  to_floats(from, 3, to);
  CHECK(to[0] == 1.0F);
  CHECK(to[1] == 2.0F);
  CHECK(to[2] == 0.0F);
}
