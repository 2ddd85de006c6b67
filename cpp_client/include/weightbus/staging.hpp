// Where a version waits until it is whole: buffers that are kept and used again, so that a steady
// stream of versions touches no fresh memory.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bytes.hpp"
#include "layout.hpp"
#include "limits.hpp"
#include "segment.hpp"

namespace weightbus {

// Memory of its own mapping, every page of it given by the kernel at once: several times cheaper
// than to touch them one by one.
class Buffer {
 public:
  // Null if there is no such memory.
  static std::unique_ptr<Buffer> of(std::uint64_t nbytes) {
    if (nbytes == 0) return std::unique_ptr<Buffer>(new Buffer(nullptr, 0));
    if (nbytes > available_bytes()) return nullptr;
    void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    return std::unique_ptr<Buffer>(new Buffer(memory, nbytes));
  }

  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  ~Buffer() {
    if (memory_ != nullptr) munmap(memory_, nbytes_);
  }

  MutableBytes bytes() const { return {static_cast<std::uint8_t*>(memory_), nbytes_}; }

 private:
  Buffer(void* memory, std::size_t nbytes) : memory_(memory), nbytes_(nbytes) {}

  // What the kernel could give without pushing anything out: it would promise more, and then end a
  // process for it.
  static std::uint64_t available_bytes() {
    std::FILE* file = std::fopen("/proc/meminfo", "re");
    if (file == nullptr) return ~std::uint64_t{0};
    unsigned long long kib = ~0ULL >> 10;
    char line[128];
    while (std::fgets(line, sizeof line, file) != nullptr) {
      if (std::sscanf(line, "MemAvailable: %llu", &kib) == 1) break;
    }
    std::fclose(file);
    return kib << 10;
  }

  void* memory_;
  std::size_t nbytes_;
};

using BufferPtr = std::shared_ptr<Buffer>;

// The buffers of one model that nobody uses. They come back by themselves, from any thread, when
// the last one who holds one lets go.
class Shelf : public std::enable_shared_from_this<Shelf> {
 public:
  static std::shared_ptr<Shelf> make() { return std::shared_ptr<Shelf>(new Shelf); }

  // A buffer of this size, one used before if possible. Null if there is no memory for it.
  BufferPtr take(std::uint64_t nbytes) {
    std::unique_ptr<Buffer> buffer = find(nbytes);
    if (buffer == nullptr) buffer = Buffer::of(nbytes);
    if (buffer == nullptr) return nullptr;
    return {buffer.release(), [shelf = weak_from_this()](Buffer* used) {
              std::unique_ptr<Buffer> owned(used);
              if (const auto back = shelf.lock()) back->put(std::move(owned));
            }};
  }

  // Makes a buffer of this size now, so that the first version need not wait for it.
  void reserve(std::uint64_t nbytes) {
    if (nbytes > 0) take(nbytes).reset();
  }

 private:
  Shelf() = default;

  std::unique_ptr<Buffer> find(std::uint64_t nbytes) {
    const std::lock_guard guard(mutex_);
    while (!free_.empty()) {
      std::unique_ptr<Buffer> last = std::move(free_.back());
      free_.pop_back();
      if (last->bytes().size == nbytes) return last;
    }
    return nullptr;  // the model has changed its size: the old memory will not fit again
  }

  void put(std::unique_ptr<Buffer> buffer) {
    const std::lock_guard guard(mutex_);
    if (free_.size() < kBuffersMax) free_.push_back(std::move(buffer));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Buffer>> free_;
};

// The order of versions: by epoch, then by number.
using Key = std::pair<std::uint64_t, std::uint64_t>;

// A version, whole and verified, in a buffer of ours or in shared memory.
struct StagedVersion {
  std::string model;
  Key key;
  LayoutPtr layout;
  BufferPtr buffer;               // null if it lies in shared memory
  SharedMemoryPtr shared;         // null if it lies in a buffer
  std::string digest;             // empty if it lies in shared memory: nobody has hashed it
  bool say_staged = false;        // the publisher wants to know that it is staged
  std::uint64_t hash_chunks = 0;  // in shared memory: to be hashed, in chunks of this size

  Bytes data() const { return shared ? shared->data() : Bytes(buffer->bytes()); }
  Stamp stamp() const { return {model, key.first, key.second}; }
};

using StagedPtr = std::shared_ptr<StagedVersion>;

}  // namespace weightbus
