// Strict JSON for what strangers send: bounded depth, no key twice, no exceptions.
//
// nlohmann's parser is iterative and checks UTF-8, but it skips a byte order mark and takes a zero
// byte for the end of the text: both are refused here before it sees them.
#pragma once

#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bytes.hpp"
#include "limits.hpp"

namespace weightbus {

using Json = nlohmann::json;

namespace json_detail {

// Builds a value from the parser's events.
class Builder final : public nlohmann::json_sax<Json> {
 public:
  Json root;

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return false; }

  bool start_object(std::size_t) override { return open(Json::object()); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    Json& object = *open_.back();
    if (object.contains(name)) return false;  // readers would disagree on which one holds
    place_ = &object[std::move(name)];
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const Json::exception&) override {
    return false;
  }

 private:
  Json* slot(Json&& value) {
    if (open_.empty()) {
      root = std::move(value);
      return &root;
    }
    Json& container = *open_.back();
    if (container.is_array()) {
      container.push_back(std::move(value));
      return &container.back();
    }
    *place_ = std::move(value);
    return place_;
  }

  bool put(Json value) {
    slot(std::move(value));
    return true;
  }

  bool open(Json container) {
    if (open_.size() >= static_cast<std::size_t>(kNestingMax)) return false;
    open_.push_back(slot(std::move(container)));
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  std::vector<Json*> open_;
  Json* place_ = nullptr;  // of the value whose key was read last
};

}  // namespace json_detail

// Feeds a text to a handler of events; false if it is not one JSON value, or the handler refuses.
inline bool scan_json(Bytes text, nlohmann::json_sax<Json>& handler) {
  if (text.size == 0 || std::memchr(text.data, 0, text.size) != nullptr) return false;
  if (text.data[0] == 0xEF) return false;  // a byte order mark
  return Json::sax_parse(text.data, text.data + text.size, &handler);
}

// Nothing, if the bytes are not one JSON value, nested at most 16 deep.
inline std::optional<Json> parse_json(Bytes text) {
  json_detail::Builder builder;
  if (!scan_json(text, builder)) return {};
  return std::move(builder.root);
}

}  // namespace weightbus
