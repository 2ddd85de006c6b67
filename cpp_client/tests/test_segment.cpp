// Segments of the shared road, in memory of this process.
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <string>
#include <weightbus/segment.hpp>

using namespace weightbus;

namespace {

const std::string kToken = "00112233445566778899aabbccddeeff";

// What a publisher makes.
struct Segment {
  int fd = memfd_create("test", MFD_CLOEXEC);
  std::string data;

  explicit Segment(std::string bytes) : data(std::move(bytes)) { fill({"m", 7, 1}); }
  ~Segment() { close(fd); }

  void fill(const Stamp& stamp) const {
    const std::string page =
        std::string(segment_detail::kMagic) + unhex(kToken) + segment_detail::packed(stamp);
    std::string all = page + std::string(4096 - page.size(), '\0') + data;
    REQUIRE(pwrite(fd, all.data(), all.size(), 0) == static_cast<ssize_t>(all.size()));
  }

  Shared shared() const {
    return {"/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd), kToken};
  }
};

}  // namespace

TEST_CASE("a segment is opened, checked, and mapped once") {
  const Segment segment("0123456789");
  Segments segments;
  const SharedMemoryPtr view = segments.open(segment.shared(), 10);
  REQUIRE(view);
  CHECK(view->data().text() == "0123456789");
  CHECK(segments.open(segment.shared(), 10) == view);
  CHECK_FALSE(segments.open(segment.shared(), 9));
  Shared other = segment.shared();
  other.token = std::string(32, '0');
  CHECK_FALSE(segments.open(other, 10));
}

TEST_CASE("nothing is opened that is not a descriptor of a process") {
  using segment_detail::is_path;
  CHECK(is_path("/proc/1/fd/2"));
  CHECK(is_path("/proc/1234567890/fd/1234567890"));
  for (const char* path : {"/proc/1/fd/", "/proc//fd/1", "/proc/12345678901/fd/1", "/proc/1/fd/1/",
                           "/proc/self/fd/1", "/etc/passwd", "", "/proc/1/fd/1\n", "proc/1/fd/1"}) {
    CHECK_FALSE(is_path(path));
  }
  CHECK_FALSE(Segments().open({"/proc/1/fd/4000000000", kToken}, 0));
}

TEST_CASE("a copy counts only if the version was there before and after, under the lock") {
  const Segment segment("0123456789");
  Segments segments;
  const SharedMemoryPtr view = segments.open(segment.shared(), 10);
  REQUIRE(view);
  const Stamp first{"m", 7, 1}, second{"m", 7, 2};
  CHECK_FALSE(view->begin(second));
  REQUIRE(view->begin(first));
  const int publisher = open(segment.shared().path.c_str(), O_RDWR | O_CLOEXEC);
  CHECK(flock(publisher, LOCK_EX | LOCK_NB) != 0);  // the worker's lock keeps it out
  REQUIRE(view->begin(first));                      // another thread, at the same time
  CHECK(view->end(first));
  CHECK(flock(publisher, LOCK_EX | LOCK_NB) != 0);
  segment.fill(second);  // (breaks the rules)
  CHECK_FALSE(view->end(first));
  REQUIRE(flock(publisher, LOCK_EX | LOCK_NB) == 0);
  CHECK_FALSE(view->begin(second));  // it is being filled
  close(publisher);
  CHECK(view->begin(second));
  CHECK(view->end(second));
}

TEST_CASE("no more segments are kept than the bound") {
  Segments segments;
  std::weak_ptr<SharedMemory> first;
  for (std::size_t i = 0; i <= kSegmentsMax; ++i) {
    const Segment segment("x");
    Shared shared = segment.shared();
    shared.token[0] = "0123456789abcdef"[i];
    std::string token = unhex(shared.token);
    REQUIRE(pwrite(segment.fd, token.data(), token.size(), 8) == 16);
    const SharedMemoryPtr view = segments.open(shared, 1);
    REQUIRE(view);
    if (i == 0) first = view;
  }
  CHECK(first.expired());
}
