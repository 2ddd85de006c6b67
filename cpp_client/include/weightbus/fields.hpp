// How fields of headers are read, checked and written.
//
// Each message describes its fields once (`messages.hpp`); the visitors below turn that description
// into a decoder and an encoder. A field's bound says which JSON it may be.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "json.hpp"
#include "limits.hpp"

namespace weightbus {

struct Integer {
  std::uint64_t least, greatest;
};
struct Boolean {};
struct Name {};  // 1 to 128 of the characters A-Z a-z 0-9 . _ -
struct Text {
  std::size_t most;  // characters
};
struct Hex {
  std::size_t digits;
  bool or_empty = false;
};
struct Choice {
  std::string_view one, another, third = another;
};
struct Object {};  // one with a description of its own
template <class Bound>
struct OrNull {
  Bound bound;
};
template <class Bound>
struct Each {  // an array of these
  Bound bound;
  std::size_t most;
};
template <class Bound>
struct ByName {  // an object whose keys are names
  Bound bound;
  std::size_t most;
};

inline constexpr Integer kCount{0, kIntegerMax};
inline constexpr Integer kPositive{1, kIntegerMax};
inline constexpr Integer kIndex{0, kChunksMax - 1};
inline constexpr Integer kCrc{0, 0xFFFFFFFF};
inline constexpr Hex kHex32{32}, kHex64{64}, kDigest{64, true};

inline bool is_name(std::string_view text) {
  const auto fits = [](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  if (text.empty() || text.size() > 128) return false;
  for (const char c : text) {
    if (!fits(c)) return false;
  }
  return true;
}

// Unicode code points of a valid UTF-8 text.
inline std::size_t characters(std::string_view text) {
  std::size_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return count;
}

// The first `most` code points.
inline std::string truncated(std::string text, std::size_t most) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    count += (static_cast<unsigned char>(text[i]) & 0xC0) != 0x80;
    if (count > most) {
      text.resize(i);
      break;
    }
  }
  return text;
}

// Reads the fields of one object; `ok` turns false at the first that is missing or out of bounds.
class FieldReader {
 public:
  explicit FieldReader(const Json& object) : object_(object), ok_(object.is_object()) {}

  bool ok() const { return ok_; }

  // A required field.
  template <class T, class Bound>
  void operator()(const char* key, T& field, const Bound& bound) {
    if (!ok_) return;
    const auto found = object_.find(key);
    ok_ = found != object_.end() && read(*found, field, bound);
  }

  // A field that may be left out.
  template <class T, class Bound, class Default>
  void operator()(const char* key, T& field, const Bound& bound, const Default& otherwise) {
    if (!ok_) return;
    const auto found = object_.find(key);
    if (found == object_.end()) {
      field = otherwise;
    } else {
      ok_ = read(*found, field, bound);
    }
  }

 private:
  template <class T>
  static bool read(const Json& json, T& field, const Integer& bound) {
    if (!json.is_number_unsigned()) return false;
    const auto value = json.get<std::uint64_t>();
    field = static_cast<T>(value);
    return value >= bound.least && value <= bound.greatest;
  }

  static bool read(const Json& json, bool& field, const Boolean&) {
    if (!json.is_boolean()) return false;
    field = json.get<bool>();
    return true;
  }

  static bool read_text(const Json& json, std::string& field) {
    if (!json.is_string()) return false;
    field = json.get_ref<const std::string&>();
    return true;
  }

  static bool read(const Json& json, std::string& field, const Name&) {
    return read_text(json, field) && is_name(field);
  }

  static bool read(const Json& json, std::string& field, const Text& bound) {
    return read_text(json, field) && characters(field) <= bound.most;
  }

  static bool read(const Json& json, std::string& field, const Hex& bound) {
    if (!read_text(json, field)) return false;
    if (field.empty() && bound.or_empty) return true;
    return field.size() == bound.digits &&
           field.find_first_not_of("0123456789abcdef") == std::string::npos;
  }

  static bool read(const Json& json, std::string& field, const Choice& bound) {
    if (!read_text(json, field)) return false;
    return field == bound.one || field == bound.another || field == bound.third;
  }

  template <class T>
  static bool read(const Json& json, T& field, const Object&) {
    FieldReader reader(json);
    if (reader.ok()) describe(field, reader);
    return reader.ok();
  }

  template <class T, class Bound>
  static bool read(const Json& json, std::optional<T>& field, const OrNull<Bound>& bound) {
    if (json.is_null()) {
      field.reset();
      return true;
    }
    return read(json, field.emplace(), bound.bound);
  }

  template <class T, class Bound>
  static bool read(const Json& json, std::vector<T>& field, const Each<Bound>& bound) {
    if (!json.is_array() || json.size() > bound.most) return false;
    for (const Json& item : json) {
      if (!read(item, field.emplace_back(), bound.bound)) return false;
    }
    return true;
  }

  template <class T, class Bound>
  static bool read(const Json& json, std::map<std::string, T>& field, const ByName<Bound>& bound) {
    if (!json.is_object() || json.size() > bound.most) return false;
    for (const auto& [key, value] : json.items()) {
      if (!is_name(key) || !read(value, field[key], bound.bound)) return false;
    }
    return true;
  }

  const Json& object_;
  bool ok_;
};

// Writes the fields of one object, those at their default left out unless `all`.
class FieldWriter {
 public:
  using Out = nlohmann::ordered_json;

  explicit FieldWriter(Out& out, bool all = false) : out_(out), all_(all) {}

  template <class T, class Bound>
  void operator()(const char* key, const T& field, const Bound&) {
    out_[key] = written(field);
  }

  template <class T, class Bound, class Default>
  void operator()(const char* key, const T& field, const Bound&, const Default& otherwise) {
    if (all_ || !(field == T(otherwise))) out_[key] = written(field);
  }

 private:
  template <class T>
  Out written(const T& value) const {
    if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) {
      return value;
    } else {
      Out out = Out::object();
      FieldWriter writer(out, all_);
      describe(const_cast<T&>(value), writer);  // a writer changes nothing
      return out;
    }
  }

  template <class T>
  Out written(const std::optional<T>& value) const {
    return value ? written(*value) : Out(nullptr);
  }

  template <class T>
  Out written(const std::vector<T>& values) const {
    Out out = Out::array();
    for (const T& value : values) out.push_back(written(value));
    return out;
  }

  template <class T>
  Out written(const std::map<std::string, T>& values) const {
    Out out = Out::object();
    for (const auto& [key, value] : values) out[key] = written(value);
    return out;
  }

  Out& out_;
  bool all_;
};

}  // namespace weightbus
