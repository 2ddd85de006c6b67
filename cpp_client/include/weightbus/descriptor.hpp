// A file descriptor that closes itself, and a bell by which one thread wakes another's poll.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

namespace weightbus {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() { Descriptor().swap(*this); }

 private:
  void swap(Descriptor& other) { std::swap(fd_, other.fd_); }

  int fd_ = -1;
};

class Bell {
 public:
  Bell() : event_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

  explicit operator bool() const { return static_cast<bool>(event_); }
  int descriptor() const { return event_.get(); }

  void ring() {
    const std::uint64_t one = 1;
    // Fails only if it was rung 2^64 - 2 times: then it rings anyway.
    [[maybe_unused]] const auto written = write(event_.get(), &one, sizeof one);
  }

  void silence() {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto got = read(event_.get(), &count, sizeof count);
  }

 private:
  Descriptor event_;
};

}  // namespace weightbus
