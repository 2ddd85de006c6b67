// Addresses: what a user types, and what a publisher says of its data channel.
#pragma once

#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

#include "result.hpp"

namespace weightbus {

// `tcp://HOST:PORT`, or `ipc://PATH`, taken apart.
struct Endpoint {
  std::string host, port;  // of tcp
  std::string path;        // of ipc; empty for tcp

  static Result<Endpoint> parse(const std::string& text) {
    const std::string_view view = text;
    if (view.substr(0, 6) == "ipc://" && view.size() > 6) {
      return Endpoint{"", "", std::string(view.substr(6))};
    }
    const std::size_t colon = view.rfind(':');
    if (view.substr(0, 6) == "tcp://" && colon > 6 && colon != std::string_view::npos) {
      const std::string_view host = view.substr(6, colon - 6), port = view.substr(colon + 1);
      if (is_host(host) && is_port(port)) return Endpoint{std::string(host), std::string(port), ""};
    }
    return Error{"address", "'" + text + "' is no address of this bus; write tcp://HOST:PORT or " +
                                "ipc://PATH, as the publisher was given it"};
  }

  // The publisher's data channel as this worker can reach it: without a host of its own, it is on
  // the host that the worker used for the control channel.
  static Result<Endpoint> resolve(const std::string& data, const Endpoint& control) {
    Result<Endpoint> found = parse(data);
    if (!found || !found->path.empty()) return found;
    if (found->host != "*" && found->host != "0.0.0.0" && found->host != "[::]") return found;
    if (control.host.empty()) {
      return Error{"address", "the publisher's data is at '" + data +
                                  "', on the host of its control address, which names none; give " +
                                  "the publisher an address to advertise"};
    }
    found->host = control.host;
    return found;
  }

  bool is_ipv6() const { return !host.empty() && host.front() == '['; }

  // Without the brackets of IPv6.
  std::string bare_host() const { return is_ipv6() ? host.substr(1, host.size() - 2) : host; }

 private:
  static bool is_host(std::string_view host) {
    if (host.front() == '[') return host.size() > 2 && host.back() == ']';
    return host.find_first_of(":/ []") == std::string_view::npos;
  }

  static bool is_port(std::string_view port) {
    std::uint32_t number = 0;
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
    return error == std::errc() && end == port.data() + port.size() && number >= 1 &&
           number <= 65535;
  }
};

inline bool operator==(const Endpoint& a, const Endpoint& b) {
  return a.host == b.host && a.port == b.port && a.path == b.path;
}

}  // namespace weightbus
