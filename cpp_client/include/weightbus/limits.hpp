// Every bound of the protocol (docs/PROTOCOL.md, section 12), and the worker's timers (section 11).
//
// A peer may send anything. What it can make this side remember or allocate is bounded here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace weightbus {

inline constexpr std::uint64_t kIntegerMax = (std::uint64_t{1} << 53) - 1;  // JSON carries these
inline constexpr std::size_t kHeaderBytesMax = 65536;  // names and numbers; bulk goes in payloads
inline constexpr std::size_t kTextMax = 4096;          // characters of a reason, an address, a path
inline constexpr std::size_t kLabelMax = 256;          // characters of a description or a host
inline constexpr std::size_t kFeaturesMax = 64;
inline constexpr std::size_t kModelsMax = 64;  // so that a hello with the longest names fits
inline constexpr std::uint64_t kChunkBytesMax = std::uint64_t{1} << 26;  // one chunk, one message
inline constexpr std::uint64_t kChunksMax = std::uint64_t{1} << 20;  // a few bytes are kept of each
inline constexpr std::uint64_t kFetchChunksMax = 64;
inline constexpr std::uint64_t kWindowChunks = 16;            // asked for before an answer
inline constexpr std::uint64_t kProgressChunks = 4;           // between two reports
inline constexpr std::uint64_t kLayoutJsonMax = 100'000'000;  // safetensors' own bound
inline constexpr std::uint64_t kLayoutBytesMax = kLayoutJsonMax + 8;
inline constexpr std::size_t kTensorsMax = 1'000'000;
inline constexpr std::size_t kRankMax = 64;
inline constexpr std::size_t kNameBytesMax = 4096;                         // of a tensor
inline constexpr std::uint64_t kMessageBytesMax = 100'065'536;             // ZMQ_MAXMSGSIZE
inline constexpr std::uint64_t kStagingBytesMax = std::uint64_t{1} << 36;  // unless told otherwise
inline constexpr std::size_t kBuffersMax = 2;   // of a model: one complete, one arriving
inline constexpr std::size_t kEpochsKept = 8;   // of which the publisher's age is remembered
inline constexpr std::size_t kSegmentsMax = 8;  // mapped at once: a few models, a few arenas each
inline constexpr int kNestingMax = 16;          // deeper headers are refused

// How long a worker waits, in seconds. Everything but `lost_after` follows from `ping`.
struct Timing {
  double ping = 1.0;        // between two pings, and two repetitions of a report
  double lost_after = 5.0;  // silence after which the publisher is lost

  double deaf_after() const { return 6 * lost_after; }  // silence of the control channel alone
  double hello_retry() const { return std::min(ping, 0.25); }
  double quiet() const { return std::min(ping, 0.25); }  // then nothing more will be pushed
  double patience() const { return ping; }  // then a fetch is repeated; doubles each time
  double patience_max() const { return 16 * ping; }
};

}  // namespace weightbus
