// What a call returns that can fail: a value, or an error with a code for programs and a text for
// people. Nothing in this library throws for an ordinary outcome.
#pragma once

#include <string>
#include <utility>
#include <variant>

namespace weightbus {

// Codes are those of the protocol (section 13: "layout-mismatch", "name-taken", ...) and, for what
// goes wrong on this side alone: "address", "model", "tensor", "name", "options", "system",
// "closed".
struct Error {
  std::string code;
  std::string text;
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : held_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : held_(std::in_place_index<1>, std::move(error)) {}

  explicit operator bool() const { return held_.index() == 0; }
  bool ok() const { return held_.index() == 0; }

  // Only if ok().
  T& value() { return *std::get_if<0>(&held_); }
  const T& value() const { return *std::get_if<0>(&held_); }
  T& operator*() { return value(); }
  const T& operator*() const { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  // Only if not ok().
  const Error& error() const { return *std::get_if<1>(&held_); }

 private:
  std::variant<T, Error> held_;
};

}  // namespace weightbus
