// Tests the C++ layer with a real publisher: ../c_client/tests/serve.py runs this program, and
// publishes what its standard output requests. Each case has models and workers of its own.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <complex>
#include <filesystem>
#include <iostream>
#include <weightbus/publisher.hpp>

using namespace weightbus;
using namespace std::chrono_literals;

namespace {

constexpr auto kLong = 60s;  // until something must have happened, on a busy machine

std::string address;
bool network = false;  // without shared memory

int ask(const std::string& what) {
  std::cout << what << std::endl;
  std::string answer;
  std::getline(std::cin, answer);
  return std::atoi(answer.c_str());
}

// Publishes two tensors of which every byte is the same: "w", and "b", which is a scalar.
void publish(const std::string& model, const std::string& shape, int byte) {
  ask("publish " + model + " " + shape + " " + std::to_string(byte));
}

// Memory for what is published.
struct Line {
  explicit Line(Shape shape) : w(elements(shape)), shape_(std::move(shape)) {}

  static std::size_t elements(const Shape& shape) {
    std::size_t count = 1;
    for (const std::uint64_t size : shape) count *= size;
    return count;
  }

  // "head" is "w", and nobody publishes it.
  std::vector<Tensor> tensors() {
    return {tensor("w", w, shape_), tensor("b", &b, {}), tensor("head", w, shape_)};
  }

  bool is(int byte) const {
    const auto same = [byte](const float& one) {
      std::array<unsigned char, 4> bytes{};
      std::memcpy(bytes.data(), &one, 4);
      return bytes == std::array<unsigned char, 4>{bytes[0], bytes[0], bytes[0], bytes[0]} &&
             bytes[0] == byte;
    };
    for (const float& one : w) {
      if (!same(one)) return false;
    }
    return same(b);
  }

  std::vector<float> w;
  float b = 0;

 private:
  Shape shape_;
};

Options options_of(const std::string& name) {
  Options options;
  options.name = name;
  options.shared_memory = !network;
  return options;
}

Worker connected(const Options& options) {
  auto worker = Worker::connect(address, options);
  REQUIRE_MESSAGE(worker.ok(), (worker ? "" : worker.error().text));
  return std::move(*worker);
}

Update next(Worker& worker) {
  auto update = worker.receive(kLong);
  REQUIRE_MESSAGE(update.ok(), (update ? "" : update.error().text));
  REQUIRE(update->has_value());
  return **update;
}

bool readable(int descriptor, int milliseconds) {
  pollfd item{descriptor, POLLIN, 0};
  return poll(&item, 1, milliseconds) == 1;
}

}  // namespace

TEST_CASE("a large version changes places with memory of the library's") {
  auto memory =
      Resident::of({tensor<float>("w", nullptr, {1024, 1024}), tensor<float>("b", nullptr, {})});
  REQUIRE_MESSAGE(memory.ok(), (memory ? "" : memory.error().text));
  const auto tensors = memory->tensors();
  CHECK(tensors[0].bytes == 4 << 20);
  {
    Worker worker = connected(options_of("large").in_place("large", *memory));
    for (int byte : {1, 2, 3}) {
      publish("large", "1024x1024", byte);
      next(worker);
      const auto* begin = static_cast<const unsigned char*>(tensors[0].data);
      CHECK(std::all_of(begin, begin + tensors[0].bytes, [=](int one) { return one == byte; }));
      CHECK(*static_cast<const unsigned char*>(tensors[1].data) == byte);
    }
  }
  CHECK(*static_cast<const unsigned char*>(tensors[1].data) == 3);  // the memory is still there
  CHECK(Resident::of({tensor<float>("w", nullptr, {1}), tensor<float>("w", nullptr, {1})})
            .error()
            .text.find("two tensors") != std::string::npos);
  const Resident kept = std::move(*memory);
  const auto refused = Worker::connect(address, options_of("large").in_place("large", *memory));
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == "invalid");
  CHECK(refused.error().text.find("moved from") != std::string::npos);
}

TEST_CASE("the next address is tried if nothing listens at the first one") {
  const std::string nowhere = "tcp://127.0.0.1:1";
  auto worker =
      Worker::connect({nowhere, address}, options_of("falling-back").snapshots("fallback"));
  REQUIRE_MESSAGE(worker.ok(), (worker ? "" : worker.error().text));
  REQUIRE(worker->wait_joined(kLong).ok());
  CHECK(worker->address() == address);
  publish("fallback", "4x3", 1);
  CHECK(next(*worker).version == 1);

  const std::vector<std::string> twice = {address, address};
  const auto refused = Worker::connect(twice, options_of("twice").snapshots("fallback"));
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().text.find("given twice") != std::string::npos);
}

TEST_CASE("versions are applied in place, where receive is called") {
  Line line({4, 3});
  Worker worker = connected(options_of("in-place").in_place("place", line.tensors()));
  CHECK(worker.name() == "in-place");
  const auto epoch = worker.wait_joined(kLong);
  REQUIRE(epoch.ok());
  CHECK(ask("client in-place weightbus-cpp") == 1);
  CHECK_FALSE(worker.running("place"));
  CHECK(worker.reading("place")->version == Version(0, 0));
  for (int byte : {1, 2, 3}) {
    publish("place", "4x3", byte);
    const Update update = next(worker);
    CHECK(update.model == "place");
    CHECK(Version(update.epoch, update.version) == Version(*epoch, byte));
    CHECK(update.nbytes == 52);
    CHECK(update.digest.size() == (network ? 64 : 0));
    CHECK(update.snapshot == nullptr);
    CHECK(line.is(byte));
    CHECK(worker.running("place") == Version(*epoch, byte));
  }
  const State state = worker.state();
  CHECK(state.epoch == *epoch);
  CHECK(state.malformed == 0);
  CHECK(state.models.at("place").running == Version(*epoch, 3));
  CHECK_FALSE(state.models.at("place").torn);
  Worker moved = std::move(worker);
  moved.close();
  CHECK(moved.receive(1ms).error().code == "closed");
  CHECK(moved.wait_joined(1ms).ok());  // it was
}

TEST_CASE("a descriptor tells when receive would not wait") {
  Line line({5});
  Worker worker = connected(options_of("poll").in_place("poll", line.tensors()));
  CHECK_FALSE(readable(worker.fd(), 0));
  publish("poll", "5", 9);
  REQUIRE(readable(worker.fd(), 60'000));
  CHECK((*worker.receive(0s))->version == 1);
  CHECK(line.is(9));
  CHECK_FALSE(readable(worker.fd(), 0));
}

TEST_CASE("nobody writes while somebody reads") {
  Line line({100});
  Worker worker = connected(options_of("reads").in_place("reads", line.tensors()));
  publish("reads", "100", 1);
  next(worker);
  publish("reads", "100", 2);
  {
    const auto reading = worker.reading("reads");
    REQUIRE(readable(worker.fd(), 60'000));
    CHECK_FALSE(worker.receive(10ms)->has_value());
    CHECK(reading->version.second == 1);
    CHECK(line.is(1));
  }
  CHECK(next(worker).version == 2);
  CHECK(line.is(2));
  CHECK(worker.reading("nix").error().text.find("nix") != std::string::npos);
}

TEST_CASE("nothing in time is no error, and close wakes whoever waits") {
  Line line({4});
  auto worker =
      Worker::connect("tcp://127.0.0.1:9", options_of("alone").in_place("m", line.tensors()));
  REQUIRE(worker.ok());
  const auto nothing = worker->receive(20ms);
  REQUIRE(nothing.ok());
  CHECK_FALSE(nothing->has_value());
  CHECK(worker->wait_joined(1ms).error().code == "timeout");
  CHECK(worker->state().epoch == 0);
  CHECK_FALSE(worker->wait_for_version("m", 1, 1ms));
  std::thread closer([&] { worker->close(); });
  CHECK(worker->receive(kLong).error().code == "closed");
  closer.join();
}

TEST_CASE("a snapshot stays what it is while newer ones come") {
  Worker worker = connected(options_of("snapshots").snapshots("free"));
  CHECK(worker.snapshot("free") == nullptr);
  std::vector<std::shared_ptr<const Snapshot>> kept;
  for (int byte = 1; byte <= 5; ++byte) {
    publish("free", std::to_string(byte) + "x2", byte);
    kept.push_back(next(worker).snapshot);
    CHECK(worker.snapshot("free")->version == kept.back()->version);
  }
  worker.close();
  for (std::size_t i = 0; i < kept.size(); ++i) {
    REQUIRE(kept[i]);
    CHECK(kept[i]->model == "free");
    CHECK(kept[i]->version == i + 1);
    const auto w = kept[i]->as<float>("w");
    REQUIRE(w.ok());
    CHECK(w->size() == 2 * (i + 1));
    CHECK(reinterpret_cast<const unsigned char&>((*w)[w->size() - 1]) == i + 1);
    CHECK(kept[i]->find("w")->shape()[0] == i + 1);
  }
  const Snapshot& last = *kept.back();
  CHECK(last.tensors().size() == 2);
  CHECK(last.find("b")->bytes().size() == 4);
  CHECK(last.find("b")->shape().empty());
  CHECK(last.as<double>("w").error().text == "tensor 'w' is F32, not F64");
  CHECK(last.find("v").error().code == "not-found");
  CHECK(last.as<float>("v").error().text.find("w") !=
        std::string::npos);  // it says which there are
}

TEST_CASE("elements that are not aligned are not handed out as such") {
  alignas(8) const char bytes[9] = {};
  const auto at = [&](const char* data) {
    return TensorView({"w", 1, "F64", nullptr, 0, const_cast<char*>(data), 8});
  };
  CHECK(at(bytes).as<double>().ok());
  CHECK(at(bytes + 1).as<double>().error().text.find("aligned") != std::string::npos);
}

TEST_CASE("in the background, readers never see half a version") {
  Line line({300, 1000});
  Worker worker = connected(options_of("background").in_place("back", line.tensors()));
  worker.start();
  CHECK(worker.receive(1ms).error().code == "invalid");
  std::atomic<bool> stop{false};
  std::atomic<int> torn{0}, reads{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      while (!stop) {
        const auto reading = worker.reading("back");
        torn += !line.is(static_cast<int>(reading->version.second));
        ++reads;
      }
    });
  }
  for (int byte = 1; byte <= 8; ++byte) {
    publish("back", "300x1000", byte);
    if (byte % 4 == 0)
      CHECK(worker.wait_for_version("back", static_cast<std::uint64_t>(byte), kLong));
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(torn == 0);
  CHECK(reads > 0);
}

TEST_CASE("in the background, close waits for no reader") {
  Line line({4});
  Worker worker = connected(options_of("patient").in_place("patient", line.tensors()));
  publish("patient", "4", 1);
  next(worker);
  const auto reading = worker.reading("patient");
  worker.start();
  publish("patient", "4", 2);
  const auto ready = [&] { return worker.state().models.at("patient").ready; };
  const auto end = std::chrono::steady_clock::now() + kLong;
  while (!ready() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  CHECK(ready()->second == 2);
  worker.close();
  CHECK(std::chrono::steady_clock::now() < end);
  CHECK(line.is(1));
}

TEST_CASE("in the background, a function that decides may close the worker") {
  Line line({4});
  std::optional<Worker> worker;
  Options options = options_of("closes").in_place("closes", line.tensors());
  options.apply = [&](const Offer&) -> std::optional<std::string> {
    worker->close();
    return {};
  };
  worker = connected(options);
  worker->start();
  publish("closes", "4", 1);
  CHECK(worker->wait_for_version("closes", 1, kLong));
  worker.reset();
  CHECK(line.is(1));
}

TEST_CASE("a version that does not fit is told by name, and nothing changes") {
  Line line({4});
  std::vector<std::string> kinds;
  Options options = options_of("misfit").in_place("misfit", line.tensors());
  options.on_event = [&](const Event& event) { kinds.push_back(event.kind + " " + event.code); };
  {
    Worker worker = connected(options);
    publish("misfit", "4", 1);
    next(worker);
    publish("misfit", "5", 2);
    const auto update = worker.receive(kLong);
    REQUIRE_FALSE(update.ok());
    CHECK(update.error().code == "layout-mismatch");
    CHECK(update.error().text.find("w: shape [5] published, [4] here") != std::string::npos);
    CHECK(line.is(1));
    CHECK(worker.running("misfit")->second == 1);
  }
  CHECK(kinds == std::vector<std::string>{"joined ", "rejected layout-mismatch"});
}

TEST_CASE("a function of the user's decides whether a snapshot runs") {
  Options options = options_of("decides").snapshots("decided");
  std::vector<float> seen;
  options.apply = [&](const Offer& offer) -> std::optional<std::string> {
    seen.push_back((*offer.snapshot->as<float>("w"))[0]);
    if (offer.version == 2) return "not this one";
    if (offer.version == 3) throw std::runtime_error("no room");
    if (offer.version == 4) throw 4;
    return {};
  };
  Worker worker = connected(options);
  publish("decided", "3", 1);
  CHECK(next(worker).version == 1);
  const char* why[] = {"not this one", "no room", "not a std::exception"};
  for (int version = 2; version <= 4; ++version) {
    publish("decided", "3", version);
    const auto update = worker.receive(kLong);
    REQUIRE_FALSE(update.ok());
    CHECK(update.error().code == "apply");
    CHECK(update.error().text.find(why[version - 2]) != std::string::npos);
    CHECK(worker.snapshot("decided")->version == 1);
    CHECK(worker.running("decided")->second == 1);
  }
  publish("decided", "3", 5);
  CHECK(next(worker).version == 5);
  CHECK(seen.size() == 5);
}

TEST_CASE("in place, a version is turned down before a byte changes, or nothing runs") {
  Line line({3});
  Options options = options_of("vetoes").in_place("vetoed", line.tensors());
  options.before_apply = [&](const Offer& offer) -> std::optional<std::string> {
    CHECK(offer.snapshot == nullptr);
    CHECK(offer.nbytes == 16);
    return offer.version == 2 ? std::optional<std::string>("not yet") : std::nullopt;
  };
  options.apply = [&](const Offer& offer) -> std::optional<std::string> {
    CHECK(line.is(static_cast<int>(offer.version)));  // it is there by now
    return offer.version == 3 ? std::optional<std::string>("too late") : std::nullopt;
  };
  Worker worker = connected(options);
  publish("vetoed", "3", 1);
  CHECK(next(worker).version == 1);
  publish("vetoed", "3", 2);
  CHECK(worker.receive(kLong).error().code == "apply");
  CHECK(worker.reading("vetoed")->version.second == 1);
  CHECK(line.is(1));
  publish("vetoed", "3", 3);
  CHECK(worker.receive(kLong).error().code == "apply");
  CHECK(worker.reading("vetoed").error().code == "torn");
  CHECK(worker.state().models.at("vetoed").torn);
  CHECK_FALSE(worker.running("vetoed"));
  publish("vetoed", "3", 4);
  Result<std::optional<Update>> mended = worker.receive(kLong);
  while (!mended) mended = worker.receive(kLong);  // the one before is tried again meanwhile
  REQUIRE(mended->has_value());
  CHECK((*mended)->version == 4);
  CHECK(worker.reading("vetoed")->version.second == 4);
}

TEST_CASE("who is refused is told why, and what an event handler throws stays with it") {
  Options options = options_of("twice").snapshots("free");
  Worker first = connected(options);
  REQUIRE(first.wait_joined(kLong).ok());
  std::atomic<int> heard{0};
  options.on_event = [&](const Event& event) {
    if (++heard == 1) throw std::runtime_error(event.kind);
    throw heard.load();
  };
  Worker second = connected(options);
  const auto joined = second.wait_joined(kLong);
  REQUIRE_FALSE(joined.ok());
  CHECK(joined.error().text.find("twice") != std::string::npos);
  const auto update = second.receive(kLong);  // it asks again, and is told again
  REQUIRE_FALSE(update.ok());
  CHECK(update.error().code == "name-taken");
  CHECK(heard >= 2);
}

TEST_CASE("a part of a model is taken, in another dtype") {
  double b = 0;
  Options options = options_of("part").in_place("part", {tensor("b", &b, {})});
  options.partial = options.cast = options.any_data_host = true;
  Worker worker = connected(options);
  publish("part", "4x3", 1);
  next(worker);
  CHECK(b == static_cast<double>(detail::float_of_bits(0x01010101)));
}

TEST_CASE("what cannot work is said when connecting") {
  float number = 0;
  const auto text = [](const std::string& to, const Options& options) {
    const auto worker = Worker::connect(to, options);
    return worker ? "" : worker.error().code + ": " + worker.error().text;
  };
  const auto begins = [&](const Options& options, const std::string& to = "tcp://localhost:1") {
    return text(to, options).find("invalid: ") == 0;
  };
  const Options good = options_of("").snapshots("m");
  CHECK(text("tcp://localhost:1", good).empty());
  for (const char* to : {"localhost:5555", "tcp://localhost", "tcp://localhost:0", "ipc://"})
    CHECK(begins(good, to));
  CHECK(begins(Options()));
  CHECK(begins(Options(good).snapshots("m")));
  CHECK(begins(Options(good).snapshots("a/b")));
  CHECK(begins(options_of("a b").snapshots("m")));
  using Limit = decltype(Options::apply_timeout);
  for (const auto timeout : {Limit(0), Limit(-1h), Limit(24h) + 1ms, Limit::max()}) {
    Options slow = good;
    slow.apply_timeout = timeout;
    slow.apply = [](const Offer&) { return std::nullopt; };
    CHECK(begins(slow));
  }
  const auto with = [&](std::vector<Tensor> tensors) {
    return Options(good).in_place("n", std::move(tensors));
  };
  CHECK(begins(with({Tensor{"w", "F32", {2}, &number, 4}})));
  CHECK(begins(with({Tensor{"w", "F33", {}, &number, 4}})));
  CHECK(begins(with({Tensor{"w", "F32", {}, nullptr, 4}})));
  CHECK(begins(with({tensor("w", &number, {}), tensor("w", &number, {})})));
  CHECK(text("tcp://localhost:1", with({tensor("w", &number, {7})}))
            .empty());  // a pointer: the word is taken
  std::vector<float> three(3);
  CHECK(text("tcp://localhost:1", with({tensor("w", three, {4})}))
            .find("n: tensor \"w\" has 12 bytes") != std::string::npos);
}

TEST_CASE("tensors are made of what has data and a size") {
  std::array<std::uint8_t, 6> bytes{};
  const Tensor of_array = tensor("w", bytes, {2, 3});
  CHECK(of_array.dtype == "U8");
  CHECK(of_array.data == bytes.data());
  CHECK(of_array.bytes == 6);
  std::complex<float> number;
  CHECK(tensor("c", &number, {}).dtype == "C64");
  CHECK(tensor("c", &number, {}).bytes == 8);
  CHECK(tensor("t", static_cast<Bool*>(nullptr), {0}).dtype == "BOOL");
  static_assert(!std::is_copy_constructible_v<Snapshot>);
  CHECK(tensor("h", static_cast<BFloat16*>(nullptr), {0}).dtype == "BF16");
#if __cplusplus >= 202002L
  std::vector<double> doubles(10);
  const Tensor of_span = tensor("d", std::span(doubles).subspan(4), {6});
  CHECK(of_span.dtype == "F64");
  CHECK(of_span.bytes == 48);
  const float three[] = {1, 2, 3};
  const std::span<const float> all = Span<const float>(three, 3);
  CHECK(all[2] == 3.0F);
#endif
}

TEST_CASE("small floats: values that are known") {
  const auto e4m3 = [](std::uint8_t bits) { return to_float(Float8E4M3{bits}); };
  const auto e5m2 = [](std::uint8_t bits) { return to_float(Float8E5M2{bits}); };
  const auto f16 = [](std::uint16_t bits) { return to_float(Float16{bits}); };
  const auto bf16 = [](std::uint16_t bits) { return to_float(BFloat16{bits}); };
  CHECK(bf16(0x3F80) == 1.0F);
  CHECK(bf16(0xC040) == -3.0F);
  CHECK(f16(0x3C00) == 1.0F);
  CHECK(f16(0x7BFF) == 65504.0F);
  CHECK(f16(0x8001) == -std::ldexp(1.0F, -24));
  CHECK(std::isinf(f16(0xFC00)));
  CHECK(std::isnan(f16(0x7E00)));
  CHECK(e4m3(0x7E) == 448.0F);  // the greatest: this one has no infinity
  CHECK(e4m3(0x38) == 1.0F);
  CHECK(e4m3(0x01) == std::ldexp(1.0F, -9));
  CHECK(std::isnan(e4m3(0x7F)));
  CHECK(std::isnan(e4m3(0xFF)));
  CHECK(e5m2(0x7B) == 57344.0F);
  CHECK(e5m2(0x01) == std::ldexp(1.0F, -16));
  CHECK(std::isinf(e5m2(0x7C)));
  CHECK(std::isnan(e5m2(0x7D)));
  for (int bits = 0; bits < 256; ++bits) {  // two bits of fraction are the upper half of ten
    const float small = e5m2(static_cast<std::uint8_t>(bits)),
                large = f16(static_cast<std::uint16_t>(bits << 8));
    CHECK((small == large || (std::isnan(small) && std::isnan(large))));
    CHECK(std::signbit(small) == (bits >= 128));
  }
  for (int bits = 1; bits < 0x7C00; ++bits) {
    REQUIRE(f16(static_cast<std::uint16_t>(bits)) > f16(static_cast<std::uint16_t>(bits - 1)));
  }
  const BFloat16 from[] = {{0x3F80}, {0x4000}};
  float to[2] = {};
  to_floats(Span<const BFloat16>(from, 2), to);
  CHECK(to[1] == 2.0F);
}

TEST_CASE("what runs has the words of its new name") {
  const auto folder = std::filesystem::temp_directory_path();
  PublisherOptions told;
  told.state = folder / "state";
  told.ping = 200ms;
  const std::string address = "ipc://" + (folder / "again").string();
  auto publisher = Publisher::bind(address, told);
  REQUIRE(publisher.ok());
  float w[6] = {};
  Options wanted;
  wanted.in_place("line", {tensor("w", w, {2, 3})});
  auto worker = Worker::connect(address, wanted);
  REQUIRE(worker.ok());
  REQUIRE(worker->wait_joined(kLong).ok());
  const auto runs = [&] { return worker->state().models.at("line"); };
  CHECK(runs().metadata.empty());
  for (const std::string step : {"for all", "for one, and so not kept"}) {
    PublishOptions options;
    options.wait = PublishOptions::Wait::nobody;
    options.metadata["step"] = step;
    if (step != "for all") options.workers = {worker->name()};
    REQUIRE(publisher->publish("line", {tensor("w", w, {2, 3})}, options).ok());
    REQUIRE(worker->receive(kLong).ok());
    CHECK(runs().metadata.at("step") == step);
  }
  const auto before = runs().running;
  publisher = Error{};  // it ends before the next begins
  publisher = Publisher::bind(address, told);
  REQUIRE(publisher.ok());
  const auto until = std::chrono::steady_clock::now() + kLong;
  while (runs().running == before && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(1ms);
  }
  CHECK(runs().running->first > before->first);
  CHECK(runs().metadata == std::map<std::string, std::string>{{"step", "for all"}});
}

TEST_CASE("a trainer publishes, and learns who runs what") {
  PublisherOptions told;
  std::atomic<int> joined{0};
  told.on_event = [&joined](const Event& event) { joined += event.kind == "joined"; };
  auto publisher = Publisher::bind("tcp://127.0.0.1:0", told);
  REQUIRE(publisher.ok());
  float w[6] = {1, 2, 3, 4, 5, 6};
  auto worker = Worker::connect(publisher->address(), Options().snapshots("line"));
  REQUIRE(worker.ok());
  std::thread taking([&worker] {
    const auto update = worker->receive(kLong);
    if (update.ok() && *update) {
      CHECK((*update)->snapshot->find("w")->as<float>()->data()[5] == 6);
      CHECK((*update)->metadata == std::map<std::string, std::string>{{"step", "12"}});
    }
  });
  PublishOptions options;
  options.expect = 1;
  options.timeout = kLong;
  options.metadata["step"] = "12";
  const auto receipt = publisher->publish("line", {tensor("w", w, {2, 3})}, options);
  taking.join();
  REQUIRE(receipt.ok());
  CHECK(receipt->achieved);
  CHECK(receipt->version == 1);
  CHECK(receipt->workers.at(worker->name()).outcome == "applied");
  CHECK(joined == 1);
  options.expect = 2;
  options.timeout = 50ms;
  const auto missing = publisher->publish("line", {tensor("w", w, {2, 3})}, options);
  REQUIRE(missing.ok());
  CHECK(!missing->achieved);
  const auto wrong = publisher->publish("no name", {});
  REQUIRE(!wrong.ok());
  CHECK(wrong.error().code == "invalid");
  const auto open = Publisher::bind("tcp://0.0.0.0:0");
  REQUIRE(!open.ok());
  CHECK(open.error().text.find("insecure") != std::string::npos);
}

TEST_CASE("a trainer sends what has changed, and learns in how many bytes") {
  PublisherOptions told;
  told.bases = 1;
  auto publisher = Publisher::bind("tcp://127.0.0.1:0", told);
  REQUIRE(publisher.ok());
  auto worker = Worker::connect(publisher->address(), Options().snapshots("large"));
  REQUIRE(worker.ok());
  REQUIRE(publisher->wait_for_workers("large", 1, kLong).ok());
  std::vector<float> w(1 << 17);
  PublishOptions options;
  options.expect = 1;
  options.timeout = kLong;
  options.encoding = PublishOptions::Encoding::delta;
  for (std::size_t at = 0; at < 3; ++at) {
    w[at] = 1;
    std::thread taking([&worker] { CHECK(worker->receive(kLong).ok()); });
    const auto receipt = publisher->publish("large", {tensor("w", w.data(), {w.size()})}, options);
    taking.join();
    REQUIRE(receipt.ok());
    const Outcome& its = receipt->workers.at(worker->name());
    CHECK(its.encoding == (at == 0 ? "raw" : "delta-1"));
    CHECK((its.nbytes < 1000) == (at > 0));
  }
}

TEST_CASE("a publisher that is replaced ends before its function of events does") {
  std::optional<Worker> worker;
  std::string at, held;
  const auto kept = [&] {  // goes with the first publisher's function
    return std::shared_ptr<int>(new int(0), [&](const int* heard) {
      worker.reset();  // it leaves, which a publisher that still ran would tell
      PublisherOptions again;
      again.data = "tcp://127.0.0.1:0";  // the port beside may be some connection's
      const auto next = Publisher::bind(at, again);
      held = next.ok() ? "" : next.error().text;
      delete heard;
    });
  };
  PublisherOptions told;
  told.on_event = [heard = kept()](const Event&) { ++*heard; };
  auto publisher = Publisher::bind("tcp://127.0.0.1:0", std::move(told));
  REQUIRE(publisher.ok());
  told.on_event = nullptr;
  held = "its function is there still";
  at = publisher->address();
  worker = std::move(*Worker::connect(at, Options().snapshots("line")));
  REQUIRE(worker->wait_joined(kLong).ok());
  *publisher = std::move(*Publisher::bind("tcp://127.0.0.1:0"));
  CHECK(held == "");
  worker = std::move(*Worker::connect(publisher->address(), Options().snapshots("line")));
  CHECK(worker->wait_joined(kLong).ok());
}

TEST_CASE("what has no time left is not waited for") {
  auto publisher = Publisher::bind("tcp://127.0.0.1:0");
  REQUIRE(publisher.ok());
  CHECK_FALSE(*publisher->wait_for_workers("line", 1, -1ms));
}

int main(int count, char** values) {
  address = values[count - 1];
  network = count > 2 && std::string(values[1]) == "network";
  return doctest::Context().run();
}
