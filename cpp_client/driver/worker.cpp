#include "worker.hpp"

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <weightbus/json.hpp>
#include <weightbus/weightbus.hpp>

namespace {

using namespace weightbus;
using namespace std::chrono_literals;
using Line = nlohmann::ordered_json;

std::atomic<bool> stop{false};

void print(const Line& line) {
  static std::mutex mutex;
  const std::lock_guard guard(mutex);
  std::cout << line.dump() << std::endl;
}

struct Arguments {
  std::string address, name, in_place;
  std::vector<std::string> models;
  bool tensors = true;
  double seconds = 120;
  Options options;
};

bool parse(const std::vector<std::string>& words, Arguments& parsed) {
  parsed.address = words[1];
  for (std::size_t i = 2; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--no-tensors") {
      parsed.tensors = false;
    } else if (word == "--network") {
      parsed.options.shared_memory = false;
    } else if (i + 1 < words.size() && word == "--name") {
      parsed.options.name = words[++i];
    } else if (i + 1 < words.size() && word == "--in-place") {
      parsed.in_place = words[++i];
    } else if (i + 1 < words.size() && word == "--bytes-max") {
      parsed.options.bytes_max = std::stoull(words[++i]);
    } else if (i + 1 < words.size() && word == "--seconds") {
      parsed.seconds = std::stod(words[++i]);
    } else if (i + 1 < words.size() && word == "--models") {
      std::istringstream list(words[++i]);
      for (std::string model; std::getline(list, model, ',');) parsed.models.push_back(model);
    } else {
      return false;
    }
  }
  return true;
}

// Memory that is registered, by model and tensor.
using Registered = std::map<std::string, std::map<std::string, std::vector<std::uint8_t>>>;

bool allocate(const Json& spec, Registered& registered, Options& options) {
  for (const auto& [model, tensors] : spec.items()) {
    std::vector<Tensor> made;
    for (const auto& [name, about] : tensors.items()) {
      Tensor tensor{name, Dtype::kU8, about["shape"].get<Shape>(), nullptr, 0};
      std::uint64_t nbytes = 0;
      if (!find_dtype(about["dtype"].get<std::string>(), tensor.dtype)) return false;
      if (!tensor_bytes(tensor.dtype, tensor.shape, nbytes)) return false;
      std::vector<std::uint8_t>& memory = registered[model][name];
      memory.resize(nbytes);
      tensor.data = memory.data();
      tensor.bytes = nbytes;
      made.push_back(std::move(tensor));
    }
    options.in_place(model, std::move(made));
  }
  return true;
}

Line checksums(const Update& update, Worker& worker, const Registered& registered) {
  Line tensors = Line::object();
  const auto found = registered.find(update.model);
  if (found != registered.end()) {
    const auto guard = worker.reading();
    for (const auto& [name, memory] : found->second) {
      tensors[name] = crc32c({memory.data(), memory.size()});
    }
  } else if (const auto snapshot = worker.snapshot(update.model)) {
    for (const TensorSpec& spec : snapshot->layout().tensors()) {
      tensors[spec.name] = crc32c(snapshot->data().slice(spec.begin, spec.end));
    }
  }
  return tensors;
}

// Whether the bytes of a model are not all the same.
bool is_torn(const std::map<std::string, std::vector<std::uint8_t>>& tensors) {
  const std::uint8_t* first = nullptr;
  for (const auto& [name, memory] : tensors) {
    if (memory.empty()) continue;
    if (first == nullptr) first = memory.data();
    if (memory[0] != *first) return true;
    if (std::memcmp(memory.data(), memory.data() + 1, memory.size() - 1) != 0) return true;
  }
  return false;
}

// Reads all the time, as a model would; says when it saw two versions at once.
void watch(Worker& worker, const Registered& registered) {
  std::set<std::string> told;
  while (!stop) {
    {
      const auto guard = worker.reading();
      for (const auto& [model, tensors] : registered) {
        if (is_torn(tensors) && told.insert(model).second) {
          print({{"event", "torn"}, {"model", model}});
        }
      }
    }
    std::this_thread::yield();
  }
}

void report(Worker& worker) {
  for (const Event& event : worker.events()) {
    switch (event.kind) {
      case Event::Kind::kJoined:
        print({{"event", "joined"}, {"epoch", event.epoch}});
        break;
      case Event::Kind::kLost:
        print({{"event", "lost"}});
        break;
      case Event::Kind::kRefused:
        print({{"event", "refused"}, {"code", event.code}, {"text", event.text}});
        break;
      case Event::Kind::kFailed:
        print({{"event", "failed"},
               {"model", event.model},
               {"epoch", event.epoch},
               {"version", event.version},
               {"code", event.code},
               {"text", event.text}});
        break;
      case Event::Kind::kNotice:
        std::cerr << event.code << ": " << event.text << "\n";
        break;
      case Event::Kind::kApplied:
        break;  // `receive` says so
    }
  }
}

void serve(Worker& worker, const Arguments& arguments, const Registered& registered) {
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(arguments.seconds);
  while (!stop && std::chrono::steady_clock::now() < end) {
    const auto update = worker.receive(50ms);
    report(worker);
    if (!update || !*update) continue;
    const Update& applied = **update;
    Line line = {{"event", "applied"},
                 {"model", applied.model},
                 {"epoch", applied.epoch},
                 {"version", applied.version},
                 {"digest", applied.digest}};
    if (arguments.tensors) line["tensors"] = checksums(applied, worker, registered);
    print(line);
  }
}

}  // namespace

int run_worker(const std::vector<std::string>& words) {
  std::signal(SIGTERM, [](int) { stop = true; });
  std::signal(SIGINT, [](int) { stop = true; });
  Arguments arguments;
  Registered registered;
  if (!parse(words, arguments)) {
    std::cerr << "driver: unknown or incomplete argument; run it without any for help\n";
    return 2;
  }
  if (!arguments.in_place.empty()) {
    std::ifstream file(arguments.in_place);
    const Json spec = Json::parse(file, nullptr, false);
    if (!spec.is_object() || !allocate(spec, registered, arguments.options)) {
      std::cerr << "driver: " << arguments.in_place << " is no specification of tensors\n";
      return 2;
    }
  }
  for (const std::string& model : arguments.models) {
    if (registered.count(model) == 0) arguments.options.snapshots(model);
  }
  auto worker = Worker::connect(arguments.address, arguments.options);
  if (!worker) {
    std::cerr << "driver: " << worker.error().text << "\n";
    return 2;
  }
  std::thread watcher;
  if (!registered.empty() &&
      arguments.tensors)  // else it is being measured: nobody else takes time
    watcher = std::thread(watch, std::ref(*worker), std::cref(registered));
  serve(*worker, arguments, registered);
  stop = true;
  if (watcher.joinable()) watcher.join();
  worker->close();
  return 0;
}
