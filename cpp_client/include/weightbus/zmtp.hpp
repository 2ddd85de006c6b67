// The subscriber's side of ZMTP 3 (ZeroMQ RFC 23, NULL security), without sockets.
//
// libzmq receives each message into memory of its own: fresh pages to touch, a hand-over between
// threads, and a copy to where the bytes belong, which together cost more than the network does. So
// the worker reads published messages itself, and the bulk of a payload goes from the kernel
// straight to its place. Feed what arrives into `room()` and `received()`; send what is in
// `outgoing`.
//
//     greeting (64 bytes) ──> READY ──> messages and commands
//
//     a frame:  ┌───────┬──────────────┬──── ··· ────┐   flags: 1 more follow, 2 long, 4 command
//               │ flags │ size, 1 or 8 │    body     │
//               └───────┴──────────────┴──── ··· ────┘
//     a message: topic, header, at most one payload
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bytes.hpp"
#include "limits.hpp"
#include "messages.hpp"
#include "transfer.hpp"

namespace weightbus {

// Says where the payload of this size belongs that follows a header; null: nowhere.
using Place = std::function<LeasePtr(Bytes header, std::size_t size)>;

class ZmtpStream {
 public:
  // Takes a complete message, topic first; its memory is lent for the call.
  using Deliver = std::function<void(const Frames&)>;

  ZmtpStream(Place place, Deliver deliver)
      : place_(std::move(place)), deliver_(std::move(deliver)), scratch_(kScratchBytes) {
    outgoing = std::string(kGreeting);
    outgoing.resize(kGreetingBytes);
  }

  std::string outgoing;

  bool open() const { return state_ == State::kOpen; }
  const std::string& fault() const { return fault_; }  // why the connection is of no use

  // Asks for a topic, or no longer.
  void subscribe(const std::string& topic, bool on) {
    if (on) {
      topics_.insert(topic);
    } else {
      topics_.erase(topic);
    }
    if (open()) send(std::string(1, on ? '\1' : '\0') + topic);
  }

  // Where the next bytes go.
  MutableBytes room() {
    if (!body_) return {scratch_.data() + have_, kScratchBytes - have_};
    if (Lease* lease = live_lease()) return lease->room();
    return {scratch_.data(), std::min<std::size_t>(kScratchBytes, body_->missing)};
  }

  // How many bytes must come before anything can be done with them, at least 1.
  std::size_t missing() const { return body_ ? body_->missing : 1; }

  // Takes note of so many bytes in `room()`; false: close the connection, `fault()` says why.
  bool received(std::size_t count) {
    if (body_) {
      take(count);
      if (body_->missing > 0) return true;
      const Body body = *std::exchange(body_, std::nullopt);
      const bool live = body.lease && body.lease->live();
      if (live) received_.push_back(body.lease);
      return frame(body.flags, live ? Bytes(body.lease->place()) : Bytes());
    }
    have_ += count;
    std::size_t at = 0;
    while (true) {
      const std::size_t size = parse({scratch_.data() + at, have_ - at});
      if (!fault_.empty()) return false;
      if (size == 0) break;
      at += size;
    }
    std::memmove(scratch_.data(), scratch_.data() + at, have_ - at);
    have_ -= at;
    return true;
  }

  // The connection is gone, perhaps in the middle of a payload.
  void close() {
    if (body_ && body_->lease) body_->lease->cancel();
    body_.reset();
    end_leases();
  }

 private:
  static constexpr std::uint8_t kMore = 1, kLong = 2, kCommand = 4;
  static constexpr std::size_t kScratchBytes = 8192;  // of a payload, no more is copied twice
  static constexpr std::size_t kPayload = 2;    // the index of the payload, after topic and header
  static constexpr std::size_t kFramesMax = 8;  // a later protocol may have more than one payload
  static constexpr std::size_t kGreetingBytes = 64;
  static constexpr std::string_view kGreeting{"\xFF\0\0\0\0\0\0\0\0\x7F\3\0NULL", 16};
  static constexpr std::string_view kReady{"\5READY\13Socket-Type\0\0\0\3SUB\10Identity\0\0\0\0",
                                           38};

  enum class State { kGreeting, kReady, kOpen };

  // A frame too long for the scratch, on its way to its place.
  struct Body {
    std::uint8_t flags;
    std::size_t missing;
    LeasePtr lease;
  };

  bool fail(std::string why) {
    fault_ = std::move(why);
    return false;
  }

  Lease* live_lease() {
    return body_ && body_->lease && body_->lease->live() ? body_->lease.get() : nullptr;
  }

  void take(std::size_t count) {
    body_->missing -= count;
    if (Lease* lease = live_lease()) lease->received(count);
  }

  // Takes what begins here in the scratch; returns its size, 0 if more must come first.
  std::size_t parse(Bytes bytes) {
    if (state_ == State::kGreeting) return greet(bytes);
    if (bytes.size < 2) return 0;
    const std::uint8_t flags = bytes.data[0];
    if (flags > (kMore | kLong | kCommand)) return fail("a frame with unknown flags");
    const std::size_t head = flags & kLong ? 9 : 2;
    if (bytes.size < head) return 0;
    std::uint64_t size = 0;
    for (std::size_t i = 1; i < head; ++i) size = size << 8 | bytes.data[i];
    if (size <= bytes.size - head) {
      return frame(flags, bytes.slice(head, head + size)) ? head + size : 0;
    }
    if (size <= kScratchBytes - head && !is_payload(flags)) return 0;
    return begin(flags, size, bytes.slice(head, bytes.size)) ? bytes.size : 0;
  }

  std::size_t greet(Bytes bytes) {
    if (bytes.size < kGreetingBytes) return 0;
    if (bytes.data[0] != 0xFF || bytes.data[9] != 0x7F || bytes.data[10] < 3) {
      return fail("the other side does not speak ZMTP 3");
    }
    std::string_view mechanism = bytes.slice(12, 32).text();
    mechanism = mechanism.substr(0, mechanism.find('\0'));
    if (mechanism != "NULL") {
      return fail("the other side asks for '" + std::string(mechanism) +
                  "' security, the data channel has none");
    }
    state_ = State::kReady;
    send(std::string(kReady), kCommand);
    return kGreetingBytes;
  }

  bool is_payload(std::uint8_t flags) const {
    return !(flags & kCommand) && frame_count_ >= kPayload;
  }

  // Finds a place for a frame that the scratch does not hold, of which `first` is here.
  bool begin(std::uint8_t flags, std::uint64_t size, Bytes first) {
    const bool payload = is_payload(flags);
    if (size > (payload ? kMessageBytesMax : kHeaderBytesMax)) {
      return fail("a frame of " + std::to_string(size) + " bytes");
    }
    LeasePtr lease;
    if (!payload) {
      auto memory = std::make_shared<std::vector<std::uint8_t>>(size);
      lease = std::make_shared<Lease>(MutableBytes{memory->data(), memory->size()}, memory);
    } else if (frame_count_ == kPayload) {
      lease = place_(held_[1], size);
    }
    body_ = Body{flags, static_cast<std::size_t>(size), std::move(lease)};
    if (Lease* live = live_lease()) std::memcpy(live->room().data, first.data, first.size);
    take(first.size);
    return true;
  }

  // A frame is complete. Topic and header are kept until the message is; payloads stay in place.
  bool frame(std::uint8_t flags, Bytes body) {
    if (flags & kCommand) return command(body.text());
    if (state_ != State::kOpen) return fail("a message before READY");
    if (frame_count_ >= kFramesMax) return fail("a message of too many frames");
    if (frame_count_ < kPayload) {
      held_[frame_count_].assign(body.text());
    } else {
      payloads_.push_back(flags & kMore ? Bytes() : body);  // only the last one is still here
    }
    ++frame_count_;
    if (!(flags & kMore)) finish();
    return true;
  }

  void finish() {
    Frames frames;
    for (std::size_t i = 0; i < std::min(frame_count_, kPayload); ++i)
      frames.emplace_back(held_[i]);
    frames.insert(frames.end(), payloads_.begin(), payloads_.end());
    frame_count_ = 0;
    payloads_.clear();
    deliver_(frames);
    end_leases();
  }

  // The message was taken: what nobody took of it (it was malformed, say) has to be fetched.
  void end_leases() {
    for (const LeasePtr& lease : received_) lease->cancel();
    received_.clear();
  }

  bool command(std::string_view body) {
    const std::size_t size = body.empty() ? 0 : static_cast<std::uint8_t>(body[0]);
    const std::string_view name = body.substr(std::min<std::size_t>(1, body.size()), size);
    const std::string_view rest = body.substr(std::min(1 + size, body.size()));
    if (name == "READY" && state_ == State::kReady) {
      state_ = State::kOpen;
      for (const std::string& topic : topics_) send("\1" + topic);
    } else if (name == "PING" && rest.size() >= 2) {
      send("\4PONG" + std::string(rest.substr(2, 16)), kCommand);
    } else if (name == "ERROR") {
      return fail("the other side says: " +
                  std::string(rest.substr(std::min<std::size_t>(1, rest.size()))));
    }
    return true;
  }

  void send(const std::string& body, std::uint8_t flags = 0) {
    outgoing.push_back(static_cast<char>(flags));
    outgoing.push_back(static_cast<char>(body.size()));
    outgoing += body;
  }

  Place place_;
  Deliver deliver_;
  State state_ = State::kGreeting;
  std::string fault_;
  std::vector<std::uint8_t> scratch_;
  std::size_t have_ = 0;  // bytes in the scratch
  std::optional<Body> body_;
  std::array<std::string, kPayload> held_;  // topic and header of the message that is arriving
  Frames payloads_;
  std::vector<LeasePtr> received_;  // places of its payload that are filled
  std::size_t frame_count_ = 0;
  std::set<std::string> topics_;
};

}  // namespace weightbus
