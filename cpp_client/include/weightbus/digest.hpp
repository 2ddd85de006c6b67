// SHA-256, and the digest of a version (section 5.6).
#pragma once

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "bytes.hpp"
#include "crc32c.hpp"

namespace weightbus {

// As 64 lowercase hex digits.
inline std::string sha256(Bytes bytes) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> hash{};
  unsigned int size = 0;
  EVP_Digest(bytes.data, bytes.size, hash.data(), &size, EVP_sha256(), nullptr);
  return hex({hash.data(), size});
}

// The digest of a version whose chunks have these checksums: layout id, chunk_bytes, checksums.
inline std::string digest(std::string_view layout_id, std::uint64_t chunk_bytes,
                          const std::vector<std::uint32_t>& crcs) {
  std::string packed = unhex(layout_id);
  packed.reserve(40 + 4 * crcs.size());
  append_little_endian(packed, chunk_bytes, 8);
  for (const std::uint32_t crc : crcs) append_little_endian(packed, crc, 4);
  return sha256(packed);
}

// The digest of a whole data section.
inline std::string digest_of(std::string_view layout_id, Bytes data, std::uint64_t chunk_bytes) {
  std::vector<std::uint32_t> crcs;
  for (std::uint64_t begin = 0; begin < data.size; begin += chunk_bytes) {
    crcs.push_back(
        crc32c(data.slice(begin, std::min<std::uint64_t>(begin + chunk_bytes, data.size))));
  }
  return digest(layout_id, chunk_bytes, crcs);
}

}  // namespace weightbus
