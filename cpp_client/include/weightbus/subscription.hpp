// The worker's data connection: dialled in the background, read straight to where bytes belong.
//
// It belongs to one thread, which never waits here. A connection that breaks or falls silent is
// dialled again.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "descriptor.hpp"
#include "dial.hpp"
#include "endpoints.hpp"
#include "zmtp.hpp"

namespace weightbus {

class Subscription {
 public:
  Subscription(Place place, ZmtpStream::Deliver deliver, std::shared_ptr<Bell> bell)
      : place_(std::move(place)), deliver_(std::move(deliver)), bell_(std::move(bell)) {
    renew();
  }

  // Takes messages from this endpoint, in place of any before.
  void connect(const Endpoint& endpoint) {
    if (endpoint_ && *endpoint_ == endpoint) return;
    endpoint_ = endpoint;
    redial();
  }

  // Connects anew, and at once.
  void redial() {
    hang_up();
    dial_.reset();
    dial_at_ = 0;
    pause_ = kRedialSeconds;
  }

  // Takes no more messages.
  void disconnect() {
    hang_up();
    endpoint_.reset();
    dial_.reset();
  }

  // Asks for a topic, or no longer; asking twice is asking once.
  void subscribe(const std::string& topic, bool on) {
    if ((topics_.count(topic) == 1) == on) return;
    if (on) {
      topics_.insert(topic);
    } else {
      topics_.erase(topic);
    }
    stream_->subscribe(topic, on);
  }

  // Does what is due. Afterwards `descriptor()` is to be watched, for writing too if `unsent()`.
  void attend(double now) {
    if (dial_ && dial_->done()) adopt(now);
    const double patience = stream_->open() ? kSilenceSeconds : kHandshakeSeconds;
    if (socket_ && now - heard_at_ >= patience) hang_up();
    if (socket_) {
      write();
    } else if (endpoint_ && !dial_ && now >= dial_at_) {
      dial_.emplace(*endpoint_, bell_);
      dial_at_ = now + pause_;
      pause_ = std::min(2 * pause_, kRedialMaxSeconds);
    }
  }

  int descriptor() const { return socket_.get(); }  // -1 while there is none
  bool unsent() const { return socket_ && !stream_->outgoing.empty(); }

  // Reads what there is, but no more than a few messages' worth, so that others get a turn.
  void receive(double now) {
    for (std::size_t total = 0; socket_ && total < kTurnBytes;) {
      const MutableBytes room = stream_->room();
      const ssize_t count =
          recv(socket_.get(), room.data, std::min(room.size, kReceiveBytes), MSG_DONTWAIT);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        return expect(std::min(stream_->missing(), kLowWaterBytes));
      }
      if (count <= 0 || !stream_->received(static_cast<std::size_t>(count))) return hang_up();
      total += static_cast<std::size_t>(count);
      if (stream_->open()) {  // in a handshake, bytes alone are no sign of life
        heard_at_ = now;
        pause_ = kRedialSeconds;
        fault_.clear();
      }
      write();
    }
  }

  // Why the last connection was of no use; empty if it was.
  const std::string& fault() const { return fault_; }

 private:
  static constexpr double kRedialSeconds = 0.05, kRedialMaxSeconds = 1.0;  // doubles
  static constexpr double kHandshakeSeconds = 5;
  static constexpr double kSilenceSeconds = 30;          // beacons come far more often than that
  static constexpr std::size_t kReceiveBytes = 1 << 18;  // while they are in the cache for the CRC
  static constexpr std::size_t kTurnBytes = 4 << 20;
  static constexpr std::size_t kLowWaterBytes = 1 << 18;

  void renew() {
    stream_ = std::make_unique<ZmtpStream>(place_, deliver_);
    for (const std::string& topic : topics_) stream_->subscribe(topic, true);
  }

  void adopt(double now) {
    socket_ = dial_->take();
    dial_.reset();
    heard_at_ = now;
    expected_ = 1;
  }

  // Sleeps until so many bytes are here, rather than be woken for each packet.
  void expect(std::size_t count) {
    if (count == expected_) return;
    expected_ = count;
    const int bytes = static_cast<int>(count);
    setsockopt(socket_.get(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
  }

  void write() {
    std::string& out = stream_->outgoing;
    while (!out.empty()) {
      const ssize_t sent = send(socket_.get(), out.data(), out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (sent < 0) return hang_up();
      out.erase(0, static_cast<std::size_t>(sent));
    }
  }

  void hang_up() {
    if (!stream_->fault().empty()) fault_ = stream_->fault();
    socket_.reset();
    stream_->close();
    renew();
  }

  Place place_;
  ZmtpStream::Deliver deliver_;
  std::shared_ptr<Bell> bell_;
  std::unique_ptr<ZmtpStream> stream_;
  std::optional<Endpoint> endpoint_;
  std::optional<Dial> dial_;
  Descriptor socket_;
  std::set<std::string> topics_;
  std::string fault_;
  double dial_at_ = 0, pause_ = kRedialSeconds, heard_at_ = 0;
  std::size_t expected_ = 1;
};

}  // namespace weightbus
