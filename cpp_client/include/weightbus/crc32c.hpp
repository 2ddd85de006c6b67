// CRC-32C (Castagnoli), with the processor's instructions where it has them.
//
// One CRC instruction takes 8 bytes, and its result is there three cycles later; a new one may
// start every cycle. So a long buffer is read as three streams side by side, and their checksums
// are joined afterwards: that of `a` followed by `b` is `shift(crc(a), |b|) ^ crc(b)`, where
// shifting by a fixed number of zero bytes is a linear map, kept as four tables of 256 entries.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bytes.hpp"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace weightbus {
namespace crc32c_detail {

inline constexpr std::uint32_t kPolynomial = 0x82F63B78;  // 0x1EDC6F41, its bits reflected

inline std::uint64_t load(const std::uint8_t* at) {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][b]: what byte b contributes that k more bytes follow.
inline const Tables& tables() {
  static const Tables made = [] {
    Tables t{};
    for (std::uint32_t b = 0; b < 256; ++b) {
      std::uint32_t crc = b;
      for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ kPolynomial : crc >> 1;
      t[0][b] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k) {
      for (std::size_t b = 0; b < 256; ++b) t[k][b] = t[k - 1][b] >> 8 ^ t[0][t[k - 1][b] & 0xFF];
    }
    return t;
  }();
  return made;
}

// Eight table look-ups for eight bytes: for processors without the instruction.
inline std::uint32_t portable(std::uint32_t crc, const std::uint8_t* at, std::size_t size) {
  const Tables& t = tables();
  for (; size >= 8; at += 8, size -= 8) {
    std::uint32_t next = 0;
    for (std::size_t i = 0; i < 8; ++i) {
      const std::uint32_t byte = at[i] ^ (i < 4 ? crc >> 8 * i & 0xFF : 0);
      next ^= t[7 - i][byte];
    }
    crc = next;
  }
  for (; size > 0; ++at, --size) crc = crc >> 8 ^ t[0][(crc ^ *at) & 0xFF];
  return crc;
}

// Appends a fixed number of zero bytes to what a checksum is of.
class Shift {
 public:
  explicit Shift(std::size_t zeros) {
    std::array<std::uint32_t, 32> columns{};
    for (std::size_t bit = 0; bit < 32; ++bit) {
      std::uint32_t crc = std::uint32_t{1} << bit;
      for (std::size_t i = 0; i < zeros; ++i) crc = crc >> 8 ^ tables()[0][crc & 0xFF];
      columns[bit] = crc;
    }
    for (std::size_t k = 0; k < 4; ++k) {
      for (std::size_t b = 0; b < 256; ++b) {
        for (std::size_t bit = 0; bit < 8; ++bit) {
          if (b >> bit & 1) maps_[k][b] ^= columns[8 * k + bit];
        }
      }
    }
  }

  std::uint32_t operator()(std::uint32_t crc) const {
    return maps_[0][crc & 0xFF] ^ maps_[1][crc >> 8 & 0xFF] ^ maps_[2][crc >> 16 & 0xFF] ^
           maps_[3][crc >> 24];
  }

 private:
  std::array<std::array<std::uint32_t, 256>, 4> maps_{};
};

inline constexpr std::size_t kLong = 8192, kShort = 256;  // bytes of one of three streams

inline const Shift& long_shift() {
  static const Shift made(kLong);
  return made;
}

inline const Shift& short_shift() {
  static const Shift made(kShort);
  return made;
}

#if defined(__x86_64__)
#define WEIGHTBUS_CRC32C_TARGET __attribute__((target("sse4.2")))

WEIGHTBUS_CRC32C_TARGET inline std::uint64_t step8(std::uint64_t crc, std::uint64_t word) {
  return _mm_crc32_u64(crc, word);
}

WEIGHTBUS_CRC32C_TARGET inline std::uint32_t step1(std::uint32_t crc, std::uint8_t byte) {
  return _mm_crc32_u8(crc, byte);
}

inline bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }

#elif defined(__aarch64__) && defined(__linux__)
#define WEIGHTBUS_CRC32C_TARGET

// In assembler, since compilers offer the intrinsics only where every processor has them.
inline std::uint64_t step8(std::uint64_t crc, std::uint64_t word) {
  std::uint32_t next;
  __asm__(".arch_extension crc\n\tcrc32cx %w0, %w1, %x2"
          : "=r"(next)
          : "r"(static_cast<std::uint32_t>(crc)), "r"(word));
  return next;
}

inline std::uint32_t step1(std::uint32_t crc, std::uint8_t byte) {
  std::uint32_t next;
  __asm__(".arch_extension crc\n\tcrc32cb %w0, %w1, %w2" : "=r"(next) : "r"(crc), "r"(byte));
  return next;
}

inline bool has_instruction() { return getauxval(AT_HWCAP) & HWCAP_CRC32; }
#endif

#if defined(WEIGHTBUS_CRC32C_TARGET)

// Takes as many blocks of three streams of `kStream` bytes as there are.
template <std::size_t kStream>
WEIGHTBUS_CRC32C_TARGET inline void three_streams(std::uint64_t& crc, const std::uint8_t*& at,
                                                  std::size_t& size, const Shift& shift) {
  while (size >= 3 * kStream) {
    std::uint64_t second = 0, third = 0;
    for (const std::uint8_t* end = at + kStream; at < end; at += 8) {
      crc = step8(crc, load(at));
      second = step8(second, load(at + kStream));
      third = step8(third, load(at + 2 * kStream));
    }
    crc = shift(static_cast<std::uint32_t>(crc)) ^ second;
    crc = shift(static_cast<std::uint32_t>(crc)) ^ third;
    at += 2 * kStream;
    size -= 3 * kStream;
  }
}

WEIGHTBUS_CRC32C_TARGET inline std::uint32_t hardware(std::uint32_t begin, const std::uint8_t* at,
                                                      std::size_t size) {
  std::uint64_t crc = begin;
  three_streams<kLong>(crc, at, size, long_shift());
  three_streams<kShort>(crc, at, size, short_shift());
  for (; size >= 8; at += 8, size -= 8) crc = step8(crc, load(at));
  auto rest = static_cast<std::uint32_t>(crc);
  for (; size > 0; ++at, --size) rest = step1(rest, *at);
  return rest;
}

#endif

}  // namespace crc32c_detail

// The CRC-32C of some bytes, going on from that of what came before.
inline std::uint32_t crc32c(Bytes bytes, std::uint32_t before = 0) {
  using namespace crc32c_detail;
#if defined(WEIGHTBUS_CRC32C_TARGET)
  static const bool kHardware = has_instruction();
  if (kHardware) return ~hardware(~before, bytes.data, bytes.size);
#endif
  return ~portable(~before, bytes.data, bytes.size);
}

}  // namespace weightbus

#undef WEIGHTBUS_CRC32C_TARGET
