// The data channel's bytes, however they are cut.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>
#include <weightbus/zmtp.hpp>

using namespace weightbus;

namespace {

std::string greeting(const std::string& mechanism = "NULL") {
  std::string bytes("\xFF\0\0\0\0\0\0\0\1\x7F\3\0", 12);
  bytes += mechanism;
  bytes.resize(64);
  return bytes;
}

std::string frame(const std::string& body, int flags = 0) {
  std::string bytes(1, static_cast<char>(flags | (body.size() > 255 ? 2 : 0)));
  if (body.size() <= 255) return bytes + static_cast<char>(body.size()) + body;
  for (int shift = 56; shift >= 0; shift -= 8) {
    bytes += static_cast<char>(static_cast<std::uint64_t>(body.size()) >> shift);
  }
  return bytes + body;
}

const std::string kReady = frame(std::string("\5READY\13Socket-Type\0\0\0\4XPUB", 26), 4);

std::string message(const std::string& header, const std::string& payload) {
  return frame("m/dat", 1) + frame(header, 1) + frame(payload);
}

// A stream whose payloads go to one place.
struct Receiver {
  std::vector<std::uint8_t> memory = std::vector<std::uint8_t>(1 << 20);
  LeasePtr lease;
  std::vector<std::vector<std::string>> messages;
  ZmtpStream stream{[this](Bytes, std::size_t size) {
                      lease = std::make_shared<Lease>(MutableBytes{memory.data(), size});
                      return lease;
                    },
                    [this](const Frames& frames) {
                      std::vector<std::string> copied;
                      for (const Bytes& one : frames) copied.emplace_back(one.text());
                      messages.push_back(copied);
                    }};

  // Feeds bytes, no more than `most` at once; false if the stream refuses them.
  bool feed(std::string_view bytes, const std::function<std::size_t()>& most) {
    while (!bytes.empty()) {
      const MutableBytes room = stream.room();
      const std::size_t count = std::min({room.size, bytes.size(), most()});
      std::memcpy(room.data, bytes.data(), count);
      bytes.remove_prefix(count);
      if (!stream.received(count)) return false;
    }
    return true;
  }
  bool feed(std::string_view bytes) {
    return feed(bytes, [] { return std::size_t{1} << 20; });
  }
};

}  // namespace

TEST_CASE("messages are the same however their bytes are cut") {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    std::vector<std::vector<std::string>> expected;
    std::string bytes = greeting() + kReady;
    for (int i = 0; i < 20; ++i) {
      const std::string header(1 + random() % 400, static_cast<char>('a' + i));
      const std::string payload(random() % 3 == 0 ? random() % 40'000 : random() % 300, 'p');
      bytes += message(header, payload);
      expected.push_back({"m/dat", header, payload});
      if (random() % 4 == 0) bytes += frame(std::string("\4PING\0\1hello", 12), 4);
    }
    Receiver receiver;
    receiver.stream.subscribe("m/ctl", true);
    const bool taken = receiver.feed(bytes, [&] { return 1 + random() % (1 << random() % 16); });
    CHECK_MESSAGE(taken, "seed ", seed);
    CHECK_MESSAGE(receiver.messages == expected, "seed ", seed);
    const std::string& out = receiver.stream.outgoing;
    CHECK(out.find(frame("\1m/ctl")) != std::string::npos);
  }
}

TEST_CASE("a payload is given its place after the messages before it were delivered") {
  // An announcement and the first chunk of its version can come in one read.
  std::vector<std::string> order;
  ZmtpStream stream{[&](Bytes header, std::size_t) {
                      order.push_back("place of " + std::string(header.text()));
                      return LeasePtr();
                    },
                    [&](const Frames& frames) { order.emplace_back(frames.at(1).text()); }};
  const std::string bytes = greeting() + kReady + message("announce", "layout") +
                            message("chunk", std::string(1 << 16, 'p'));
  const MutableBytes room = stream.room();
  REQUIRE(room.size < bytes.size());
  std::memcpy(room.data, bytes.data(), room.size);
  CHECK(stream.received(room.size));
  CHECK(order == std::vector<std::string>{"announce", "place of chunk"});
}

TEST_CASE("a ping is answered with its context") {
  Receiver receiver;
  CHECK(receiver.feed(greeting() + kReady + frame(std::string("\4PING\0\1ctx", 10), 4)));
  CHECK(receiver.stream.outgoing.find(frame("\4PONGctx", 4)) != std::string::npos);
}

TEST_CASE(
    "a payload is checked as it arrives, and nothing is written once the place is taken back") {
  Receiver receiver;
  const std::string payload(100'000, 'x');
  const std::string bytes = greeting() + kReady + message("h", payload);
  const std::string next = message("next", "small");
  SUBCASE("whole") {
    CHECK(receiver.feed(bytes + next));
    REQUIRE(receiver.lease);
    CHECK(receiver.lease->complete());
    CHECK(receiver.lease->crc() == crc32c(payload));
  }
  SUBCASE("taken back in the middle") {
    CHECK(receiver.feed(std::string_view(bytes).substr(0, 50'000)));
    receiver.lease->revoke();
    std::fill(receiver.memory.begin(), receiver.memory.end(), std::uint8_t{0});
    CHECK(receiver.feed(std::string_view(bytes).substr(50'000)));
    CHECK(receiver.feed(next));
    CHECK(std::count(receiver.memory.begin(), receiver.memory.end(), 'x') == 0);
    CHECK(receiver.messages.at(0).at(2).empty());
  }
  SUBCASE("cut off") {
    CHECK(receiver.feed(std::string_view(bytes).substr(0, 50'000)));
    receiver.stream.close();
    CHECK(receiver.lease->cut_off());
  }
}

TEST_CASE("the place of a payload is given back if its message is dropped for another frame") {
  Receiver receiver;
  const std::string payload(100'000, 'x');
  const std::string bytes = frame("m/dat", 1) + frame("h", 1) + frame(payload, 1) + frame("more");
  CHECK(receiver.feed(greeting() + kReady + bytes));
  REQUIRE(receiver.lease);
  CHECK(receiver.lease->complete());
  CHECK(receiver.lease->cut_off());
  CHECK(receiver.messages.at(0).size() == 4);
}

TEST_CASE("whoever does not speak ZMTP 3 without security is left") {
  const auto refused = [](const std::string& bytes) {
    Receiver receiver;
    return !receiver.feed(bytes) && !receiver.stream.fault().empty();
  };
  CHECK(refused(std::string(64, 'G')));
  CHECK(refused(greeting("CURVE")));
  CHECK(refused(greeting() + frame("m/dat")));                     // before READY
  CHECK(refused(greeting() + kReady + std::string("\x08\0", 2)));  // unknown flags
  CHECK(refused(greeting() + kReady + frame("\5ERROR\2no", 4)));
  CHECK(refused(greeting() + kReady + std::string("\3\0\0\0\0\xFF\0\0\0", 9)));  // 4 GiB of topic
  std::string many;
  for (int i = 0; i < 9; ++i) many += frame("x", 1);
  CHECK(refused(greeting() + kReady + many));
}
