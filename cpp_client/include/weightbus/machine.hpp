// The worker's behaviour, without sockets, threads or clocks.
//
//     outside ──hello, welcome──> inside ──silence, "unknown-worker", another epoch──> outside
//
// Inside, messages go to the slot of the model they speak of (slot.hpp). Outside, everything that
// was staged or runs stays as it is, and hello is said again and again: a publisher that restarts
// finds its workers coming back on their own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ages.hpp"
#include "effects.hpp"
#include "limits.hpp"
#include "messages.hpp"
#include "slot.hpp"
#include "transfer.hpp"

namespace weightbus {

// Who a worker is.
struct Identity {
  std::string name;      // one living worker per name and publisher
  std::string instance;  // 32 hex digits, drawn anew at each start
  std::string client, host;
  std::uint64_t pid = 0;
};

class WorkerMachine {
 public:
  // A model that the worker wants, and the bytes of its versions where that is known.
  using Models = std::map<std::string, std::uint64_t>;

  WorkerMachine(Identity identity, Models models, const Accepts& accepts, Opens opens,
                std::uint64_t bytes_max = kStagingBytesMax, Timing timing = {})
      : identity_(std::move(identity)),
        sizes_(std::move(models)),
        opens_(std::move(opens)),
        timing_(timing),
        ping_every_(timing.ping) {
    for (const auto& [model, nbytes] : sizes_) {
      slots_.try_emplace(model, model, accepts, opens_, bytes_max, timing);
    }
  }

  bool inside() const { return inside_; }
  bool shared() const { return shared_; }  // the publisher is on this host
  bool subscribed() const { return subscribed_; }
  std::uint64_t epoch() const { return epoch_; }
  std::uint64_t malformed() const { return malformed_; }  // messages that were dropped
  const std::map<std::string, Slot>& slots() const { return slots_; }

  // What arrives.

  // Takes a message of the control channel.
  Effects receive(const Frames& frames, double now) { return receive(frames, now, false); }

  // Takes a published message, its topic included.
  Effects receive_published(const Frames& frames, double now) {
    if (!inside_ || frames.empty()) return {};
    Effects effects;
    if (!std::exchange(subscribed_, true)) {  // the first one proves that the subscription is there
      effects.push_back(Send{Ping{0, true, shared_}});
    }
    append(effects, receive(Frames(frames.begin() + 1, frames.end()), now, true));
    return effects;
  }

  // Where the payload of a published message belongs, whose header is here. Null: nowhere; the
  // message is then to be received with an empty payload.
  LeasePtr place(Bytes header, std::size_t size) {
    const Result<FromPublisher> message = decode<FromPublisher>(header, 1);
    if (!message || !inside_) return nullptr;
    if (const auto* chunk = std::get_if<Chunk>(&*message)) {
      Slot* slot = chunk->epoch == epoch_ ? find(chunk->model) : nullptr;
      return slot != nullptr ? slot->place(*chunk, size) : nullptr;
    }
    const auto* announce = std::get_if<Announce>(&*message);
    if (announce == nullptr || announce->epoch != epoch_ || !find(announce->model)) return nullptr;
    if (size != (announce->whole ? announce->nbytes : announce->layout_bytes)) return nullptr;
    return lend_scratch(size);
  }

  // Joining.

  // Somebody is at the other end of the control channel: says hello, if it is time.
  Effects connected(double now) { return wants_hello(now) ? hello(now) : Effects{}; }

  // The control connection was made or broke, or an attempt at one began or failed.
  void changed(double now) { unanswered_since_ = now; }

  bool wants_hello(double now) const { return !inside_ && may_say_hello(now); }

  // Says goodbye, even from outside: the hello may have been heard, its answer not yet.
  Effects close() { return {Send{Bye{}}}; }

  // What the user does with versions that are ready.

  void taken(const std::string& model, Key key) { slots_.at(model).taken(key); }

  Effects applied(const std::string& model, Key key, double now, const std::string& digest) {
    Effects effects = slots_.at(model).applied(key, now, digest);
    if (inside_ && applied_epoch() > epoch_) append(effects, hello(now));
    return effects;  // (it came from a later publisher than the one we follow)
  }

  Effects stale(const std::string& model, Key key, double now) {
    return slots_.at(model).stale(key, now);
  }

  Effects failed(const std::string& model, Key key, const std::string& text, double now,
                 bool intact = true) {
    return slots_.at(model).failed(key, text, now, intact);
  }

  Effects dropped(const std::string& model, Key key, double now) {
    return slots_.at(model).dropped(key, now);
  }

  // Does what is due.
  Effects tick(double now) {
    if (silent(now)) return call_again();
    if (!inside_) return {};
    Effects effects;
    for (auto& [model, slot] : slots_) append(effects, slot.tick(now));
    if (now - pinged_at_ >= ping_every_) {
      pinged_at_ = now;
      effects.push_back(Send{Ping{0, subscribed_, shared_}});
      for (const auto& [model, slot] : slots_) slot.repeat(effects);
    }
    return effects;
  }

 private:
  Slot* find(const std::string& model) {
    const auto found = slots_.find(model);
    return found == slots_.end() ? nullptr : &found->second;
  }

  // A message, and how it came.
  struct Heard {
    const Frames& frames;
    double now;
    bool pushed;
  };

  Effects receive(const Frames& frames, double now, bool pushed) {
    const Result<FromPublisher> decoded = decode(frames);
    if (!decoded) {
      ++malformed_;
      return {};
    }
    if (!pushed) {
      answered_at_ = now;
      unanswered_since_.reset();
    }
    const Heard heard{frames, now, pushed};
    return std::visit([&](const auto& message) { return on(message, heard); }, *decoded);
  }

  Effects on(const Welcome& message, const Heard& heard) {
    return heard.pushed ? Effects{} : welcome(message, heard.now);
  }

  Effects on(const Ping& ping, const Heard&) { return {Send{Pong{ping.token, 0, {}}}}; }

  Effects on(const Refuse& message, const Heard& heard) {
    heard_at_ = heard.now;
    return refuse(message, heard.now);
  }

  Effects on(const Pong& pong, const Heard& heard) {
    Effects effects;
    return is_current(pong.epoch, heard.now, effects) ? hear_of(pong.models, heard.now) : effects;
  }

  Effects on(const Announce& announce, const Heard& heard) {
    Effects effects;
    Slot* slot = current(announce, heard, effects);
    if (slot == nullptr) return effects;
    const Bytes* payload = heard.frames.size() > 1 ? &heard.frames[1] : nullptr;
    if (announce.whole) return slot->announced_whole(announce, *payload, heard.now);
    return slot->announced(announce, payload, heard.now, heard.pushed);
  }

  Effects on(const Chunk& chunk, const Heard& heard) {
    Effects effects;
    Slot* slot = current(chunk, heard, effects);
    return slot ? slot->chunk(chunk, heard.frames[1], heard.now, heard.pushed) : effects;
  }

  Effects on(const End& end, const Heard& heard) {
    Effects effects;
    Slot* slot = current(end, heard, effects);
    return slot ? slot->end(end, heard.now) : effects;
  }

  Effects on(const Commit& commit, const Heard& heard) {
    Effects effects;
    Slot* slot = current(commit, heard, effects);
    return slot ? slot->committed(commit) : effects;
  }

  Effects on(const Abort& abort, const Heard& heard) {
    Effects effects;
    Slot* slot = current(abort, heard, effects);
    return slot ? slot->aborted(abort, heard.now) : effects;
  }

  Effects on(const Beacon& beacon, const Heard& heard) {
    Effects effects;
    Slot* slot = current(beacon, heard, effects);
    return slot ? slot->hear_of(beacon.epoch, beacon.version, heard.now) : effects;
  }

  // Whether a message of this epoch counts. If not, the publisher may have restarted, or our
  // welcome was damaged: only hello settles who is right.
  bool is_current(std::uint64_t epoch, double now, Effects& effects) {
    if (!inside_) return false;
    if (epoch == epoch_) {
      heard_at_ = now;
      return true;
    }
    if (may_say_hello(now)) append(effects, hello(now));
    return false;
  }

  // The slot of a message that counts; null if it does not.
  Slot* current(const OfVersion& of, const Heard& heard, Effects& effects) {
    return is_current(of.epoch, heard.now, effects) ? find(of.model) : nullptr;
  }

  Effects hear_of(const Versions& models, double now) {
    Effects effects;
    for (const auto& [model, version] : models) {
      if (Slot* slot = find(model)) append(effects, slot->hear_of(epoch_, version, now));
    }
    return effects;
  }

  Effects refuse(const Refuse& refuse, double now) {
    const std::string& code = refuse.code;
    if (code == "unknown-worker") {
      inside_ = false;
      return may_say_hello(now) ? hello(now) : Effects{};
    }
    if (code == "name-taken" || code == "stale-epoch" || code == "limit" ||
        code == "protocol-version") {
      inside_ = false;
      return {Refused{code, refuse.text}};
    }
    if (code == "gone" || code == "range") {
      Slot* slot = inside_ && refuse.model ? find(*refuse.model) : nullptr;
      return slot != nullptr ? slot->gone(refuse.epoch, refuse.version, now) : Effects{};
    }
    return {Notice{code, refuse.text}};
  }

  // The latest epoch of which anything was applied: an older publisher is not to be followed.
  std::uint64_t applied_epoch() const {
    std::uint64_t epoch = 0;
    for (const auto& [model, slot] : slots_) {
      epoch = std::max(epoch, slot.epoch());
    }
    return epoch;
  }

  bool may_say_hello(double now) const { return now - said_hello_at_ >= timing_.hello_retry(); }

  Effects hello(double now) {
    said_hello_at_ = now;
    if (!unanswered_since_) unanswered_since_ = now;
    Hello hello;
    hello.name = identity_.name;
    hello.instance = identity_.instance;
    for (const auto& [model, slot] : slots_) hello.models[model] = slot.running();
    hello.epoch = applied_epoch();
    hello.age_ms = ages_.of(hello.epoch, now);
    hello.client = truncated(identity_.client, kLabelMax);
    hello.host = truncated(identity_.host, kLabelMax);
    hello.pid = identity_.pid;
    return {Send{std::move(hello)}};
  }

  // Whether the publisher is silent, or the control connection must be dead.
  //
  // TCP finds that out late. And ZeroMQ gives a connection up for good once it hears anything that
  // is no ZMTP: then it changes no more, and no hello can be sent. While ZeroMQ tries to connect it
  // changes all the time, but while a name is looked up, which is to be left alone.
  bool silent(double now) const {
    if (unanswered_since_ && now - *unanswered_since_ >= timing_.lost_after) return true;
    // What comes in a frame of a damaged length is swallowed, until that is full.
    const bool deaf = now - answered_at_ >= timing_.deaf_after();
    return inside_ && (deaf || now - heard_at_ >= timing_.lost_after);
  }

  Effects call_again() {
    unanswered_since_.reset();
    if (!std::exchange(inside_, false)) return {Redial{}};
    return {Notice{"lost", "the publisher is silent"}, Redial{}};
  }

  Effects welcome(const Welcome& welcome, double now) {
    if (welcome.epoch < applied_epoch()) {
      return {Refused{"stale-epoch", "the publisher is of epoch " + std::to_string(welcome.epoch) +
                                         ", but this worker runs weights of the later epoch " +
                                         std::to_string(applied_epoch()) +
                                         ": connect it to the newer publisher"}};
    }
    ages_.heard(welcome.epoch, welcome.age_ms, applied_epoch(), now);
    if (inside_ && welcome.epoch == epoch_) {  // the answer to a second hello
      heard_at_ = now;
      return hear_of(welcome.models, now);
    }
    inside_ = true;
    epoch_ = welcome.epoch;
    heard_at_ = now;
    ping_every_ = std::min(timing_.ping, static_cast<double>(welcome.ping_ms) / 1000);
    subscribed_ = false;
    shared_ = welcome.shared && opens_(*welcome.shared, 0) != nullptr;
    Effects effects{Joined{welcome.epoch}};
    if (std::exchange(data_, welcome.data) != welcome.data) {
      effects.push_back(ConnectData{welcome.data});
    }
    if (shared_) effects.push_back(Send{Ping{0, false, true}});  // before anything is pushed for us
    for (auto& [model, slot] : slots_) append(effects, enter(model, slot, welcome, now));
    return effects;
  }

  Effects enter(const std::string& model, Slot& slot, const Welcome& welcome, double now) {
    Effects effects{Subscribe{control_topic(model), true},
                    Subscribe{data_topic(model), !slot.catching_up() && !shared_}};
    slot.expect(shared_, sizes_[model]);
    const auto version = welcome.models.find(model);
    append(effects, slot.reconnected(welcome.epoch,
                                     version == welcome.models.end() ? 0 : version->second, now));
    return effects;
  }

  LeasePtr lend_scratch(std::size_t size) {
    if (scratch_ == nullptr || scratch_.use_count() > 1) {
      scratch_ = std::make_shared<std::vector<std::uint8_t>>();
    }
    scratch_->resize(size);
    return std::make_shared<Lease>(MutableBytes{scratch_->data(), size}, scratch_);
  }

  const Identity identity_;
  Models sizes_;
  const Opens opens_;
  const Timing timing_;
  std::map<std::string, Slot> slots_;
  bool inside_ = false, subscribed_ = false, shared_ = false;
  std::uint64_t epoch_ = 0, malformed_ = 0;
  Ages ages_;
  std::string data_;
  double heard_at_ = 0, answered_at_ = 0;  // the latter on the control channel
  double pinged_at_ = 0, ping_every_;
  double said_hello_at_ = -std::numeric_limits<double>::infinity();
  // When hello was said, or the control connection changed, and nothing came on it since.
  std::optional<double> unanswered_since_;
  std::shared_ptr<std::vector<std::uint8_t>> scratch_;  // layouts and small versions, on their way
};

}  // namespace weightbus
