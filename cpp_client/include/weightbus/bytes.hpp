// Views of memory that somebody else owns (std::span, before C++20).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace weightbus {

struct Bytes {
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;

  Bytes() = default;
  Bytes(const void* at, std::size_t count)
      : data(static_cast<const std::uint8_t*>(at)), size(count) {}
  Bytes(std::string_view text) : Bytes(text.data(), text.size()) {}
  Bytes(const std::string& text) : Bytes(text.data(), text.size()) {}

  Bytes slice(std::size_t begin, std::size_t end) const { return {data + begin, end - begin}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data), size}; }
};

struct MutableBytes {
  std::uint8_t* data = nullptr;
  std::size_t size = 0;

  operator Bytes() const { return {data, size}; }
  MutableBytes slice(std::size_t begin, std::size_t end) const {
    return {data + begin, end - begin};
  }
};

inline std::uint64_t little_endian_u64(const std::uint8_t* at) {
  std::uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | at[i];
  return value;
}

inline void append_little_endian(std::string& to, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) to.push_back(static_cast<char>(value >> 8 * i & 0xFF));
}

inline std::string hex(Bytes bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size);
  for (std::size_t i = 0; i < bytes.size; ++i) {
    text.push_back(kDigits[bytes.data[i] >> 4]);
    text.push_back(kDigits[bytes.data[i] & 15]);
  }
  return text;
}

// Of lowercase digits, an even number of them; anything else counts as zero.
inline std::string unhex(std::string_view digits) {
  const auto value = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : 0;
  };
  std::string bytes;
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2) {
    bytes.push_back(static_cast<char>(value(digits[i]) << 4 | value(digits[i + 1])));
  }
  return bytes;
}

}  // namespace weightbus
