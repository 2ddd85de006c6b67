// The messages of WBP/1 (section 6 of docs/PROTOCOL.md), and their bytes.
//
//     on SUB       [topic] [header] [payload]...
//     on DEALER    [header] [payload]...
//
// Decoding validates: whoever holds one of these structs holds no value out of bounds.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <variant>
#include <vector>

#include "bytes.hpp"
#include "fields.hpp"
#include "limits.hpp"
#include "result.hpp"

namespace weightbus {

using Frames = std::vector<Bytes>;                      // of one message, without topic
using Versions = std::map<std::string, std::uint64_t>;  // by model

// Objects inside headers.

struct Running {
  std::uint64_t epoch = 0, version = 0;
  std::string digest;
};
struct Shared {
  std::string path, token;
};
struct Whole {
  std::uint32_t crc = 0;
  std::string digest;
};

inline bool operator==(const Running& a, const Running& b) {
  return std::tie(a.epoch, a.version, a.digest) == std::tie(b.epoch, b.version, b.digest);
}
inline bool operator==(const Shared& a, const Shared& b) {
  return a.path == b.path && a.token == b.token;
}
inline bool operator==(const Whole& a, const Whole& b) {
  return a.crc == b.crc && a.digest == b.digest;
}

template <class V>
void describe(Running& m, V& f) {
  f("epoch", m.epoch, kCount);
  f("version", m.version, kPositive);
  f("digest", m.digest, kDigest);
}
template <class V>
void describe(Shared& m, V& f) {
  f("path", m.path, Text{kTextMax});
  f("token", m.token, kHex32);
}
template <class V>
void describe(Whole& m, V& f) {
  f("crc", m.crc, kCrc);
  f("digest", m.digest, kHex64);
}

// What speaks of one version.
struct OfVersion {
  std::string model;
  std::uint64_t epoch = 0, version = 0;
};
template <class V>
void describe_version(OfVersion& m, V& f) {
  f("model", m.model, Name{});
  f("epoch", m.epoch, kCount);
  f("version", m.version, kPositive);
}

// Worker to publisher.

struct Hello {
  static constexpr std::string_view kType = "hello";
  std::string name, instance;
  std::map<std::string, std::optional<Running>> models;
  std::uint64_t epoch = 0, age_ms = 0;
  std::vector<std::string> features;
  std::string client, host;
  std::uint64_t pid = 0;
};
template <class V>
void describe(Hello& m, V& f) {
  f("name", m.name, Name{});
  f("instance", m.instance, kHex32);
  f("models", m.models, ByName<OrNull<Object>>{{}, kModelsMax});
  f("epoch", m.epoch, kCount, 0U);
  f("age_ms", m.age_ms, kCount, 0U);
  f("features", m.features, Each<Name>{{}, kFeaturesMax}, std::vector<std::string>{});
  f("client", m.client, Text{kLabelMax}, "");
  f("host", m.host, Text{kLabelMax}, "");
  f("pid", m.pid, kCount, 0U);
}

struct Fetch : OfVersion {
  static constexpr std::string_view kType = "fetch";
  std::uint64_t first = 0, count = 0;
  bool layout = false;
};
template <class V>
void describe(Fetch& m, V& f) {
  f("model", m.model, Name{});
  f("epoch", m.epoch, kCount);
  f("version", m.version, kCount);
  f("first", m.first, kIndex, 0U);
  f("count", m.count, Integer{0, kFetchChunksMax}, 0U);
  f("layout", m.layout, Boolean{}, false);
}

struct Progress : OfVersion {
  static constexpr std::string_view kType = "progress";
  std::uint64_t chunks = 0;
  std::string phase = "receiving";
};
template <class V>
void describe(Progress& m, V& f) {
  describe_version(m, f);
  f("chunks", m.chunks, kCount);
  f("phase", m.phase, Choice{"receiving", "staged", "applying"}, "receiving");
}

struct Staged : OfVersion {
  static constexpr std::string_view kType = "staged";
  std::string digest;
};
template <class V>
void describe(Staged& m, V& f) {
  describe_version(m, f);
  f("digest", m.digest, kHex64);
}

struct Applied : OfVersion {
  static constexpr std::string_view kType = "applied";
  std::string digest;
};
template <class V>
void describe(Applied& m, V& f) {
  describe_version(m, f);
  f("digest", m.digest, kDigest);
}

struct Failed : OfVersion {
  static constexpr std::string_view kType = "failed";
  std::string code, text;
  bool intact = true;  // what ran before still runs
};
template <class V>
void describe(Failed& m, V& f) {
  describe_version(m, f);
  f("code", m.code, Name{});
  f("text", m.text, Text{kTextMax});
  f("intact", m.intact, Boolean{}, true);
}

struct Bye {
  static constexpr std::string_view kType = "bye";
};
template <class V>
void describe(Bye&, V&) {}

// Both ways.

struct Ping {
  static constexpr std::string_view kType = "ping";
  std::uint64_t token = 0;
  bool subscribed = false, shared = false;
};
template <class V>
void describe(Ping& m, V& f) {
  f("token", m.token, kCount, 0U);
  f("subscribed", m.subscribed, Boolean{}, false);
  f("shared", m.shared, Boolean{}, false);
}

struct Pong {
  static constexpr std::string_view kType = "pong";
  std::uint64_t token = 0, epoch = 0;
  Versions models;
};
template <class V>
void describe(Pong& m, V& f) {
  f("token", m.token, kCount, 0U);
  f("epoch", m.epoch, kCount, 0U);
  f("models", m.models, ByName<Integer>{kCount, kModelsMax}, Versions{});
}

// Publisher to worker.

struct Welcome {
  static constexpr std::string_view kType = "welcome";
  std::uint64_t epoch = 0;
  std::string data;
  std::uint64_t ping_ms = 0, lost_ms = 0;
  Versions models;
  std::optional<Shared> shared;
  std::uint64_t age_ms = 0;
  std::vector<std::string> features;
};
template <class V>
void describe(Welcome& m, V& f) {
  f("epoch", m.epoch, kCount);
  f("data", m.data, Text{kTextMax});
  f("ping_ms", m.ping_ms, Integer{1, 3'600'000});
  f("lost_ms", m.lost_ms, Integer{2, 36'000'000});
  f("models", m.models, ByName<Integer>{kCount, kModelsMax});
  f("shared", m.shared, OrNull<Object>{}, std::nullopt);
  f("age_ms", m.age_ms, kCount, 0U);
  f("features", m.features, Each<Name>{{}, kFeaturesMax}, std::vector<std::string>{});
}

struct Announce : OfVersion {
  static constexpr std::string_view kType = "announce";
  std::string layout;
  std::uint64_t layout_bytes = 0, nbytes = 0, chunk_bytes = 0;
  std::string commit, acknowledge, encoding;
  std::optional<std::string> encryption;
  std::optional<Shared> shared;
  bool hash = false;
  std::optional<Whole> whole;  // the payload is not the layout, but chunk 0, the only one
};
template <class V>
void describe(Announce& m, V& f) {
  describe_version(m, f);
  f("layout", m.layout, kHex64);
  f("layout_bytes", m.layout_bytes, Integer{10, kLayoutBytesMax});
  f("nbytes", m.nbytes, kCount);
  f("chunk_bytes", m.chunk_bytes, Integer{1, kChunkBytesMax});
  f("commit", m.commit, Choice{"auto", "together"});
  f("acknowledge", m.acknowledge, Choice{"applied", "staged"});
  f("encoding", m.encoding, Name{});
  f("encryption", m.encryption, OrNull<Name>{}, std::nullopt);
  f("shared", m.shared, OrNull<Object>{}, std::nullopt);
  f("hash", m.hash, Boolean{}, false);
  f("whole", m.whole, OrNull<Object>{}, std::nullopt);
}

struct Chunk : OfVersion {
  static constexpr std::string_view kType = "chunk";
  std::uint64_t index = 0;
  std::uint32_t crc = 0;
};
template <class V>
void describe(Chunk& m, V& f) {
  describe_version(m, f);
  f("index", m.index, kIndex);
  f("crc", m.crc, kCrc);
}

struct End : OfVersion {
  static constexpr std::string_view kType = "end";
  std::string digest;
};
template <class V>
void describe(End& m, V& f) {
  describe_version(m, f);
  f("digest", m.digest, kHex64);
}

struct Commit : OfVersion {
  static constexpr std::string_view kType = "commit";
  std::string digest;
};
template <class V>
void describe(Commit& m, V& f) {
  describe_version(m, f);
  f("digest", m.digest, kHex64);
}

struct Abort : OfVersion {
  static constexpr std::string_view kType = "abort";
  std::string text;
};
template <class V>
void describe(Abort& m, V& f) {
  describe_version(m, f);
  f("text", m.text, Text{kTextMax}, "");
}

struct Beacon : OfVersion {
  static constexpr std::string_view kType = "beacon";
};
template <class V>
void describe(Beacon& m, V& f) {
  f("model", m.model, Name{});
  f("epoch", m.epoch, kCount);
  f("version", m.version, kCount);
}

struct Refuse {
  static constexpr std::string_view kType = "refuse";
  std::string code, text;
  std::optional<std::string> model;
  std::uint64_t epoch = 0, version = 0;
};
template <class V>
void describe(Refuse& m, V& f) {
  f("code", m.code, Name{});
  f("text", m.text, Text{kTextMax});
  f("model", m.model, OrNull<Name>{}, std::nullopt);
  f("epoch", m.epoch, kCount, 0U);
  f("version", m.version, kCount, 0U);
}

using FromWorker = std::variant<Hello, Fetch, Progress, Staged, Applied, Failed, Bye, Ping, Pong>;
using FromPublisher =
    std::variant<Welcome, Announce, Chunk, End, Commit, Abort, Beacon, Refuse, Ping, Pong>;

// The header frame of a message. What a user named that is not UTF-8 is replaced.
template <class Message>
std::string encode(const Message& message) {
  FieldWriter::Out header = {{"wbp", 1}, {"type", Message::kType}};
  FieldWriter writer(header);
  describe(const_cast<Message&>(message), writer);  // a writer changes nothing
  return header.dump(-1, ' ', false, FieldWriter::Out::error_handler_t::replace);
}

inline std::string encode(const FromWorker& message) {
  return std::visit([](const auto& one) { return encode(one); }, message);
}

namespace messages_detail {

// How many payload frames may follow a header.
template <class Message>
bool may_have(const Message&, std::size_t payloads) {
  return payloads == 0;
}
inline bool may_have(const Chunk&, std::size_t payloads) { return payloads == 1; }
inline bool may_have(const Announce& announce, std::size_t payloads) {
  return payloads == 1 || (payloads == 0 && !announce.whole);
}

inline Error malformed(std::string text) { return {"malformed", std::move(text)}; }

// Reads the header as that one of the variant's messages whose type it has.
template <class Variant, std::size_t kAt = 0>
Result<Variant> decode_as(const Json& header, std::string_view type, std::size_t payloads) {
  if constexpr (kAt == std::variant_size_v<Variant>) {
    return malformed("no message of this direction has type \"" + std::string(type) + "\"");
  } else {
    using Message = std::variant_alternative_t<kAt, Variant>;
    if (type != Message::kType) return decode_as<Variant, kAt + 1>(header, type, payloads);
    Message message;
    FieldReader reader(header);
    describe(message, reader);
    if (!reader.ok()) {
      return malformed(std::string(type) + " with a field that is missing or out of bounds");
    }
    if (!may_have(message, payloads)) {
      return malformed(std::string(type) + " with " + std::to_string(payloads) + " payload frames");
    }
    return Variant(std::move(message));
  }
}

}  // namespace messages_detail

// Decodes the header and counts the payloads of a message; the error's code is "malformed" or
// "protocol-version".
template <class Variant>
Result<Variant> decode(Bytes header_frame, std::size_t payloads) {
  using messages_detail::malformed;
  if (header_frame.size > kHeaderBytesMax) {
    return malformed("a header of " + std::to_string(header_frame.size) + " bytes; at most " +
                     std::to_string(kHeaderBytesMax) + " are allowed");
  }
  const std::optional<Json> header = parse_json(header_frame);
  if (!header || !header->is_object()) return malformed("the header is not one JSON object");
  // The protocol's number is judged first: another protocol may have other messages.
  const auto wbp = header->find("wbp");
  if (wbp != header->end() && !wbp->is_number_integer()) {
    return malformed("wbp is not an integer");
  }
  if (wbp == header->end() || *wbp != 1) {
    return Error{"protocol-version", "the peer does not speak WBP/1, which is all this side knows"};
  }
  const auto type = header->find("type");
  if (type == header->end() || !type->is_string()) return malformed("type is not a string");
  const std::string_view kind = type->template get_ref<const std::string&>();
  return messages_detail::decode_as<Variant>(*header, kind, payloads);
}

// Decodes what a publisher sent.
inline Result<FromPublisher> decode(const Frames& frames) {
  if (frames.empty()) return messages_detail::malformed("a message without frames");
  return decode<FromPublisher>(frames[0], frames.size() - 1);
}

inline std::string control_topic(const std::string& model) { return model + "/ctl"; }
inline std::string data_topic(const std::string& model) { return model + "/dat"; }

}  // namespace weightbus
