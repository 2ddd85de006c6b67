// A whole worker against a publisher on loopback.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>
#include <weightbus/weightbus.hpp>

#include "server.hpp"

using namespace weightbus;
using namespace std::chrono_literals;

namespace {

constexpr auto kLong = 60s;  // until something must have happened, on a busy machine

Published bytes(std::size_t size, char value, std::uint64_t chunk_bytes = 1 << 16) {
  return {layout_of_bytes(size), std::string(size, value), chunk_bytes, "auto", "applied"};
}

Options options_of(std::vector<std::uint8_t>& memory) {
  Options options;
  options.in_place("m", {tensor("w", memory.data(), {memory.size()})});
  return options;
}

Worker connected(const std::string& address, Options options) {
  auto worker = Worker::connect(address, std::move(options));
  REQUIRE_MESSAGE(worker.ok(), (worker ? "" : worker.error().text));
  return std::move(*worker);
}

}  // namespace

TEST_CASE("versions are applied in place, where receive is called") {
  Server server(7);
  std::vector<std::uint8_t> memory(300'000);
  Worker worker = connected(server.address(), options_of(memory));
  CHECK(worker.wait_joined(kLong));
  for (char value : {'a', 'b', 'c'}) {
    const auto number = server.publish(bytes(memory.size(), value));
    const auto update = worker.receive(kLong);
    REQUIRE(update.ok());
    REQUIRE(update->has_value());
    CHECK((*update)->version == number);
    CHECK(memory == std::vector<std::uint8_t>(memory.size(), static_cast<std::uint8_t>(value)));
    CHECK(server.wait_until([&](const auto& p) { return p.applied() == number; }));
  }
  CHECK(worker.state().models["m"].running->version == 3);
  CHECK(server.ask([](const auto& p) { return p.wrong_digests(); }) == 0);
  worker.close();
  CHECK(server.wait_until([](const auto& p) { return p.said_goodbye(); }));
  CHECK(worker.receive(1ms).error().code == "closed");
}

TEST_CASE("nothing in time is no error, and close wakes whoever waits") {
  std::vector<std::uint8_t> memory(4);
  Worker worker = connected("tcp://127.0.0.1:9", options_of(memory));  // nobody is there
  const auto nothing = worker.receive(20ms);
  REQUIRE(nothing.ok());
  CHECK_FALSE(nothing->has_value());
  std::thread closer([&] { worker.close(); });
  CHECK(worker.receive(kLong).error().code == "closed");
  closer.join();
}

TEST_CASE("a snapshot stays what it is while newer ones come") {
  Server server(7);
  Options options;
  options.snapshots("m");
  Worker worker = connected(server.address(), std::move(options));
  CHECK(worker.snapshot("m") == nullptr);
  std::vector<std::shared_ptr<const Snapshot>> kept;
  for (char value : {'a', 'b', 'c', 'd', 'e'}) {
    server.publish(bytes(100'000, value));
    REQUIRE(worker.receive(kLong).ok());
    kept.push_back(worker.snapshot("m"));
  }
  for (std::size_t i = 0; i < kept.size(); ++i) {
    REQUIRE(kept[i]);
    CHECK(kept[i]->version == i + 1);
    CHECK(kept[i]->data().text() == std::string(100'000, static_cast<char>('a' + i)));
    CHECK(kept[i]->as<std::uint8_t>("w")[99'999] == 'a' + i);
    CHECK(kept[i]->as<float>("w") == nullptr);
    CHECK_FALSE(kept[i]->find("v"));
  }
}

TEST_CASE("in the background, readers never see half a version") {
  Server server(7);
  std::vector<std::uint8_t> memory(2'000'000);
  Worker worker = connected(server.address(), options_of(memory));
  worker.start();
  CHECK(worker.receive(1ms).error().code == "options");
  std::atomic<bool> stop{false};
  std::atomic<int> torn{0}, reads{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      while (!stop) {
        const auto guard = worker.reading();
        torn += std::memcmp(memory.data(), memory.data() + 1, memory.size() - 1) != 0;
        ++reads;
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    const auto number = server.publish(bytes(memory.size(), static_cast<char>('a' + i)));
    if (i % 5 != 4) continue;  // some are overtaken
    CHECK(worker.wait_for_version("m", number, kLong));
  }
  CHECK(server.wait_until([](const auto& p) { return p.applied() == 20; }));
  stop = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(torn == 0);
  CHECK(reads > 0);
}

TEST_CASE("small versions are applied in the background, too") {
  Server server(7);
  std::vector<std::uint8_t> memory(10);
  Worker worker = connected(server.address(), options_of(memory));
  worker.start();
  for (int i = 0; i < 50; ++i) {
    const auto number = server.publish(bytes(memory.size(), static_cast<char>(i)));
    REQUIRE(worker.wait_for_version("m", number, kLong));
    const auto guard = worker.reading();
    CHECK(memory[9] == i);
  }
}

TEST_CASE("a worker follows a publisher that starts again, and keeps what runs until then") {
  std::vector<std::uint8_t> memory(100);
  auto server = std::make_unique<Server>(7);
  const std::string address = server->address();
  Options options = options_of(memory);
  options.timing.ping = 0.1;
  options.timing.lost_after = 0.5;
  Worker worker = connected(address, std::move(options));
  server->publish(bytes(memory.size(), 'a'));
  REQUIRE(worker.receive(kLong).ok());
  server.reset();
  CHECK(memory[0] == 'a');
  server = std::make_unique<Server>(8, address);
  server->publish(bytes(memory.size(), 'b'));
  std::optional<Update> update;
  const auto end = std::chrono::steady_clock::now() + kLong;
  while (!update && std::chrono::steady_clock::now() < end) {
    auto received = worker.receive(1s);
    if (received) update = *received;
  }
  REQUIRE(update);
  CHECK(update->epoch == 8);
  CHECK(memory[0] == 'b');
}

TEST_CASE("a version that does not fit is told once, by name, and nothing changes") {
  Server server(7);
  std::vector<std::uint8_t> memory(100, 'x');
  Worker worker = connected(server.address(), options_of(memory));
  server.publish(bytes(99, 'a'));
  const auto update = worker.receive(kLong);
  REQUIRE_FALSE(update.ok());
  CHECK(update.error().code == "layout-mismatch");
  CHECK(update.error().text == "w: shape [99] published, [100] here");
  CHECK(memory == std::vector<std::uint8_t>(100, 'x'));
}

TEST_CASE("what cannot work is said when connecting") {
  std::uint8_t byte = 0;
  const auto code = [](const std::string& address, const Options& options) {
    const auto worker = Worker::connect(address, options);
    return worker ? "" : worker.error().code;
  };
  Options good;
  good.snapshots("m");
  CHECK(code("localhost:5555", good) == "address");
  CHECK(code("tcp://localhost", good) == "address");
  CHECK(code("tcp://localhost:0", good) == "address");
  CHECK(code("ipc://", good) == "address");
  CHECK(code("tcp://localhost:1", Options{}) == "model");
  CHECK(code("tcp://localhost:1", Options(good).snapshots("m")) == "model");
  CHECK(code("tcp://localhost:1", Options(good).snapshots("a/b")) == "model");
  Options named = good;
  named.name = "a b";
  CHECK(code("tcp://localhost:1", named) == "name");
  Options wrong = good;
  wrong.in_place("n", {Tensor{"w", Dtype::kF32, {2}, &byte, 1}});
  CHECK(code("tcp://localhost:1", wrong) == "tensor");
  Options twice = good;
  twice.in_place("n", {tensor("w", &byte, {}), tensor("w", &byte, {})});
  CHECK(code("tcp://localhost:1", twice) == "tensor");
}

TEST_CASE("tied tensors may be registered under any of their names") {
  const std::string json =
      R"({"__metadata__":{"tied":"w"},"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})";
  std::string header;
  append_little_endian(header, json.size(), 8);
  const auto layout = Layout::parse(header + json);
  REQUIRE(layout.ok());
  std::uint8_t memory[2] = {};
  for (const std::vector<std::string>& names :
       {std::vector<std::string>{"w"}, {"tied"}, {"w", "tied"}}) {
    std::vector<Tensor> tensors;
    for (const std::string& name : names) tensors.push_back(tensor(name, memory, {2}));
    auto target = Target::of(tensors);
    REQUIRE(target.ok());
    CHECK(target->difference(**layout).empty());
    CHECK(target->nbytes() == 2);
    target->copy(*layout, std::string(2, static_cast<char>('0' + names.size())));
    CHECK(memory[1] == '0' + names.size());
  }
  CHECK(Target::of({})->difference(**layout) == "w: published as U8 [2], not registered here");
}
