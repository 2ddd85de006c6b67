// What a worker tells its user and its operator.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "staging.hpp"

namespace weightbus {

// A version that was just applied.
struct Update {
  std::string model;
  std::uint64_t epoch = 0, version = 0, nbytes = 0;
  std::string digest;  // as the publisher was told; empty if it was read from shared memory
  double seconds = 0;  // how long the copy took
};

// Something that happened, in the order in which it did.
struct Event {
  enum class Kind {
    kJoined,   // the publisher has let this worker in; `epoch` is its
    kLost,     // the publisher has been silent for too long
    kRefused,  // the publisher will not serve this worker, which keeps asking
    kApplied,  // a version runs
    kFailed,   // a version was not taken; the one before it still runs
    kNotice,   // anything else that an operator may want to know
  };
  Kind kind = Kind::kNotice;
  std::string model;
  std::uint64_t epoch = 0, version = 0;
  std::string digest;      // of kApplied
  std::string code, text;  // of kLost, kRefused, kFailed, kNotice
};

struct ModelState {
  std::optional<Update> running;
  std::optional<Key> arriving, staged, ready;  // (epoch, version)
  std::uint64_t chunks = 0;                    // of the one that is arriving
  bool catching_up = false;  // it skips versions to finish one: the publisher is faster
};

struct State {
  bool joined = false;
  std::uint64_t epoch = 0;          // of the session
  bool subscribed = false;          // pushed data arrives
  bool shared = false;              // versions are read from the publisher's memory
  std::uint64_t malformed = 0;      // messages dropped because they broke the protocol
  std::string refusal, data_fault;  // why it is not let in; why no pushed data comes
  std::map<std::string, ModelState> models;
};

}  // namespace weightbus
