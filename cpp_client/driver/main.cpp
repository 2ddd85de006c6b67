// The driver of the conformance suite: a worker that reports its events, a line of JSON each.
//
// Golden vectors test the inside of libweightbus: the Rust client's driver answers them.
#include <array>
#include <atomic>
#include <cmath>
#include <csignal>
#include <fstream>
#include <iostream>
#include <iterator>
#include <set>
#include <sstream>
#include <stdexcept>
#include <weightbus/weightbus.hpp>

namespace {

using namespace std::chrono_literals;

constexpr const char* kUsage =
    "usage: driver vectors DIR\n"
    "       driver worker ADDRESS --name NAME --models M1,M2 [--in-place SPEC.json]\n"
    "              [--no-tensors] [--bytes-max N] [--network] [--seconds S]\n"
    "              [--turn-down N,...] [--break N,...] [--apply-seconds S[:N,...]] "
    "[--apply-timeout S]\n"
    "              [--partial] [--cast] [--keys FILE]\n";

std::atomic<bool> stop{false};

[[noreturn]] void die(const std::string& why) {
  std::cerr << "driver: " << why << "\n";
  std::exit(2);
}

template <class T>
T expect(weightbus::Result<T> result) {
  if (!result) die(result.error().text);
  return std::move(*result);
}

// One line of JSON.
class Line {
 public:
  explicit Line(const std::string& event) { text("event", event); }

  Line& raw(std::string_view name, const std::string& value) {
    said_ += (said_.empty() ? "{" : ",") + quoted(name) + ":" + value;
    return *this;
  }
  Line& text(std::string_view name, std::string_view value) { return raw(name, quoted(value)); }
  Line& version(const std::string& model, std::uint64_t epoch, std::uint64_t version) {
    text("model", model).raw("epoch", std::to_string(epoch));
    return raw("version", std::to_string(version));
  }

  void say() const {
    static std::mutex mutex;
    const std::lock_guard guard(mutex);
    std::cout << said_ << "}" << std::endl;
  }

  static std::string quoted(std::string_view text) {
    std::string made = "\"";
    for (const char c : text) {
      char escaped[8] = {c};
      if (c == '"' || c == '\\') std::snprintf(escaped, sizeof escaped, "\\%c", c);
      if (static_cast<unsigned char>(c) < 0x20)
        std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      made.append(escaped, c == 0 ? 6 : std::strlen(escaped));
    }
    return made + "\"";
  }

 private:
  std::string said_;
};

void hear(const weightbus::Event& event) {
  if (event.kind == "joined") {
    Line("joined").raw("epoch", std::to_string(event.epoch)).say();
  } else if (event.kind == "lost") {
    Line("lost").say();
  } else if (event.kind == "refused") {
    Line("refused").text("code", event.code).text("text", event.text).say();
  } else if (event.kind == "rejected") {
    Line line("failed");
    line.version(event.model, event.epoch, event.version);
    line.text("code", event.code).text("text", event.text).say();
  } else {
    std::cerr << event.kind + ": " + event.code + " " + event.text + "\n";
  }
}

// CRC-32C, a byte at a time.
std::uint32_t crc32c(const void* data, std::size_t count) {
  static const std::array<std::uint32_t, 256> kTable = [] {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78U : 0);
      table[i] = crc;
    }
    return table;
  }();
  std::uint32_t crc = ~0U;
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < count; ++i) crc = crc >> 8 ^ kTable[(crc ^ bytes[i]) & 0xFF];
  return ~crc;
}

// The registered tensors, by model.
using Registered = std::map<std::string, std::vector<weightbus::Tensor>>;

// The memory to register: {"model": {"tensor": {"dtype": "F32", "shape": [4, 3]}}}, without
// escapes.
class Specification {
 public:
  explicit Specification(const std::string& path) {
    std::ifstream file(path);
    rest_.assign(std::istreambuf_iterator<char>(file), {});
  }

  Registered read() {
    Registered registered;
    items([&](const std::string& model) {
      items([&](const std::string& name) { registered[model].push_back(tensor(name)); });
    });
    return registered;
  }

 private:
  char next() {
    at_ = rest_.find_first_not_of(" \t\r\n,:", at_);
    if (at_ == std::string::npos) die("the specification of tensors ends early");
    return rest_[at_];
  }

  std::string text() {
    if (next() != '"') die("no specification of tensors: " + rest_.substr(at_));
    const std::size_t begin = at_ + 1;
    at_ = rest_.find('"', begin) + 1;
    return rest_.substr(begin, at_ - 1 - begin);
  }

  template <class Item>
  void items(Item item) {
    if (next() != '{') die("no specification of tensors: " + rest_.substr(at_));
    for (++at_; next() != '}';) item(text());
    ++at_;
  }

  weightbus::Tensor tensor(const std::string& name) {
    weightbus::Tensor made;
    made.name = name;
    items([&](const std::string& key) {
      if (key == "dtype") {
        made.dtype = text();
        return;
      }
      next();
      for (++at_; next() != ']';) {
        std::size_t digits = 0;
        made.shape.push_back(std::stoull(rest_.substr(at_, 20), &digits));
        at_ += digits;
      }
      ++at_;
    });
    return made;
  }

  std::string rest_;
  std::size_t at_ = 0;
};

// What the user's functions do, by version.
struct Part {
  std::set<std::uint64_t> turn_down, broken, slow;
  std::chrono::duration<double> seconds{0};
};

struct Arguments {
  std::string address;
  std::set<std::string> models;
  Registered registered;
  bool tensors = true;
  double seconds = 120;
  Part part;
  weightbus::Options options;
};

template <class Item>
void each(const std::string& list, Item item) {
  std::istringstream items(list);
  for (std::string one; std::getline(items, one, ',');) item(one);
}

Arguments parse(const std::vector<std::string>& words) {
  Arguments parsed;
  parsed.address = words[1];
  for (std::size_t i = 2; i < words.size(); ++i) {
    const std::string& word = words[i];
    const auto value = [&] { return i + 1 < words.size() ? words[++i] : (die(kUsage), ""); };
    if (word == "--no-tensors") {
      parsed.tensors = false;
    } else if (word == "--network") {
      parsed.options.shared_memory = false;
    } else if (word == "--partial") {
      parsed.options.partial = true;
    } else if (word == "--cast") {
      parsed.options.cast = true;
    } else if (word == "--keys") {
      parsed.options.keys = value();
    } else if (word == "--name") {
      parsed.options.name = value();
    } else if (word == "--in-place") {
      parsed.registered = Specification(value()).read();
    } else if (word == "--bytes-max") {
      parsed.options.bytes_max = std::stoull(value());
    } else if (word == "--seconds") {
      parsed.seconds = std::stod(value());
    } else if (word == "--models") {
      each(value(), [&](const std::string& model) { parsed.models.insert(model); });
    } else if (word == "--turn-down") {
      each(value(), [&](const std::string& n) { parsed.part.turn_down.insert(std::stoull(n)); });
    } else if (word == "--break") {
      each(value(), [&](const std::string& n) { parsed.part.broken.insert(std::stoull(n)); });
    } else if (word == "--apply-seconds") {
      std::istringstream both(value());
      double seconds = 0;
      std::string some;
      both >> seconds >> some;
      parsed.part.seconds = std::chrono::duration<double>(seconds);
      if (!some.empty()) {
        each(some.substr(1),
             [&](const std::string& n) { parsed.part.slow.insert(std::stoull(n)); });
      }
    } else if (word == "--apply-timeout") {
      parsed.options.apply_timeout =
          std::chrono::milliseconds(std::lround(1e3 * std::stod(value())));
    } else {
      die(kUsage);
    }
  }
  return parsed;
}

void choose_targets(Arguments& arguments) {
  for (auto& [model, tensors] : arguments.registered) {
    auto memory = weightbus::Resident::of(tensors);
    if (!memory) die(model + ": " + memory.error().text);
    tensors = memory->tensors();
    arguments.options.in_place(model, std::move(*memory));
    arguments.models.erase(model);
  }
  for (const std::string& model : arguments.models) arguments.options.snapshots(model);
}

void choose_part(weightbus::Options& options, Part part, bool in_place) {
  using Why = std::optional<std::string>;
  if (in_place && !part.turn_down.empty()) {
    options.before_apply = [versions = std::exchange(part.turn_down, {})](const auto& offer) {
      return versions.count(offer.version) == 1 ? Why("told to turn down") : Why();
    };
  }
  if (part.turn_down.empty() && part.broken.empty() && part.seconds == 0s) return;
  options.apply = [part](const auto& offer) {
    if (part.slow.empty() || part.slow.count(offer.version) == 1) {
      const auto end = std::chrono::steady_clock::now() + part.seconds;
      while (!stop && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(10ms);
    }
    if (part.broken.count(offer.version) == 1) throw std::runtime_error("told to break");
    return part.turn_down.count(offer.version) == 1 ? Why("told to turn down") : Why();
  };
}

std::string checksums(const weightbus::Update& update, const weightbus::Worker& worker,
                      Registered& registered) {
  std::string said;
  const auto add = [&](std::string_view name, const void* data, std::size_t count) {
    said +=
        (said.empty() ? "{" : ",") + Line::quoted(name) + ":" + std::to_string(crc32c(data, count));
  };
  if (update.snapshot) {
    for (const auto& one : update.snapshot->tensors()) {
      add(one.name(), one.bytes().data(), one.bytes().size());
    }
  } else if (const auto reading = worker.reading(update.model)) {
    for (const auto& one : registered[update.model]) add(one.name, one.data, one.bytes);
  }
  return said.empty() ? "{}" : said + "}";
}

// True if the bytes of a model are not all the same.
bool is_torn(const std::vector<weightbus::Tensor>& tensors) {
  const std::byte* first = nullptr;
  for (const auto& one : tensors) {
    if (one.bytes == 0) continue;
    const auto* bytes = static_cast<const std::byte*>(one.data);
    if (first == nullptr) first = bytes;
    if (bytes[0] != *first) return true;
    if (std::memcmp(bytes, bytes + 1, one.bytes - 1) != 0) return true;
  }
  return false;
}

// Reads all the time, as a model would; reports when it saw two versions at once.
void watch(const weightbus::Worker& worker, const Registered& registered) {
  std::set<std::string> told;
  while (!stop) {
    for (const auto& [model, tensors] : registered) {
      const auto reading = worker.reading(model);
      if (reading && is_torn(tensors) && told.insert(model).second) {
        Line("torn").text("model", model).say();
      }
    }
    std::this_thread::yield();
  }
}

std::string quoted(const std::map<std::string, std::string>& metadata) {
  std::string said;
  for (const auto& [name, text] : metadata)
    said += (said.empty() ? "{" : ",") + Line::quoted(name) + ":" + Line::quoted(text);
  return said.empty() ? "{}" : said + "}";
}

using Told = std::map<std::string, weightbus::Version>;  // the last reported version, by model

// Reports a version that runs under another name than was reported last.
void look(const weightbus::Worker& worker, Told& told) {
  for (const auto& [model, its] : worker.state().models) {
    if (!its.running || *its.running == told[model]) continue;
    told[model] = *its.running;
    Line line("runs");
    line.version(model, its.running->first, its.running->second);
    line.raw("metadata", quoted(its.metadata)).say();
  }
}

void serve(weightbus::Worker& worker, Arguments& arguments) {
  Told told;
  const std::chrono::duration<double> patience(arguments.seconds);
  const auto end = std::chrono::steady_clock::now() + patience;
  while (!stop && std::chrono::steady_clock::now() < end) {
    const auto update = worker.receive(50ms);
    if (!update) std::cerr << update.error().code + ": " + update.error().text + "\n";
    if (update && !*update) look(worker, told);
    if (!update || !*update) continue;
    const weightbus::Update& applied = **update;
    told[applied.model] = {applied.epoch, applied.version};
    Line line("applied");
    line.version(applied.model, applied.epoch, applied.version).text("digest", applied.digest);
    line.raw("metadata", quoted(applied.metadata));
    if (arguments.tensors) line.raw("tensors", checksums(applied, worker, arguments.registered));
    line.say();
  }
}

}  // namespace

int main(int count, char** values) {
  const std::vector<std::string> words(values + 1, values + count);
  if (words.size() == 2 && words[0] == "vectors") return 0;
  if (words.size() < 2 || words[0] != "worker") die(kUsage);
  std::signal(SIGTERM, [](int) { stop = true; });
  std::signal(SIGINT, [](int) { stop = true; });
  Arguments arguments = parse(words);
  choose_part(arguments.options, arguments.part, !arguments.registered.empty());
  choose_targets(arguments);
  arguments.options.on_event = hear;
  weightbus::Worker worker =
      expect(weightbus::Worker::connect(arguments.address, arguments.options));
  std::thread watcher;
  const bool reads = arguments.tensors && !arguments.registered.empty();
  if (reads && !arguments.options.cast) {  // a cast changes the bytes
    watcher = std::thread(watch, std::cref(worker), std::cref(arguments.registered));
  }
  serve(worker, arguments);
  stop = true;
  if (watcher.joinable()) watcher.join();
  return 0;
}
