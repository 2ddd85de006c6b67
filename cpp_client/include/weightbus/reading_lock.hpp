// Many readers or one writer; a writer that waits goes before readers that come after it, so that
// readers who are always there do not keep a version out for ever.
//
// It is what std::shared_mutex is, whose order the standard leaves open: with glibc's, two readers
// that take turns can starve the writer.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace weightbus {

class ReadingLock {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // For std::shared_lock. Not twice by one thread: a writer may be waiting in between.
  void lock_shared() {
    std::unique_lock guard(mutex_);
    changed_.wait(guard, [this] { return !writing_ && waiting_ == 0; });
    ++readers_;
  }

  bool try_lock_shared() {
    const std::lock_guard guard(mutex_);
    if (writing_ || waiting_ > 0) return false;
    ++readers_;
    return true;
  }

  void unlock_shared() {
    const std::lock_guard guard(mutex_);
    if (--readers_ == 0) changed_.notify_all();
  }

  // For std::unique_lock: waits until the readers of this moment have left.
  bool try_lock_until(Deadline deadline) {
    std::unique_lock guard(mutex_);
    ++waiting_;
    const bool free =
        changed_.wait_until(guard, deadline, [this] { return !writing_ && readers_ == 0; });
    --waiting_;
    writing_ = writing_ || free;
    if (!free) changed_.notify_all();
    return free;
  }

  void unlock() {
    const std::lock_guard guard(mutex_);
    writing_ = false;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int readers_ = 0, waiting_ = 0;
  bool writing_ = false;
};

}  // namespace weightbus
