// The vectors of the shared road.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <weightbus/segment.hpp>

// What a worker finds in a segment, as the vectors write it.
inline nlohmann::ordered_json segment(const weightbus::Json& one, const std::string& memory) {
  using namespace weightbus;
  const int fd = memfd_create("vector", MFD_CLOEXEC);
  if (fd < 0 || write(fd, memory.data(), memory.size()) != static_cast<ssize_t>(memory.size())) {
    return {{"unsupported", "no memfd_create here"}};
  }
  const Shared shared{"/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd),
                      one["token"]};
  const auto view = Segments().open(shared, one["nbytes"]);
  close(fd);
  if (!view) return {{"error", "segment"}};
  if (one["version"].is_object()) {
    const Json& of = one["version"];
    if (!view->begin(Stamp{of["model"], of["epoch"], of["version"]})) return {{"error", "stale"}};
    view->end(Stamp{of["model"], of["epoch"], of["version"]});
  }
  return {{"ok", {{"data", hex(view->data())}}}};
}
