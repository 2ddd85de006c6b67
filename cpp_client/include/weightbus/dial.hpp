// Connecting in the background: to look up a host may take long, and nobody else must wait for it.
#pragma once

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "descriptor.hpp"
#include "endpoints.hpp"

namespace weightbus {

namespace dial_detail {

inline constexpr int kConnectMs = 5000;  // for each address of a host

inline Descriptor connected(int family, const sockaddr* address, socklen_t size) {
  Descriptor fd(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return {};
  if (connect(fd.get(), address, size) == 0) return fd;
  if (errno != EINPROGRESS) return {};
  pollfd wait{fd.get(), POLLOUT, 0};
  int error = 0;
  socklen_t length = sizeof error;
  if (poll(&wait, 1, kConnectMs) != 1) return {};
  if (getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) return {};
  return fd;
}

inline Descriptor connected_ipc(const std::string& path) {
  sockaddr_un address{};
  if (path.size() >= sizeof address.sun_path) return {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  // A path that begins with @ is a name outside of the file system, as ZeroMQ has it.
  const bool abstract = path[0] == '@';
  if (abstract) address.sun_path[0] = '\0';
  const std::size_t size = offsetof(sockaddr_un, sun_path) + path.size() + (abstract ? 0 : 1);
  return connected(AF_UNIX, reinterpret_cast<const sockaddr*>(&address),
                   static_cast<socklen_t>(size));
}

inline Descriptor connected_tcp(const Endpoint& endpoint) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(endpoint.bare_host().c_str(), endpoint.port.c_str(), &hints, &found) != 0) {
    return {};
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, freeaddrinfo);
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    Descriptor fd = connected(one->ai_family, one->ai_addr, one->ai_addrlen);
    if (fd) return fd;
  }
  return {};
}

}  // namespace dial_detail

// One attempt to connect. Whoever started it may go before it ends: what it finds is then closed.
class Dial {
 public:
  // `bell` is rung when it has ended.
  Dial(const Endpoint& endpoint, std::shared_ptr<Bell> bell) : outcome_(new Outcome) {
    try {
      std::thread(run, endpoint, std::move(bell), outcome_).detach();
    } catch (const std::system_error&) {  // no more threads: it counts as failed
      outcome_->found.emplace();
    }
  }

  bool done() const {
    const std::lock_guard guard(outcome_->mutex);
    return outcome_->found.has_value();
  }

  // What was connected, if it is done; empty if nothing was.
  Descriptor take() {
    const std::lock_guard guard(outcome_->mutex);
    return std::move(*outcome_->found);
  }

 private:
  struct Outcome {
    std::mutex mutex;
    std::optional<Descriptor> found;
  };

  static void run(const Endpoint& endpoint, const std::shared_ptr<Bell>& bell,
                  const std::shared_ptr<Outcome>& outcome) {
    Descriptor found = endpoint.path.empty() ? dial_detail::connected_tcp(endpoint)
                                             : dial_detail::connected_ipc(endpoint.path);
    {
      const std::lock_guard guard(outcome->mutex);
      outcome->found = std::move(found);
    }
    bell->ring();
  }

  std::shared_ptr<Outcome> outcome_;
};

}  // namespace weightbus
