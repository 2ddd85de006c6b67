// Memory of the publisher's host, read directly: the shared road (section 10).
//
//     0       8       24      32        40       48              4096
//     ├───────┼───────┼───────┼─────────┼────────┼─────── ··· ────┼──────────────┤
//     │ magic │ token │ epoch │ version │ length │ model, zeros   │ data section │
//     └───────┴───────┴───────┴─────────┴────────┴────────────────┴──────────────┘
//                       u64     u64       u64 (little-endian), of the model's id
//
// The publisher fills a segment under an exclusive `flock`, a worker copies under a shared one, and
// neither ever waits for the other. The stamp says which version lies there: who finds another one
// than was announced has come too late.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "bytes.hpp"
#include "limits.hpp"
#include "messages.hpp"

namespace weightbus {

// Which version lies in a segment.
struct Stamp {
  std::string model;
  std::uint64_t epoch = 0, version = 0;
};

// What a worker needs of a segment; tests have another one.
class SharedMemory {
 public:
  virtual ~SharedMemory() = default;

  virtual Bytes data() const = 0;

  // Takes hold of the segment; false if it does not hold this version, or is being filled.
  virtual bool begin(const Stamp& stamp) = 0;

  // Lets go; false if the version was overwritten meanwhile.
  virtual bool end(const Stamp& stamp) = 0;
};

using SharedMemoryPtr = std::shared_ptr<SharedMemory>;

namespace segment_detail {

inline constexpr std::string_view kMagic{"WBPSHM1\0", 8};
inline constexpr std::size_t kHeaderBytes = 4096;  // a page, so that the data begins on one
inline constexpr std::size_t kStampBegin = 24, kStampEnd = 176, kModelBytes = 128;

inline std::string packed(const Stamp& stamp) {
  std::string bytes;
  append_little_endian(bytes, stamp.epoch, 8);
  append_little_endian(bytes, stamp.version, 8);
  append_little_endian(bytes, stamp.model.size(), 8);
  bytes += stamp.model;
  bytes.resize(kStampEnd - kStampBegin);
  return bytes;
}

// `/proc/`, 1 to 10 digits, `/fd/`, 1 to 10 digits: nothing else is ever opened.
inline bool is_path(std::string_view path) {
  const auto take = [&path](std::string_view word) {
    if (path.substr(0, word.size()) != word) return false;
    path.remove_prefix(word.size());
    return true;
  };
  const auto take_digits = [&path] {
    std::size_t count = 0;
    while (count < path.size() && path[count] >= '0' && path[count] <= '9') ++count;
    path.remove_prefix(count);
    return count >= 1 && count <= 10;
  };
  return take("/proc/") && take_digits() && take("/fd/") && take_digits() && path.empty();
}

// Another process's segment, mapped for reading.
class View final : public SharedMemory {
 public:
  // Null if there is no such segment on this host, or it is not ours to read.
  static std::shared_ptr<View> open(const Shared& shared, std::uint64_t nbytes) {
    if (!is_path(shared.path)) return nullptr;
    const int fd = ::open(shared.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return nullptr;
    std::shared_ptr<View> view(new View(fd, kHeaderBytes + nbytes));
    return view->map() && view->is_marked(shared.token) ? view : nullptr;
  }

  View(const View&) = delete;
  View& operator=(const View&) = delete;

  ~View() override {
    if (memory_ != nullptr) munmap(memory_, size_);
    close(fd_);
  }

  Bytes data() const override { return bytes().slice(kHeaderBytes, size_); }

  bool begin(const Stamp& stamp) override {
    if (!hold()) return false;
    if (is_stamped(stamp)) return true;
    let_go();
    return false;
  }

  bool end(const Stamp& stamp) override {
    const bool same = is_stamped(stamp);
    let_go();
    return same;
  }

 private:
  View(int fd, std::size_t size) : fd_(fd), size_(size) {}

  bool map() {
    struct stat found {};
    if (fstat(fd_, &found) != 0 || !S_ISREG(found.st_mode)) return false;
    if (static_cast<std::uint64_t>(found.st_size) != size_) return false;
    void* memory = mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd_, 0);
    if (memory == MAP_FAILED) return false;
    memory_ = memory;
    return true;
  }

  bool is_marked(const std::string& token) const {
    const std::string mark = std::string(kMagic) + unhex(token);
    return bytes().slice(0, kStampBegin).text() == mark;
  }

  bool is_stamped(const Stamp& stamp) const {
    return bytes().slice(kStampBegin, kStampEnd).text() == packed(stamp);
  }

  // The kernel's lock is one for all threads that use this descriptor: the last one lets go.
  bool hold() {
    const std::lock_guard guard(mutex_);
    if (holders_ == 0 && flock(fd_, LOCK_SH | LOCK_NB) != 0) return false;
    ++holders_;
    return true;
  }

  void let_go() {
    const std::lock_guard guard(mutex_);
    if (--holders_ == 0) flock(fd_, LOCK_UN);
  }

  Bytes bytes() const { return {memory_, size_}; }

  const int fd_;
  const std::size_t size_;
  void* memory_ = nullptr;
  std::mutex mutex_;
  int holders_ = 0;
};

}  // namespace segment_detail

// The segments that a worker has opened, so that each is mapped once. For one thread.
class Segments {
 public:
  // Null if the segment is not to be had here.
  SharedMemoryPtr open(const Shared& shared, std::uint64_t nbytes) {
    for (const auto& [token, view] : open_) {
      if (token == shared.token && view->data().size == nbytes) return view;
    }
    std::shared_ptr<segment_detail::View> view = segment_detail::View::open(shared, nbytes);
    if (view == nullptr) return nullptr;
    if (open_.size() >= kSegmentsMax) open_.pop_front();
    open_.emplace_back(shared.token, view);
    return view;
  }

 private:
  std::deque<std::pair<std::string, std::shared_ptr<segment_detail::View>>> open_;
};

}  // namespace weightbus
