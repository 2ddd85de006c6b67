// Where the worker's thread leaves versions that are ready, and the user's thread takes them.
//
// At most one version of a model waits here: a newer one takes its place.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "limits.hpp"
#include "result.hpp"
#include "staging.hpp"
#include "state.hpp"

namespace weightbus {

class Handoff {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // For the worker's thread.

  // Leaves a version; returns the older one that it replaces.
  StagedPtr put(StagedPtr staged) {
    const std::lock_guard guard(mutex_);
    StagedPtr older = remove(staged->model);
    ready_.push_back(std::move(staged));
    changed_.notify_all();
    return older;
  }

  // Leaves a version again that was taken; false if a newer one has come meanwhile.
  bool put_back(const StagedPtr& staged) {
    const std::lock_guard guard(mutex_);
    for (const StagedPtr& one : ready_) {
      if (one->model == staged->model) return false;
    }
    ready_.push_back(staged);
    changed_.notify_all();
    return true;
  }

  // Remembers what happened. What is merely repeated is told once.
  void note(Event event) {
    const std::lock_guard guard(mutex_);
    if (event.kind == Event::Kind::kJoined) {
      joined_ = true;
      last_problem_.clear();
      refusal_.reset();
      refused_.clear();
    } else if (event.kind == Event::Kind::kLost) {
      joined_ = false;
    } else if (event.kind == Event::Kind::kRefused || event.kind == Event::Kind::kFailed) {
      std::string words = std::to_string(event.epoch) + ":" + std::to_string(event.version) + ":" +
                          event.code + ":" + event.text;
      if (std::exchange(last_problem_[event.model], words) == words) return;
      Error error{event.code, event.text};
      if (event.kind == Event::Kind::kFailed) {
        if (errors_.size() < kModelsMax) errors_.push_back(std::move(error));
      } else {
        joined_ = false;
        refused_ = event.code + ": " + event.text;
        refusal_ = std::move(error);
      }
    }
    if (events_.size() >= kEventsMax) events_.pop_front();
    events_.push_back(std::move(event));
    changed_.notify_all();
  }

  // Nothing more will come.
  void close() {
    const std::lock_guard guard(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

  // For the user's thread.

  // A version that is ready, the model that waits longest first; null when the time is over. Each
  // problem is told once.
  Result<StagedPtr> take(Deadline deadline) {
    std::unique_lock guard(mutex_);
    changed_.wait_until(guard, deadline, [this] {
      return !ready_.empty() || !errors_.empty() || refusal_ || closed_;
    });
    if (!ready_.empty()) {
      StagedPtr staged = std::move(ready_.front());
      ready_.pop_front();
      return staged;
    }
    if (!errors_.empty()) {
      Error error = std::move(errors_.front());
      errors_.pop_front();
      return error;
    }
    if (refusal_) return *std::exchange(refusal_, std::nullopt);
    if (closed_) return Error{"closed", "this worker is closed"};
    return StagedPtr();
  }

  // Whether the publisher has let this worker in; waits for that.
  bool wait_joined(Deadline deadline) {
    std::unique_lock guard(mutex_);
    changed_.wait_until(guard, deadline, [this] { return joined_ || closed_; });
    return joined_;
  }

  // What has happened since the last call; the oldest are forgotten if nobody asks.
  std::vector<Event> events() {
    const std::lock_guard guard(mutex_);
    std::vector<Event> taken(events_.begin(), events_.end());
    events_.clear();
    return taken;
  }

  bool joined() const {
    const std::lock_guard guard(mutex_);
    return joined_;
  }

  std::string refused() const {
    const std::lock_guard guard(mutex_);
    return refused_;
  }

 private:
  static constexpr std::size_t kEventsMax = 256;

  StagedPtr remove(const std::string& model) {
    for (auto one = ready_.begin(); one != ready_.end(); ++one) {
      if ((*one)->model != model) continue;
      StagedPtr removed = std::move(*one);
      ready_.erase(one);
      return removed;
    }
    return nullptr;
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<StagedPtr> ready_;
  std::deque<Error> errors_;
  std::optional<Error> refusal_;  // not told yet
  std::string refused_;           // why this worker is not let in, as things stand
  std::map<std::string, std::string> last_problem_;  // by model; "" of the worker as a whole
  std::deque<Event> events_;
  bool joined_ = false, closed_ = false;
};

}  // namespace weightbus
