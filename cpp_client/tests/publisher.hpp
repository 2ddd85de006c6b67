// The smallest publisher: what workers of these tests talk to. One model; no sockets.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>
#include <weightbus/chunks.hpp>
#include <weightbus/digest.hpp>
#include <weightbus/layout.hpp>
#include <weightbus/messages.hpp>

namespace weightbus {

using Message = std::vector<std::string>;  // frames, header first

inline Frames frames_of(const Message& message) { return {message.begin(), message.end()}; }

// A layout of one tensor `w` of bytes.
inline std::string layout_of_bytes(std::uint64_t nbytes) {
  const std::string size = std::to_string(nbytes);
  std::string json =
      R"({"w":{"dtype":"U8","shape":[)" + size + R"(],"data_offsets":[0,)" + size + "]}}";
  json.append((8 - json.size() % 8) % 8, ' ');
  std::string header;
  append_little_endian(header, json.size(), 8);
  return header + json;
}

struct Published {
  std::string layout, data;
  std::uint64_t chunk_bytes = 4;
  std::string commit = "auto", acknowledge = "applied";

  std::string id() const { return sha256(layout); }
  std::string digest() const { return digest_of(id(), data, chunk_bytes); }
  std::uint64_t chunks() const { return ChunkPlan::of(data.size(), chunk_bytes)->count(); }
  std::string chunk(std::uint64_t index) const {
    const auto [begin, end] = ChunkPlan::of(data.size(), chunk_bytes)->span(index);
    return data.substr(begin, end - begin);
  }
};

class TinyPublisher {
 public:
  explicit TinyPublisher(std::uint64_t epoch, std::string data_endpoint = "tcp://*:9",
                         std::string model = "m")
      : epoch_(epoch), data_endpoint_(std::move(data_endpoint)), model_(std::move(model)) {}

  std::uint64_t epoch() const { return epoch_; }
  std::uint64_t newest() const { return versions_.empty() ? 0 : versions_.rbegin()->first; }
  bool has(std::uint64_t number) const { return versions_.count(number) == 1; }
  const Published& version(std::uint64_t number) const { return versions_.at(number); }
  std::uint64_t applied() const { return applied_; }  // the greatest that was reported rightly
  std::uint64_t wrong_digests() const { return wrong_digests_; }
  bool said_goodbye() const { return said_goodbye_; }
  double ping_ms = 1000;

  // Returns the number of the new version.
  std::uint64_t publish(Published published) {
    const std::uint64_t number = newest() + 1;
    versions_[number] = std::move(published);
    while (versions_.size() > kKept) versions_.erase(versions_.begin());
    return number;
  }

  Announce announcement(std::uint64_t number) const {
    const Published& of = versions_.at(number);
    Announce announce;
    announce.model = model_;
    announce.epoch = epoch_;
    announce.version = number;
    announce.layout = of.id();
    announce.layout_bytes = of.layout.size();
    announce.nbytes = of.data.size();
    announce.chunk_bytes = of.chunk_bytes;
    announce.commit = of.commit;
    announce.acknowledge = of.acknowledge;
    announce.encoding = "raw";
    return announce;
  }

  Message announce(std::uint64_t number, bool with_layout) const {
    Message message{encode(announcement(number))};
    if (with_layout) message.push_back(versions_.at(number).layout);
    return message;
  }

  Message whole(std::uint64_t number) const {
    const Published& of = versions_.at(number);
    Announce announce = announcement(number);
    announce.whole = Whole{crc32c(of.data), of.digest()};
    return {encode(announce), of.data};
  }

  Message chunk(std::uint64_t number, std::uint64_t index) const {
    std::string payload = versions_.at(number).chunk(index);
    const std::uint32_t crc = crc32c(payload);
    return {encode(Chunk{{model_, epoch_, number}, index, crc}), std::move(payload)};
  }

  Message end(std::uint64_t number) const {
    return {encode(End{{model_, epoch_, number}, versions_.at(number).digest()})};
  }

  Message commit(std::uint64_t number) {
    versions_.at(number).commit = "auto";
    return {encode(Commit{{model_, epoch_, number}, versions_.at(number).digest()})};
  }

  Message abort(std::uint64_t number) const {
    return {encode(Abort{{model_, epoch_, number}, "not enough staged"})};
  }

  Message beacon() const { return {encode(Beacon{{model_, epoch_, newest()}})}; }

  Message welcome() const {
    Welcome welcome;
    welcome.epoch = epoch_;
    welcome.data = data_endpoint_;
    welcome.ping_ms = static_cast<std::uint64_t>(ping_ms);
    welcome.lost_ms = 5000;
    welcome.models[model_] = newest();
    return {encode(welcome)};
  }

  // What is published of a version: to all.
  std::vector<Message> push(std::uint64_t number, bool with_layout = true) const {
    std::vector<Message> messages{announce(number, with_layout)};
    for (std::uint64_t i = 0; i < versions_.at(number).chunks(); ++i) {
      messages.push_back(chunk(number, i));
    }
    messages.push_back(end(number));
    return messages;
  }

  // The answer to a worker, over its control channel.
  std::vector<Message> answer(const FromWorker& said) {
    if (std::holds_alternative<Hello>(said)) return {welcome()};
    if (const auto* ping = std::get_if<Ping>(&said)) {
      return {{encode(Pong{ping->token, epoch_, {{model_, newest()}}})}};
    }
    if (const auto* fetch = std::get_if<Fetch>(&said)) return fetched(*fetch);
    if (const auto* done = std::get_if<Applied>(&said)) take(*done);
    if (std::holds_alternative<Bye>(said)) said_goodbye_ = true;
    return {};
  }

 private:
  static constexpr std::size_t kKept = 3;

  std::vector<Message> fetched(const Fetch& fetch) const {
    const std::uint64_t number = fetch.version == 0 ? newest() : fetch.version;
    if (fetch.epoch != epoch_ || versions_.count(number) == 0) {
      return {{encode(Refuse{"gone", "not to be had", model_, fetch.epoch, fetch.version})}};
    }
    if (fetch.count == 0) return {announce(number, fetch.layout), end(number)};
    std::vector<Message> messages;
    for (std::uint64_t i = fetch.first; i < fetch.first + fetch.count; ++i) {
      if (i < versions_.at(number).chunks()) messages.push_back(chunk(number, i));
    }
    return messages;
  }

  void take(const Applied& done) {
    if (done.epoch != epoch_ || versions_.count(done.version) == 0) return;
    if (done.digest != versions_.at(done.version).digest()) {
      ++wrong_digests_;
    } else {
      applied_ = std::max(applied_, done.version);
    }
  }

  std::uint64_t epoch_;
  std::string data_endpoint_, model_;
  std::map<std::uint64_t, Published> versions_;
  std::uint64_t applied_ = 0, wrong_digests_ = 0;
  bool said_goodbye_ = false;
};

}  // namespace weightbus
