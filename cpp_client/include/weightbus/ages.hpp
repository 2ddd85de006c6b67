// How old the publishers are whose weights run at a worker, or may yet be applied there.
//
// A publisher tells its age, and a worker tells other publishers how old that one is by now: the
// younger of two started later, whatever their clocks say.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <map>

#include "limits.hpp"

namespace weightbus {

class Ages {
 public:
  // The publisher of an epoch says its age; weights of the epoch `applied` run here.
  void heard(std::uint64_t epoch, std::uint64_t age_ms, std::uint64_t applied, double now) {
    age_ms = std::max(age_ms, of(epoch, now));
    known_.erase(epoch);
    known_.erase(known_.begin(), known_.lower_bound(applied));
    if (known_.size() >= kEpochsKept) known_.erase(std::prev(known_.end()));
    known_[epoch] = {age_ms, now};
  }

  // For how many milliseconds, at least, the publisher of an epoch has run.
  std::uint64_t of(std::uint64_t epoch, double now) const {
    const auto found = known_.find(epoch);
    if (found == known_.end()) return 0;
    const auto since = std::llround((now - found->second.at) * 1000);
    return std::min(kIntegerMax, found->second.age_ms + static_cast<std::uint64_t>(since));
  }

 private:
  struct Age {
    std::uint64_t age_ms = 0;
    double at = 0;
  };
  std::map<std::uint64_t, Age> known_;  // by epoch
};

}  // namespace weightbus
