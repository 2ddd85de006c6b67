// Headers and layouts of the golden vectors; the conformance suite judges the driver by all of
// them.
#include <doctest/doctest.h>

#include <fstream>
#include <iterator>
#include <weightbus/layout.hpp>
#include <weightbus/messages.hpp>

using namespace weightbus;

namespace {

Json table(const std::string& name) {
  std::ifstream file(VECTORS "/" + name);
  return Json::parse(file)["cases"];
}

std::string blob(const Json& value) {
  if (value.contains("text")) return value["text"];
  if (value.contains("hex")) return unhex(value["hex"].get<std::string>());
  std::ifstream file(VECTORS "/" + value["file"].get<std::string>(), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <class Variant>
void check(const Json& one) {
  std::vector<std::string> frames;
  for (const Json& frame : one["frames"]) frames.push_back(blob(frame));
  const Result<Variant> message = frames.empty() ? Result<Variant>(Error{"malformed", ""})
                                                 : decode<Variant>(frames[0], frames.size() - 1);
  const Json& expect = one["expect"];
  if (!message) {
    CHECK_MESSAGE(expect.value("error", "none") == message.error().code, one["name"]);
    return;
  }
  CHECK_MESSAGE(expect.contains("ok"), one["name"]);
  const auto again = std::visit(
      [&](const auto& read) { return decode<Variant>(encode(read), frames.size() - 1); }, *message);
  CHECK_MESSAGE(again.ok(), one["name"]);
}

}  // namespace

TEST_CASE("headers are read or refused as the vectors say") {
  const Json cases = table("messages.json");
  REQUIRE(cases.size() > 600);
  for (const Json& one : cases) {
    one["direction"] == "from_publisher" ? check<FromPublisher>(one) : check<FromWorker>(one);
  }
}

TEST_CASE("layouts are read or refused as the vectors say") {
  const Json cases = table("layouts.json");
  REQUIRE(cases.size() > 70);
  for (const Json& one : cases) {
    const auto layout = Layout::parse(blob(one["header"]));
    const Json& expect = one["expect"];
    CHECK_MESSAGE(layout.ok() == expect.contains("ok"), one["name"]);
    if (!layout || !expect.contains("ok")) continue;
    CHECK((*layout)->id() == expect["ok"]["id"]);
    CHECK((*layout)->tensors().size() == expect["ok"]["tensors"].size());
    for (const auto& [alias, kept] : expect["ok"]["aliases"].items()) {
      CHECK((*layout)->find(alias) == (*layout)->find(kept.get<std::string>()));
    }
  }
}

TEST_CASE("many tensors and many keys cost no more than sorting them") {
  std::string json = "{";
  for (int i = 0; i < 50'000; ++i) {
    const std::string at = std::to_string(i), end = std::to_string(i + 1);
    json += (i ? ",\"t" : "\"t") + at + R"(":{"dtype":"U8","shape":[1],"data_offsets":[)" + at +
            "," + end + "]}";
  }
  json += "}";
  std::string header;
  append_little_endian(header, json.size(), 8);
  const auto layout = Layout::parse(header + json);
  REQUIRE(layout.ok());
  CHECK((*layout)->nbytes() == 50'000);
  REQUIRE((*layout)->find("t49999") != nullptr);
  CHECK((*layout)->find("t49999")->begin == 49'999);
}
