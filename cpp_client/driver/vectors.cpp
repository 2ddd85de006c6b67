#include "vectors.hpp"

#include <fstream>
#include <iostream>
#include <iterator>
#include <weightbus/chunks.hpp>
#include <weightbus/digest.hpp>
#include <weightbus/layout.hpp>
#include <weightbus/messages.hpp>
#include <weightbus/tensor.hpp>

#include "player.hpp"
#include "segments.hpp"

namespace {

using namespace weightbus;
using Line = nlohmann::ordered_json;

std::string folder;

std::string file(const std::string& path) {
  std::ifstream in(folder + "/" + path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string blob(const Json& value) {
  if (value.contains("text")) return value["text"];
  if (value.contains("hex")) return unhex(value["hex"].get<std::string>());
  return file(value["file"]);
}

void print(const std::string& table, const std::string& name, const Line& result) {
  Line line = {{"file", table}, {"case", name}};
  line.update(result);
  std::cout << line.dump() << "\n";
}

template <class Run>
void each(const std::string& table, const std::string& list, const std::string& prefix, Run run) {
  const Json cases = Json::parse(file(table)).at(list);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const std::string name = cases[i].value("name", std::to_string(i));
    const Line result = run(cases[i]);
    if (!result.is_null()) print(table, prefix + name, result);
  }
}

template <class Message>
Line plain(const Message& message) {
  Line line = {{"type", Message::kType}};
  FieldWriter writer(line, /*all=*/true);
  describe(const_cast<Message&>(message), writer);
  return line;
}

Line from_publisher(const Json& one) {
  std::vector<std::string> held;
  for (const Json& frame : one["frames"]) held.push_back(blob(frame));
  const Result<FromPublisher> message = decode(Frames(held.begin(), held.end()));
  if (!message) return {{"error", message.error().code}};
  return {{"ok", std::visit([](const auto& m) { return plain(m); }, *message)},
          {"payloads", held.size() - 1}};
}

// What the client writes for the fields of a case.
Line from_worker(const Json& one) {
  if (!one["expect"].contains("ok")) return nullptr;
  const Json& fields = one["expect"]["ok"];
  const auto message = messages_detail::decode_as<FromWorker>(
      fields, fields["type"].get_ref<const std::string&>(), 0);
  if (!message) return {{"error", message.error().text}};
  return {{"header", encode(*message)}};
}

Line layout(const Json& one) {
  const std::string header = blob(one["header"]);
  const auto found = Layout::parse(header);
  if (!found) return {{"error", found.error().code}};
  const Layout& layout = **found;
  Line tensors = Line::array(), aliases = Line::object(), metadata = Line::object();
  for (const TensorSpec& spec : layout.tensors()) {
    tensors.push_back({{"name", spec.name},
                       {"dtype", name(spec.dtype)},
                       {"shape", spec.shape},
                       {"begin", spec.begin},
                       {"end", spec.end}});
  }
  for (const auto& [alias, kept] : layout.aliases()) aliases[alias] = kept;
  for (const auto& [key, value] : layout.metadata()) metadata[key] = value;
  return {{"ok",
           {{"id", layout.id()},
            {"nbytes", layout.nbytes()},
            {"tensors", tensors},
            {"aliases", aliases},
            {"metadata", metadata}}}};
}

Line chunks(const Json& one) {
  const auto size = one["chunk_bytes"].get<std::int64_t>();
  const auto plan = ChunkPlan::of(one["nbytes"], static_cast<std::uint64_t>(size));
  if (!plan) return {{"error", "chunk-bytes"}};
  Line spans = Line::array();
  for (std::uint64_t i = 0; i < plan->count(); ++i) {
    spans.push_back({plan->span(i).first, plan->span(i).second});
  }
  return {{"ok", {{"count", plan->count()}, {"spans", spans}}}};
}

Line version(const Json& one) {
  const std::string whole = file(one["file"]);
  const Bytes header = Bytes(whole).slice(0, one["layout_bytes"]);
  const auto layout = Layout::parse(header);
  if (!layout) return {{"error", layout.error().code}};
  const Bytes data = Bytes(whole).slice(header.size, whole.size());
  return {{"digest", digest_of((*layout)->id(), data, one["chunk_bytes"])}};
}

// What the worker can take, where a case says what memory is registered.
Accepts accepts(const Json& one) {
  return [in_place = one.value("in_place", Json::object())](const std::string& model,
                                                            const Layout& layout) -> std::string {
    if (!in_place.contains(model)) return "";
    std::vector<Tensor> tensors;
    for (const auto& [name, about] : in_place[model].items()) {
      Tensor made{name, Dtype::kU8, about["shape"].get<Shape>(), nullptr, 0};
      std::uint64_t nbytes = 0;
      find_dtype(about["dtype"].get<std::string>(), made.dtype);
      tensor_bytes(made.dtype, made.shape, nbytes);
      made.bytes = nbytes;
      made.data = &made;  // never written to: nothing is copied here
      tensors.push_back(std::move(made));
    }
    const Result<Target> target = Target::of(std::move(tensors));
    return target ? target->difference(layout) : target.error().text;
  };
}

void play(Player& player, const Json& step) {
  std::vector<std::string> held;
  const bool published = step.contains("data");
  if (step.contains("wait_ms")) return player.wait(step["wait_ms"].get<double>() / 1000);
  for (const Json& frame : step[published ? "data" : "control"]) held.push_back(blob(frame));
  const Frames frames(held.begin(), held.end());
  published ? player.data(frames) : player.control(frames);
}

Line sequence(const Json& one) {
  Player::Setting setting;
  setting.models = one["models"].get<std::vector<std::string>>();
  setting.bytes_max = one.value("bytes_max", kStagingBytesMax);
  setting.accepts = accepts(one);
  Player player(std::move(setting));
  Line steps = Line::array();
  for (const Json& step : one["steps"]) {
    player.sent.clear();
    play(player, step);
    Line sent = Line::array();
    for (const FromWorker& message : player.sent) sent.push_back(Line::parse(encode(message)));
    steps.push_back({{"sent", sent}, {"runs", player.runs}});
  }
  return {{"steps", steps}};
}

}  // namespace

int run_vectors(const std::string& from) {
  folder = from;
  each("messages.json", "cases", "", [](const Json& one) {
    return one["direction"] == "from_publisher" ? from_publisher(one) : from_worker(one);
  });
  each("layouts.json", "cases", "", layout);
  each("chunks.json", "cases", "", chunks);
  each("checksums.json", "crc32c", "crc32c/", [](const Json& one) -> Line {
    return {{"crc", crc32c(unhex(one["hex"].get<std::string>()))}};
  });
  each("checksums.json", "digests", "digests/", [](const Json& one) -> Line {
    const std::string id = one["layout"];
    return {{"digest", digest(id, one["chunk_bytes"], one["crcs"])}};
  });
  each("versions.json", "cases", "", version);
  each("segments.json", "cases", "",
       [](const Json& one) { return segment(one, file(one["file"])); });
  each("sequences.json", "cases", "", sequence);
  return 0;
}
