// Any sequence of messages leaves the machine in a state in which it still works, and never makes
// it run anything but what its digest says. Each step is a byte that says what happens, and what
// it takes: a message built from numbers, a raw header, or time that passes.
#include <fuzzer/FuzzedDataProvider.h>

#include <cstdlib>

#include "../driver/player.hpp"
#include "../tests/publisher.hpp"

using namespace weightbus;

namespace {

class Run {
 public:
  Run(const std::uint8_t* data, std::size_t size) : bytes_(data, size), player_(setting()) {
    for (char value : {'a', 'b', 'c'}) {
      const std::size_t nbytes = value == 'c' ? 23 : 10;
      publisher_.publish(
          {layout_of_bytes(nbytes), std::string(nbytes, value), 4, "auto", "applied"});
    }
    player_.control(frames_of(publisher_.welcome()));
  }

  void go() {
    while (bytes_.remaining_bytes() > 0) step();
    recover();
  }

 private:
  static Player::Setting setting() {
    Player::Setting setting;
    setting.bytes_max = 1 << 16;
    setting.apply = false;
    return setting;
  }

  void step() {
    switch (bytes_.ConsumeIntegralInRange(0, 9)) {
      case 0:
        return deliver(publisher_.announce(number(), bytes_.ConsumeBool()));
      case 1:
        return deliver(publisher_.chunk(number(), bytes_.ConsumeIntegralInRange(0, 2)));
      case 2:
        return deliver(publisher_.end(number()));
      case 3:
        return deliver(publisher_.commit(number()));
      case 4:
        return deliver(publisher_.abort(number()));
      case 5:
        return deliver(publisher_.beacon());
      case 6:
        return player_.wait(bytes_.ConsumeIntegralInRange(1, 30) / 10.0);
      case 7:
        return changed_announcement();
      case 8:
        return use();
      default:
        return raw();
    }
  }

  std::uint64_t number() { return bytes_.ConsumeIntegralInRange<std::uint64_t>(1, 3); }

  // Sometimes damaged on the way.
  void deliver(Message message) {
    if (bytes_.ConsumeIntegralInRange(0, 7) == 0) {
      std::string& frame = message.back();
      if (!frame.empty()) {
        frame[bytes_.ConsumeIntegralInRange<std::size_t>(0, frame.size() - 1)] ^= 1;
      }
    }
    bytes_.ConsumeBool() ? player_.data(frames_of(message)) : player_.control(frames_of(message));
  }

  void changed_announcement() {
    Announce announce = publisher_.announcement(number());
    announce.commit = bytes_.ConsumeBool() ? "together" : "auto";
    announce.acknowledge = bytes_.ConsumeBool() ? "staged" : "applied";
    announce.chunk_bytes = bytes_.ConsumeBool() ? 5 : 4;
    if (bytes_.ConsumeBool()) announce.version += 3;
    Message message{""};
    if (bytes_.ConsumeBool()) {
      announce.whole = Whole{bytes_.ConsumeIntegral<std::uint32_t>(), std::string(64, '0')};
      message.push_back(bytes_.ConsumeRandomLengthString(16));
    }
    message[0] = encode(announce);
    deliver(message);
  }

  // The user applies a version, drops it, or fails.
  void use() {
    if (player_.ready.empty()) return;
    const StagedPtr staged = player_.ready.back();
    player_.ready.pop_back();
    WorkerMachine& machine = player_.machine();
    switch (bytes_.ConsumeIntegralInRange(0, 2)) {
      case 0:
        return apply(*staged);
      case 1:
        return player_.perform(machine.dropped("m", staged->key, player_.now));
      default:
        return player_.perform(machine.failed("m", staged->key, "no", player_.now));
    }
  }

  void apply(const StagedVersion& staged) {
    const std::string& id = staged.layout->id();
    if (staged.digest != digest_of(id, staged.data(), 4) &&
        staged.digest != digest_of(id, staged.data(), 5)) {
      std::abort();  // it would run what was never published
    }
    player_.apply(staged);
  }

  void raw() {
    Message message{bytes_.ConsumeRandomLengthString(400)};
    for (int more = bytes_.ConsumeIntegralInRange(0, 3); more > 0; --more) {
      message.push_back(bytes_.ConsumeRandomLengthString(64));
    }
    player_.control(frames_of(message));
  }

  // Whatever happened, a publisher of a later epoch is followed to its newest version.
  void recover() {
    for (const StagedPtr& staged : std::exchange(player_.ready, {})) apply(*staged);
    TinyPublisher later(kIntegerMax);
    const std::uint64_t newest =
        later.publish({layout_of_bytes(10), "0123456789", 4, "auto", "applied"});
    for (int i = 0; i < 600 && player_.runs["m"] != newest; ++i) {
      player_.wait(0.1);
      for (const FromWorker& said : std::exchange(player_.sent, {})) {
        for (const Message& answer : later.answer(said)) player_.control(frames_of(answer));
      }
      for (const StagedPtr& staged : std::exchange(player_.ready, {})) apply(*staged);
      if (player_.bytes["m"] == "0123456789") return;
    }
    if (player_.bytes["m"] != "0123456789") std::abort();
  }

  FuzzedDataProvider bytes_;
  TinyPublisher publisher_{7};
  Player player_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Run(data, size).go();
  return 0;
}
