// How a data section is cut into chunks: all of one size, but the last.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "limits.hpp"

namespace weightbus {

class ChunkPlan {
 public:
  // Nothing, if there can be no chunks of that size.
  static std::optional<ChunkPlan> of(std::uint64_t nbytes, std::uint64_t chunk_bytes) {
    if (chunk_bytes < 1 || chunk_bytes > kChunkBytesMax || nbytes > kIntegerMax) return {};
    return ChunkPlan(nbytes, chunk_bytes);
  }

  std::uint64_t chunk_bytes() const { return chunk_bytes_; }
  std::uint64_t count() const { return (nbytes_ + chunk_bytes_ - 1) / chunk_bytes_; }

  // The bytes [begin, end) of chunk `index`, which is below count().
  std::pair<std::uint64_t, std::uint64_t> span(std::uint64_t index) const {
    const std::uint64_t begin = index * chunk_bytes_;
    return {begin, std::min(begin + chunk_bytes_, nbytes_)};
  }

 private:
  ChunkPlan(std::uint64_t nbytes, std::uint64_t chunk_bytes)
      : nbytes_(nbytes), chunk_bytes_(chunk_bytes) {}

  std::uint64_t nbytes_, chunk_bytes_;
};

}  // namespace weightbus
