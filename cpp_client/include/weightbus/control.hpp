// The worker's control connection: a DEALER. No other header includes ZeroMQ.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>
#include <zmq.hpp>

#include "bytes.hpp"
#include "descriptor.hpp"
#include "endpoints.hpp"
#include "limits.hpp"
#include "messages.hpp"
#include "result.hpp"

namespace weightbus {

class Control {
 public:
  static Result<std::unique_ptr<Control>> connect(const std::string& address) {
    try {
      return std::unique_ptr<Control>(new Control(address));
    } catch (const zmq::error_t& error) {
      return Error{"address", "cannot connect to " + address + ": " + error.what()};
    }
  }

  // Sends to the publisher; lost while nobody is there.
  void send(const std::string& header) {
    try {
      // (An empty result says that nobody is there: what matters is said again.)
      [[maybe_unused]] const auto sent =
          socket_.send(zmq::buffer(header), zmq::send_flags::dontwait);
    } catch (const zmq::error_t&) {  // the context is being closed
    }
  }

  // Connects anew; what waits to be sent on the old connection is lost.
  void redial() {
    try {
      socket_.disconnect(address_);
    } catch (const zmq::error_t&) {  // there is none
    }
    socket_.connect(address_);
  }

  // Whether anything became of the connection since this was asked last. Ask often: ZeroMQ stands
  // still while a thousand changes wait here.
  bool changed() {
    bool changed = false;
    try {
      for (zmq::message_t change; changes_.recv(change, zmq::recv_flags::dontwait);) changed = true;
    } catch (const zmq::error_t&) {  // a signal: later
    }
    return changed;
  }

  // The next message's frames, valid until the next call; empty if there is none.
  Frames receive() {
    std::size_t count = 0;
    try {
      do {
        if (parts_.size() == count) parts_.emplace_back();
        if (!socket_.recv(parts_[count], zmq::recv_flags::dontwait)) return {};
      } while (parts_[count++].more() && count < kFramesMax);
      for (zmq::message_t rest; count == kFramesMax && parts_.back().more();) {
        if (!socket_.recv(rest, zmq::recv_flags::dontwait) || !rest.more()) break;
      }
    } catch (const zmq::error_t&) {
      return {};
    }
    Frames frames;
    for (std::size_t i = 0; i < count; ++i) frames.emplace_back(parts_[i].data(), parts_[i].size());
    return frames;
  }

  // Waits for something to arrive at the socket (or for room to send, if `writable`), the bell, or
  // another descriptor (-1: none).
  struct Activity {
    bool control = false, writable = false, other = false;
  };
  Activity wait(Bell& bell, bool writable, int other, bool other_writable, double seconds) {
    constexpr short kIn = ZMQ_POLLIN, kOut = ZMQ_POLLOUT;
    zmq::pollitem_t items[] = {
        {socket_.handle(), 0, static_cast<short>(kIn | (writable ? kOut : 0)), 0},
        {nullptr, bell.descriptor(), kIn, 0},
        {nullptr, other, static_cast<short>(kIn | (other_writable ? kOut : 0)), 0}};
    const auto milliseconds = static_cast<long>(std::max(0.0, seconds) * 1000 + 0.999);
    try {
      zmq::poll(items, other < 0 ? 2 : 3, std::chrono::milliseconds(milliseconds));
    } catch (const zmq::error_t&) {  // a signal: look again
      return {};
    }
    if (items[1].revents != 0) bell.silence();
    return {(items[0].revents & kIn) != 0, (items[0].revents & kOut) != 0,
            other >= 0 && items[2].revents != 0};
  }

 private:
  static constexpr std::size_t kFramesMax = 8;
  static constexpr int kLingerMs = 200;     // what is on its way when we leave gets this
  static constexpr int kConnectMs = 3'000;  // for one attempt, in which TCP tries at 0 and 1 s
  static constexpr int kQueue = 32;         // messages held before TCP pushes back; bytes count

  // Of a connection. After an error of ZMTP the last one comes, and then none any more.
  static constexpr int kChanges = ZMQ_EVENT_CONNECT_DELAYED | ZMQ_EVENT_CONNECT_RETRIED |
                                  ZMQ_EVENT_CONNECTED | ZMQ_EVENT_HANDSHAKE_SUCCEEDED |
                                  ZMQ_EVENT_DISCONNECTED;

  explicit Control(const std::string& address)
      : address_(address),
        context_(1),
        changes_(context_, ZMQ_PAIR),
        socket_(context_, ZMQ_DEALER) {
    zmq_socket_monitor(socket_.handle(), "inproc://changes", kChanges);
    changes_.connect("inproc://changes");
    socket_.set(zmq::sockopt::linger, kLingerMs);
    socket_.set(zmq::sockopt::reconnect_ivl, 50);
    socket_.set(zmq::sockopt::reconnect_ivl_max, 1'000);
    socket_.set(zmq::sockopt::connect_timeout, kConnectMs);
    socket_.set(zmq::sockopt::immediate, true);  // say nothing to nobody: it would pile up
    socket_.set(zmq::sockopt::rcvhwm, kQueue);
    socket_.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(kMessageBytesMax));
    socket_.set(zmq::sockopt::ipv6, address.find('[') != std::string::npos);
    socket_.connect(address);
  }

  const std::string address_;
  zmq::context_t context_;
  zmq::socket_t changes_;  // of the other one, which is closed first
  zmq::socket_t socket_;
  std::vector<zmq::message_t> parts_;
};

}  // namespace weightbus
