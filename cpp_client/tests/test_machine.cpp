// What a worker does with what it hears, without a network or a clock.
#include <doctest/doctest.h>

#include <queue>
#include <random>

#include "../driver/player.hpp"
#include "publisher.hpp"

using namespace weightbus;

namespace {

Published bytes(std::size_t size, char value, std::uint64_t chunk_bytes = 4) {
  return {layout_of_bytes(size), std::string(size, value), chunk_bytes, "auto", "applied"};
}

Published together(std::size_t size, char value) {
  Published published = bytes(size, value);
  published.commit = "together";
  published.acknowledge = "staged";
  return published;
}

// A worker and a publisher, connected.
struct Pair {
  explicit Pair(Player::Setting setting = {}, std::uint64_t epoch = 7)
      : publisher(epoch), player(std::move(setting)) {
    player.control(frames_of(publisher.welcome()));
    talk();
  }

  // Carries what the worker says to the publisher, and back, until nobody says anything.
  void talk() {
    while (!player.sent.empty()) {
      const std::vector<FromWorker> said = std::move(player.sent);
      player.sent.clear();
      for (const FromWorker& one : said) {
        heard.push_back(one);
        for (const Message& message : publisher.answer(one)) player.control(frames_of(message));
      }
    }
  }

  void push(std::uint64_t number) {
    for (const Message& message : publisher.push(number)) player.data(frames_of(message));
  }

  void wait(double seconds) {
    const double until = player.now + seconds;
    while (player.now < until) {
      player.wait(0.1);
      talk();
    }
  }

  template <class T>
  std::vector<T> all() const {
    std::vector<T> found;
    for (const FromWorker& one : heard) {
      if (const T* message = std::get_if<T>(&one)) found.push_back(*message);
    }
    return found;
  }

  TinyPublisher publisher;
  Player player;
  std::vector<FromWorker> heard;
};

}  // namespace

TEST_CASE("what is pushed runs, and is reported with its digest") {
  Pair pair;
  pair.push(pair.publisher.publish(bytes(10, 'a')));
  CHECK(pair.player.runs["m"] == 1);
  CHECK(pair.player.bytes["m"] == std::string(10, 'a'));
  pair.talk();
  CHECK(pair.publisher.applied() == 1);
  CHECK(pair.all<Fetch>().empty());
}

TEST_CASE("a small version travels with its announcement") {
  Pair pair;
  pair.push(pair.publisher.publish(bytes(10, 'a', 1024)));
  pair.player.data(frames_of(pair.publisher.whole(pair.publisher.publish(bytes(10, 'b', 1024)))));
  CHECK(pair.player.runs["m"] == 2);
  pair.talk();
  CHECK(pair.publisher.applied() == 2);
}

TEST_CASE("a small version whose layout is not known is fetched after all") {
  Pair pair;
  pair.player.data(frames_of(pair.publisher.whole(pair.publisher.publish(bytes(10, 'b', 1024)))));
  CHECK(pair.player.runs["m"] == 0);
  pair.talk();
  CHECK(pair.publisher.applied() == 1);
}

TEST_CASE("nothing but fetches: what is only announced is fetched within the window") {
  Pair pair;
  const auto number = pair.publisher.publish(bytes(400, 'a'));
  pair.player.control(frames_of(pair.publisher.announce(number, true)));
  pair.talk();
  CHECK(pair.publisher.applied() == 1);
  for (const Fetch& fetch : pair.all<Fetch>()) CHECK(fetch.count <= kWindowChunks);
}

TEST_CASE("a hole below the highest pushed chunk is fetched at once") {
  Pair pair;
  const auto number = pair.publisher.publish(bytes(24, 'a'));
  pair.player.data(frames_of(pair.publisher.announce(number, true)));
  pair.player.data(frames_of(pair.publisher.chunk(number, 0)));
  pair.player.data(frames_of(pair.publisher.chunk(number, 3)));
  REQUIRE(pair.player.sent.size() == 2);  // (the first is the ping that answers what is published)
  const auto& fetch = std::get<Fetch>(pair.player.sent[1]);
  CHECK(fetch.first == 1);
  CHECK(fetch.count == 2);
}

TEST_CASE("a damaged chunk does not count, and is asked for again") {
  Pair pair;
  const auto number = pair.publisher.publish(bytes(8, 'a'));
  Message damaged = pair.publisher.chunk(number, 0);
  damaged[1][2] ^= 1;
  pair.player.data(frames_of(pair.publisher.announce(number, true)));
  pair.player.data(frames_of(damaged));
  pair.player.data(frames_of(pair.publisher.chunk(number, 1)));
  pair.player.data(frames_of(pair.publisher.end(number)));
  CHECK(pair.player.runs["m"] == 0);
  pair.talk();
  CHECK(pair.publisher.applied() == 1);
}

TEST_CASE("a digest that never matches is given up after three times, and said") {
  Pair pair;
  Published wrong = bytes(8, 'a');
  const auto number = pair.publisher.publish(wrong);
  const Message end{encode(End{{"m", 7, number}, std::string(64, '0')})};
  for (int round = 0; round < 3; ++round) {
    for (Message& message : pair.publisher.push(number)) {
      if (message.size() > 1) pair.player.data(frames_of(message));
    }
    pair.player.control(frames_of(end));
    pair.player.wait(0.1);
  }
  bool failed = false;
  for (const FromWorker& one : pair.player.sent) {
    if (const auto* said = std::get_if<Failed>(&one)) failed = said->code == "digest-mismatch";
  }
  CHECK(failed);
  CHECK(pair.player.runs["m"] == 0);
}

TEST_CASE("a worker that was overtaken finishes the next version before it looks at newer ones") {
  Pair pair;
  pair.player.data(frames_of(pair.publisher.announce(pair.publisher.publish(bytes(8, 'a')), true)));
  const auto second = pair.publisher.publish(bytes(8, 'b'));
  pair.player.data(frames_of(pair.publisher.announce(second, true)));
  const auto third = pair.publisher.publish(bytes(8, 'c'));
  pair.player.data(frames_of(pair.publisher.announce(third, true)));
  bool unsubscribed = false;
  for (const Effect& effect : pair.player.others) {
    if (const auto* subscribe = std::get_if<Subscribe>(&effect)) {
      if (subscribe->topic == "m/dat") unsubscribed = !subscribe->on;
    }
  }
  CHECK(unsubscribed);
  for (std::uint64_t i = 0; i < 2; ++i) {
    pair.player.control(frames_of(pair.publisher.chunk(second, i)));
  }
  pair.player.control(frames_of(pair.publisher.end(second)));
  CHECK(pair.player.runs["m"] == second);
  pair.talk();
  pair.wait(1);
  CHECK(pair.player.runs["m"] == third);
}

TEST_CASE("together: nothing runs before the commit, and an abort drops it") {
  Pair pair;
  const auto first = pair.publisher.publish(together(8, 'a'));
  pair.push(first);
  CHECK(pair.player.runs["m"] == 0);
  pair.talk();
  REQUIRE(pair.all<Staged>().size() == 1);
  CHECK(pair.all<Staged>()[0].digest == pair.publisher.version(first).digest());

  SUBCASE("committed") {
    const Message commit = pair.publisher.commit(first);
    Message other{encode(Commit{{"m", 7, first}, std::string(64, '1')})};
    pair.player.control(frames_of(other));
    CHECK(pair.player.runs["m"] == 0);
    pair.player.control(frames_of(commit));
    CHECK(pair.player.runs["m"] == first);
    pair.player.control(frames_of(pair.publisher.abort(first)));
    CHECK(pair.player.runs["m"] == first);
  }
  SUBCASE("announced as auto") {
    pair.publisher.commit(first);
    pair.player.control(frames_of(pair.publisher.announce(first, false)));
    CHECK(pair.player.runs["m"] == first);
  }
  SUBCASE("aborted") {
    pair.player.control(frames_of(pair.publisher.abort(first)));
    pair.player.control(frames_of(pair.publisher.commit(first)));
    CHECK(pair.player.runs["m"] == 0);
  }
  SUBCASE("another epoch") {
    TinyPublisher later(8);
    pair.player.control(frames_of(later.welcome()));
    pair.player.control({encode(Commit{{"m", 8, first}, pair.publisher.version(first).digest()})});
    CHECK(pair.player.runs["m"] == 0);
  }
}

TEST_CASE("an older publisher is not followed, a newer one is") {
  Pair pair;
  pair.push(pair.publisher.publish(bytes(8, 'a')));
  REQUIRE(pair.player.runs["m"] == 1);
  pair.player.control({encode(Refuse{"unknown-worker", "who?", {}, 0, 0})});
  CHECK_FALSE(pair.player.machine().inside());
  pair.player.control(frames_of(TinyPublisher(6).welcome()));
  CHECK_FALSE(pair.player.machine().inside());
  bool told = false;
  for (const Effect& effect : pair.player.others) {
    if (const auto* refused = std::get_if<Refused>(&effect)) told = refused->code == "stale-epoch";
  }
  CHECK(told);
  pair.player.control(frames_of(TinyPublisher(8).welcome()));
  CHECK(pair.player.machine().inside());
  CHECK(pair.player.machine().epoch() == 8);
}

TEST_CASE("a silent publisher is lost; what runs stays, and hello is said again") {
  Pair pair;
  pair.push(pair.publisher.publish(bytes(8, 'a')));
  pair.player.sent.clear();
  pair.player.wait(5.5);
  CHECK_FALSE(pair.player.machine().inside());
  CHECK(pair.player.runs["m"] == 1);
  REQUIRE(std::holds_alternative<Hello>(pair.player.sent.back()));
  CHECK(std::get<Hello>(pair.player.sent.back()).models.at("m")->version == 1);
  const std::vector<Effect>& others = pair.player.others;
  REQUIRE(others.size() >= 2);
  REQUIRE(std::holds_alternative<Notice>(others[others.size() - 2]));
  CHECK(std::get<Notice>(others[others.size() - 2]).code == "lost");
  CHECK(std::holds_alternative<Redial>(others.back()));
}

TEST_CASE("whoever gets no answer calls again on new connections") {
  Player player({});
  WorkerMachine& machine = player.machine();
  CHECK_MESSAGE(machine.tick(200).empty(), "nobody was there to say hello to");
  machine.connected(200);
  CHECK(machine.tick(204.9).empty());
  const Effects effects = machine.tick(205);
  REQUIRE(effects.size() == 1);
  CHECK(std::holds_alternative<Redial>(effects[0]));
  CHECK_MESSAGE(machine.tick(211).empty(), "the new connection is not there yet");
  machine.connected(212);
  player.control({encode(Refuse{"name-taken", "why", {}, 0, 0})});
  CHECK_MESSAGE(machine.tick(217).empty(), "it is refused, which is an answer");
}

TEST_CASE("a connection that was given up is made anew though no hello could be said") {
  Player player({});
  WorkerMachine& machine = player.machine();
  CHECK_MESSAGE(machine.tick(200).empty(), "a name is being looked up");
  machine.changed(200);
  machine.changed(203);
  CHECK_MESSAGE(machine.tick(207.9).empty(), "ZeroMQ is trying");
  CHECK(machine.tick(208).size() == 1);
  CHECK_MESSAGE(machine.tick(300).empty(), "the new connection has not been tried yet");
  machine.changed(300);
  const Effects effects = machine.tick(305);
  REQUIRE(effects.size() == 1);
  CHECK(std::holds_alternative<Redial>(effects[0]));
}

TEST_CASE("a control connection that broke ends the session if nothing comes of it") {
  Pair pair;
  pair.player.machine().changed(pair.player.now);
  for (int i = 0; i < 5; ++i) {
    CHECK(pair.player.machine().inside());
    pair.player.wait(1.05);
    pair.player.data(frames_of(pair.publisher.beacon()));
  }
  CHECK_FALSE(pair.player.machine().inside());
  CHECK(std::holds_alternative<Redial>(pair.player.others.back()));
}

TEST_CASE("limits are checked before anything is allocated") {
  Player::Setting setting;
  setting.bytes_max = 100;
  setting.accepts = [](const std::string&, const Layout& layout) {
    return layout.nbytes() == 50 ? std::string("w: does not fit") : "";
  };
  Pair pair(std::move(setting));
  const auto expect_failure = [&](const std::string& code) {
    CHECK(pair.player.runs["m"] == 0);
    pair.talk();
    REQUIRE_FALSE(pair.all<Failed>().empty());
    CHECK(pair.all<Failed>().front().code == code);
  };
  SUBCASE("too large") {
    pair.push(pair.publisher.publish(bytes(101, 'a')));
    expect_failure("too-large");
  }
  SUBCASE("another layout") {
    pair.push(pair.publisher.publish(bytes(50, 'a')));
    expect_failure("layout-mismatch");
  }
  SUBCASE("an encoding that is not known") {
    Announce announce = pair.publisher.announcement(pair.publisher.publish(bytes(8, 'a')));
    announce.encoding = "zstd";
    pair.player.data({encode(announce)});
    expect_failure("unsupported");
  }
  SUBCASE("a layout that is not what was announced") {
    Message message = pair.publisher.announce(pair.publisher.publish(bytes(8, 'a')), true);
    message[1][20] = 'x';
    pair.player.data(frames_of(message));
    expect_failure("layout-invalid");
  }
}

TEST_CASE("with both buffers in use, the newest version waits for one") {
  Player::Setting setting;
  setting.apply = false;
  Pair pair(std::move(setting));
  for (char value : {'a', 'b', 'c'}) pair.push(pair.publisher.publish(bytes(8, value)));
  CHECK(pair.player.ready.size() == 2);
  const StagedPtr first = std::exchange(pair.player.ready[0], nullptr);
  pair.player.perform(pair.player.machine().dropped("m", first->key, pair.player.now));
  pair.wait(1);
  REQUIRE(pair.player.ready.size() == 3);
  CHECK(pair.player.ready[2]->key.second == 3);
}

TEST_CASE("a beacon is heeded even if what was to be caught up with is gone") {
  Player::Setting setting;
  setting.apply = false;
  Pair pair(std::move(setting));
  for (char value : {'a', 'b'}) pair.push(pair.publisher.publish(bytes(8, value)));
  for (char value : {'c', 'd'}) {  // no buffer is free: they wait
    const auto number = pair.publisher.publish(bytes(8, value));
    pair.player.data(frames_of(pair.publisher.announce(number, true)));
  }
  pair.player.control(frames_of(pair.publisher.abort(4)));
  for (const StagedPtr& staged : std::exchange(pair.player.ready, {})) {
    pair.player.apply(*staged);
  }
  pair.wait(2);
  REQUIRE_FALSE(pair.player.ready.empty());
  CHECK(pair.player.ready.back()->key.second == 4);
}

TEST_CASE("a version that could not be applied is not tried again") {
  Player::Setting setting;
  setting.apply = false;
  Pair pair(std::move(setting));
  pair.push(pair.publisher.publish(bytes(8, 'a')));
  REQUIRE(pair.player.ready.size() == 1);
  pair.player.perform(pair.player.machine().failed("m", {7, 1}, "no", pair.player.now));
  pair.wait(3);
  CHECK(pair.player.ready.size() == 1);
  CHECK(pair.all<Failed>().back().code == "apply");
}

// The shared road, with memory that tests can put anything into.

namespace {

struct FakeMemory : SharedMemory {
  std::string bytes;
  std::uint64_t version = 0;
  bool torn = false;

  Bytes data() const override { return bytes; }
  bool begin(const Stamp& stamp) override { return stamp.version == version; }
  bool end(const Stamp& stamp) override { return stamp.version == version && !torn; }
};

}  // namespace

TEST_CASE("on the shared road a version is read from the segment, or fetched where it is stale") {
  auto memory = std::make_shared<FakeMemory>();
  Player::Setting setting;
  setting.opens = [memory](const Shared&, std::uint64_t nbytes) -> SharedMemoryPtr {
    return nbytes == 0 ? std::make_shared<FakeMemory>() : memory;
  };
  Player player(std::move(setting));
  TinyPublisher publisher(7);
  const Shared shared{"/proc/1/fd/1", std::string(32, 'a')};
  Welcome welcome;
  welcome.epoch = 7;
  welcome.data = "tcp://*:9";
  welcome.ping_ms = 1000;
  welcome.lost_ms = 5000;
  welcome.shared = shared;
  player.control({encode(welcome)});
  CHECK(player.machine().shared());
  CHECK(std::get<Ping>(player.sent.at(0)).shared);

  const auto announced = [&](std::uint64_t number, bool hash) {
    Announce announce = publisher.announcement(number);
    announce.shared = shared;
    announce.hash = hash;
    player.data({encode(announce), Bytes(publisher.version(number).layout)});
  };
  const auto first = publisher.publish(bytes(8, 'a'));
  memory->bytes = std::string(8, 'a');
  memory->version = first;
  SUBCASE("in time") {
    announced(first, false);
    CHECK(player.bytes["m"] == std::string(8, 'a'));
    CHECK(std::get<Applied>(player.sent.back()).digest.empty());
  }
  SUBCASE("in time, and hashed") {
    announced(first, true);
    CHECK(std::get<Applied>(player.sent.back()).digest == publisher.version(first).digest());
  }
  SUBCASE("too late") {
    memory->version = first + 1;
    announced(first, false);
    CHECK(player.runs["m"] == 0);
    CHECK(std::get<Fetch>(player.sent.back()).version == 0);
    player.sent.clear();
    announced(first, false);  // offered again: now over the network
    REQUIRE_FALSE(player.sent.empty());
    CHECK(std::get<Fetch>(player.sent.back()).version == first);
  }
  SUBCASE("overwritten while it was read") {
    memory->torn = true;
    announced(first, false);
    CHECK(player.runs["m"] == 0);
    CHECK_FALSE(std::get<Failed>(player.sent.back()).intact);  // W24
    player.sent.clear();
    announced(first, false);  // offered again: now over the network
    CHECK(std::get<Fetch>(player.sent.back()).version == first);
  }
}

// A network that loses, repeats, delays and damages, from one seed.

namespace {

struct Network {
  explicit Network(unsigned seed) : random(seed) {
    const double losses[] = {0.0, 0.1, 0.4};
    loss = losses[seed % 3];
  }

  bool chance(double probability) {
    return std::uniform_real_distribution<>(0, 1)(random) < probability;
  }

  std::mt19937 random;
  double loss;
};

// Publishes a few versions; returns how many seconds it took until the worker ran the last.
double run(unsigned seed) {
  Network network(seed);
  TinyPublisher publisher(7);
  Player player({});
  std::multimap<double, std::pair<bool, Message>> in_flight;  // by arrival; pushed or not
  const auto carry = [&](const Message& message, bool pushed) {
    for (int copies = network.chance(0.05) ? 2 : 1; copies > 0; --copies) {
      if (network.chance(network.loss)) continue;
      Message sent = message;
      if (network.chance(0.02)) sent.back()[network.random() % sent.back().size()] ^= 4;
      const double delay = pushed ? 0.01 : std::exponential_distribution<>(20)(network.random);
      in_flight.emplace(player.now + delay, std::pair(pushed, sent));
    }
  };
  const double begin = player.now;
  double next_version = begin + 0.3;
  const int last = 4 + static_cast<int>(seed % 3);
  while (player.runs["m"] != static_cast<std::uint64_t>(last)) {
    REQUIRE_MESSAGE(player.now - begin < 600, "seed ", seed);
    if (publisher.newest() < static_cast<std::uint64_t>(last) && player.now >= next_version) {
      const std::size_t size = 1 + network.random() % 300;
      const auto number = publisher.publish(bytes(size, static_cast<char>('a' + seed % 26)));
      for (const Message& message : publisher.push(number, network.chance(0.5)))
        carry(message, true);
      next_version = player.now + std::exponential_distribution<>(2)(network.random);
    }
    player.wait(0.05);
    if (network.chance(0.05)) carry(publisher.beacon(), true);
    while (!in_flight.empty() && in_flight.begin()->first <= player.now) {
      const auto [pushed, message] = in_flight.extract(in_flight.begin()).mapped();
      pushed ? player.data(frames_of(message)) : player.control(frames_of(message));
    }
    for (const FromWorker& said : std::exchange(player.sent, {})) {
      if (network.chance(network.loss)) continue;
      for (const Message& message : publisher.answer(said)) carry(message, false);
    }
  }
  CHECK(player.bytes["m"] == publisher.version(static_cast<std::uint64_t>(last)).data);
  CHECK(publisher.wrong_digests() == 0);
  return player.now - begin;
}

}  // namespace

TEST_CASE("every seed ends with the newest version, byte for byte") {
  for (unsigned seed = 0; seed < 300; ++seed) {
    INFO("seed ", seed);
    CHECK(run(seed) == run(seed));  // the same seed, the same run
  }
}
